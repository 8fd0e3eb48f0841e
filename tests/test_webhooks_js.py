"""Signatures check with the JavaScript libraries that receivers use."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from mediamill import webhooks

pytestmark = [pytest.mark.extra, pytest.mark.timeout(180)]

SCRIPT = """
import fs from 'fs';
import standard from 'standardwebhooks';
import { Webhook as Svix } from 'svix';
const { secret, headers, body } = JSON.parse(fs.readFileSync(0));
for (const Webhook of [standard.Webhook, Svix]) {
  new Webhook(secret).verify(body, headers);
  let refused = false;
  try { new Webhook(secret).verify(JSON.stringify(JSON.parse(body)), headers); }
  catch { refused = true; }
  if (!refused) throw new Error('other bytes were accepted');
}
"""


def test_javascript_libraries_accept_the_bytes_and_no_others(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    assert npm, "this test needs npm"
    assert node, "this test needs node"
    (tmp_path / "package.json").write_text('{"private": true}')
    packages = ["standardwebhooks@1.1.1", "svix@1"]
    subprocess.run(
        [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "check.mjs").write_text(SCRIPT)
    old, new = webhooks.new_secret("hmac"), webhooks.new_secret("hmac")
    body = '{ "n": 1.0, "text": "ü \\u2028" }'
    headers = webhooks.sign(
        "hmac", [old, new], message_id="evt_1", timestamp=int(time.time()), body=body.encode()
    )
    for secret in (old, new):
        given = {
            "secret": webhooks.shown_secret("hmac", secret),
            "headers": headers,
            "body": body,
        }
        subprocess.run(
            [node, "check.mjs"], cwd=tmp_path, input=json.dumps(given).encode(), check=True
        )
