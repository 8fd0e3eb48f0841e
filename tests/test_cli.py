"""The command line: what goes to stdout, what to stderr, and how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from standardwebhooks.webhooks import Webhook
from tests import make_media
from tests.api.conftest import Served, serving
from tests.sink import LOCAL, answering, listening

from mediamill import db, ids, jobs, listen
from mediamill.cli import COMMANDS, SERVER, main, submit
from mediamill.cli.remote import Exit
from mediamill.client import OutputProgress, Progress
from mediamill.client.blocking import JobCalls, MediaCalls
from mediamill.failures import Code, Problem

pytestmark = pytest.mark.anyio

Run = Callable[..., Any]


@pytest.fixture
async def served(database: str, tmp_path: Path) -> AsyncIterator[Served]:
    more = {"egress_allow_networks": LOCAL}
    async with serving(database, tmp_path / "server", own_address=True, **more) as made:
        yield made


@pytest.fixture
def cli(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the server, as somebody with its key and a home of their own."""
    monkeypatch.setenv("MEDIAMILL_URL", served.url)
    monkeypatch.setenv("MEDIAMILL_API_KEY", served.api.token)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    async def run(*args: str, exit_code: int = 0, input: bytes | None = None) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, main, args, input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == exit_code, result.output
        return result

    return run


async def dead_letter(served: Served) -> str:
    """The job of a media that used all its attempts up."""
    body = await served.api.queued()
    held = await served.api.claimed(body)
    async with db.transaction(served.api.pool) as connection:
        await jobs.fail(
            connection,
            held,
            Problem(Code.WORKER_CRASHED),
            dead_letter=True,
            retention_seconds=60,
            record=jobs.Record("last words", []),
        )
    return str(body["job"]["id"])


def modules_loaded_by(*args: str) -> tuple[set[str], str]:
    """What a command imports beyond Python's start, and what it prints."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom mediamill.cli import main\n"
        f"try: main({list(args)!r})\nexcept SystemExit: pass\n"
        "print(*(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split()), done.stdout


def test_help_loads_click_and_next_to_nothing_else() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport click\n"
        "inner = {'z': click.Command('z', help='z')}\n"
        "try: click.Group('x', help='y', commands=inner)(['--help'])\n"
        "except SystemExit: pass\nprint(*(set(sys.modules) - before), file=sys.stderr)"
    )
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, said = modules_loaded_by("--help")
    assert loaded - set(bare.stderr.split()) == {"mediamill", "mediamill.cli"}
    for name in COMMANDS:
        assert f"\n  {name} " in said


@pytest.mark.parametrize("name", ["submit", "jobs", "keys", "top", "webhooks"])
def test_the_help_of_a_command_loads_no_library_of_the_server(name: str) -> None:
    loaded, _ = modules_loaded_by(name, "--help")
    heavy = {"asyncio", "pydantic", "rich", "httpx2", "asyncpg", "fastapi", "mediamill.config"}
    assert loaded & heavy == set()


WITHOUT_THE_SERVER = """
import sys
from mediamill.cli import SERVER, main

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SERVER:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
main(prog_name="mediamill")
"""


async def test_the_client_and_its_commands_work_without_the_server_installed(
    served: Served, tmp_path: Path
) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    there = {"MEDIAMILL_URL": served.url, "MEDIAMILL_API_KEY": served.api.token}
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0")

    async def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", WITHOUT_THE_SERVER, *args],
            cwd=tmp_path,
            env=env | more,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    sent = await run("submit", "a.jpg", "-o", "ids", **there)
    assert sent.returncode == 0, sent.stderr
    assert ids.decode(ids.MEDIA, sent.stdout.strip())
    for args in (["jobs", "list"], ["doctor"], ["api"]):
        refused = await run(*args)
        assert refused.returncode == 1
        assert "pip install 'mediamill[server]'" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_the_libraries_of_the_server_are_those_of_its_extra() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    extra = tomllib.loads(text)["project"]["optional-dependencies"]["server"]
    names = {re.split(r"[>=<;\[ ]", line)[0].replace("-", "_") for line in extra}
    # The client's HTTP library brings the one, FastAPI the other.
    assert names - {"httpcore2"} | {"starlette"} == SERVER


def test_every_command_has_help_that_fits_a_screen() -> None:
    def check(command: Any, path: list[str]) -> int:
        shown = CliRunner().invoke(main, [*path, "--help"], terminal_width=100)
        assert shown.exit_code == 0
        assert len(shown.output.splitlines()) <= 40, path
        assert command.help, path
        if not isinstance(command, click.Group):
            return 1
        context = click.Context(command)
        names = command.list_commands(context)
        return 1 + sum(check(command.get_command(context, n), [*path, n]) for n in names)

    assert check(main, []) > 50


def test_the_list_of_commands_says_what_each_says_itself() -> None:
    """And nothing that a module offers as a command is left out."""
    context = click.Context(main)
    listed = {main.get_command(context, name) for name in COMMANDS}
    for name, (_, says) in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        own = " ".join((command.help or "").split())
        assert own.lower().startswith(says.split(",")[0].rstrip(".").lower()), (says, own)
    reached: list[click.Command | None] = list(listed)
    for command in reached:
        if isinstance(command, click.Group):
            reached += command.commands.values()
    for module in {module for module, _ in COMMANDS.values()}:
        found = vars(import_module(f"mediamill.cli.{module}")).values()
        assert {c for c in found if isinstance(c, click.Command)} <= set(reached)


def test_every_exit_code_is_explained_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "commands.md").read_text("utf-8")
    for code in Exit:
        assert f"| {code.value} | {code.meaning} |" in text


async def test_files_are_submitted_and_shown_in_every_form(
    served: Served, cli: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0 a")
    (folder / "b.jpg").write_bytes(b"\xff\xd8\xff\xe0 b")
    result = await cli("submit", str(folder), "--metadata", "album=x", "-o", "ids")
    made = result.stdout.split()
    assert len(made) == 2
    assert all(ids.decode(ids.MEDIA, m) for m in made)
    assert result.stderr == ""
    sent = await cli("submit", "-", "-o", "jsonl", input=b"\xff\xd8\xff\xe0 c")
    third = json.loads(sent.stdout)["id"]
    listed = json.loads((await cli("media", "list", "-o", "json")).stdout)
    assert [m["id"] for m in listed] == [third, *made[::-1]]
    table = (await cli("media", "list", "--limit", "2")).stdout.splitlines()
    assert table[0].split() == ["ID", "STATE", "FILE", "RECIPE", "ERROR", "AGE"]
    assert len(table) == 3
    body = json.loads((await cli("media", "get", made[0], "-o", "json")).stdout)
    assert body == await served.api.read(made[0])
    assert body["metadata"] == {"album": "x"}
    assert "queued" in (await cli("media", "timeline", made[0])).stdout
    await cli("submit", str(tmp_path / "none.jpg"), exit_code=Exit.USAGE)


async def test_groups_dry_runs_and_originals(served: Served, cli: Run, tmp_path: Path) -> None:
    dead = await dead_letter(served)
    (group,) = json.loads((await cli("dlq", "groups", "-o", "json")).stdout)
    assert (group["code"], group["count"], group["newest"]) == ("worker_crashed", 1, dead)
    assert "worker_crashed" in (await cli("dlq", "groups")).stdout
    ready = await served.api.ready({"w8.webp": b"0123456789"})
    path = (await cli("media", "original", ready["id"], "--into", str(tmp_path))).stdout.strip()
    assert Path(path).stat().st_size == ready["size"]
    async with db.acquire(served.api.pool) as connection:
        await connection.execute(
            "UPDATE media SET kind = 'image', width = 1000, height = 500 WHERE id = $1",
            ids.decode(ids.MEDIA, ready["id"]),
        )
    planned = await cli("recipes", "dry-run", ready["id"], "web", "-o", "ids")
    assert {"w320.avif", "w640.jpg"} <= set(planned.stdout.split())
    file = tmp_path / "mine.json"
    file.write_text('{"name": "mine", "version": 1, "image": {"widths": [4], "formats": []}}')
    await cli("recipes", "dry-run", ready["id"], str(file), exit_code=Exit.USAGE)
    await cli("recipes", "dry-run", ready["id"], str(tmp_path / "none.json"), exit_code=Exit.USAGE)
    await cli("recipes", "dry-run", "med_nothing", "web", exit_code=Exit.USAGE)


async def test_subtitles_lie_beside_a_film(served: Served, cli: Run, tmp_path: Path) -> None:
    body = await served.api.queued()
    srt = tmp_path / "film.srt"
    srt.write_bytes("1\n00:00:01,000 --> 00:00:02,000\nПривет, мир\n".encode("windows-1251"))
    await cli("media", "subtitles", "add", body["id"], "ru", str(srt), "--label", "Russian")
    listed = json.loads((await cli("media", "subtitles", "list", body["id"], "-o", "json")).stdout)
    assert [(s["language"], s["label"], s["charset"], s["cues"]) for s in listed] == [
        ("ru", "Russian", "windows-1251", 1)
    ]
    srt.write_bytes(b"no subtitles")
    await cli("media", "subtitles", "add", body["id"], "ru", str(srt), exit_code=Exit.USAGE)
    await cli("media", "subtitles", "remove", body["id"], "ru")
    await cli("media", "subtitles", "remove", body["id"], "ru", exit_code=Exit.NOT_FOUND)


async def test_the_exit_code_says_what_helps(
    served: Served, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = await served.api.queued()
    result = await cli("media", "wait", body["id"], "--timeout", "0.2", exit_code=Exit.TIMEOUT)
    assert result.stdout == ""
    assert "still queued" in result.stderr
    nobody = ids.encode(ids.MEDIA, ids.new())
    await cli("media", "get", nobody, exit_code=Exit.NOT_FOUND)
    job = body["job"]["id"]
    await cli("jobs", "replay", job, exit_code=Exit.CONFLICT)
    await cli("jobs", "cancel", job)
    result = await cli("media", "wait", body["id"], exit_code=Exit.FAILED)
    assert "canceled" in result.stderr
    await cli("jobs", "wait", job, exit_code=Exit.FAILED)
    result = await cli("media", "list", "--state", "redy", exit_code=Exit.USAGE)
    assert "state: 'redy' is not one of them" in result.stderr
    await cli("queues", "list", exit_code=Exit.NOT_ALLOWED)
    monkeypatch.setenv("MEDIAMILL_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("mediamill.client.steps.pause", lambda *_: 0.0)
    result = await cli("jobs", "list", exit_code=Exit.TEMPORARY)
    assert result.stdout == ""


async def test_results_are_watched_and_downloaded(served: Served, cli: Run, tmp_path: Path) -> None:
    ready = await served.api.ready({"w8.webp": b"0123456789"})
    result = await cli("media", "download", ready["id"], "--into", str(tmp_path / "out"))
    assert result.stdout.strip() == str(tmp_path / "out" / "w8.webp")
    assert (tmp_path / "out" / "w8.webp").read_bytes() == b"0123456789"
    await cli("media", "wait", ready["id"])
    await cli("media", "delete", ready["id"], "--yes")
    await cli("media", "get", ready["id"], exit_code=Exit.NOT_FOUND)


async def test_an_operator_sees_and_steers_queues(
    served: Served, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await served.api.new_key(served.api.tenant, "admin", "operate")
    monkeypatch.setenv("MEDIAMILL_API_KEY", key)
    await cli("queues", "cap", "video", "2")
    await cli("queues", "pause", "video")
    rows = json.loads((await cli("queues", "list", "-o", "json")).stdout)
    video = next(row for row in rows if row["queue"] == "video")
    assert (video["paused"], video["concurrency"]) == (True, 2)
    await cli("queues", "resume", "video")
    await cli("queues", "cap", "video", "none")
    await cli("queues", "cap", "video", "some", exit_code=Exit.USAGE)
    await cli("queues", "pause", "videos", exit_code=Exit.NOT_FOUND)
    assert (await cli("queues", "list", "-o", "ids")).stdout.split()[0]
    assert "QUEUE" in (await cli("top", "--once")).stdout
    await cli("workers", "list")
    await cli("workers", "drain", "nobody", exit_code=Exit.NOT_FOUND)


async def test_dead_letters_are_shown_replayed_and_discarded(served: Served, cli: Run) -> None:
    dead = [await dead_letter(served) for _ in range(4)]
    listed = (await cli("dlq", "list", "--code", "worker_crashed", "-o", "ids")).stdout.split()
    assert listed == dead[::-1]
    assert (await cli("dlq", "list", "--code", "internal", "-o", "ids")).stdout == ""
    shown = json.loads((await cli("dlq", "show", dead[0], "-o", "json")).stdout)
    assert shown["attempts"][0]["log_tail"] == "last words"
    await cli("dlq", "replay", exit_code=Exit.USAGE)
    await cli("dlq", "replay", dead[0], "--all", exit_code=Exit.USAGE)
    await cli("dlq", "replay", dead[0])
    await cli("dlq", "discard", dead[1])
    # The first canary fails again: the rest is left alone.
    canary = asyncio.create_task(cli("dlq", "replay", "--canary", exit_code=Exit.FAILED))
    async with served.client() as http:
        for _ in range(200):
            if (await http.get(f"/v1/jobs/{dead[3]}")).json()["state"] == "queued":
                break
            await asyncio.sleep(0.05)
        await http.post(f"/v1/jobs/{dead[3]}/cancel")
    await canary
    assert (await cli("dlq", "list", "-o", "ids")).stdout.split() == [dead[2]]
    result = await cli("dlq", "replay", "--all")
    assert result.stderr.startswith("1 are queued again")


async def test_recipes_are_listed_shown_compared_and_checked(cli: Run, tmp_path: Path) -> None:
    assert "web" in (await cli("recipes", "list", "-o", "ids")).stdout.split()
    shown = json.loads((await cli("recipes", "show", "web")).stdout)
    assert shown["name"] == "web"
    assert (await cli("recipes", "diff", "web", "1", "1")).stdout == ""
    file = tmp_path / "r.json"
    file.write_text(json.dumps(shown | {"name": "own", "version": 1}))
    assert (await cli("recipes", "validate", str(file))).stderr == "valid\n"
    file.write_text('{"name": "own", "images": {}}')
    result = await cli("recipes", "validate", str(file), exit_code=Exit.USAGE)
    assert "/images" in result.stderr
    file.write_text("[]")
    await cli("recipes", "validate", str(file), exit_code=Exit.USAGE)


async def test_endpoints_and_deliveries(cli: Run) -> None:
    made = json.loads(
        (
            await cli(
                "webhooks", "add", "http://127.0.0.1:9/in", "--types", "media.*", "-o", "json"
            )
        ).stdout
    )
    assert made["secret"].startswith("whsec_")
    assert (await cli("webhooks", "list", "-o", "ids")).stdout.split() == [made["id"]]
    delivery = (await cli("webhooks", "test", made["id"], "-o", "ids")).stdout.strip()
    listed = (await cli("webhooks", "deliveries", made["id"], "-o", "ids")).stdout.split()
    assert listed == [delivery]
    await cli("webhooks", "resend", delivery)
    assert "webhook.test" in (await cli("webhooks", "delivery", delivery)).stdout
    await cli("webhooks", "disable", made["id"])
    await cli("webhooks", "test", made["id"], exit_code=Exit.CONFLICT)
    await cli("webhooks", "enable", made["id"])
    flags = ["--types", "media.ready", "--to", "http://127.0.0.1:9/new"]
    await cli("webhooks", "change", made["id"], *flags)
    changed = json.loads((await cli("webhooks", "get", made["id"], "-o", "json")).stdout)
    assert (changed["types"], changed["url"]) == (["media.ready"], "http://127.0.0.1:9/new")
    await cli("webhooks", "change", made["id"], "--types", "all")
    changed = json.loads((await cli("webhooks", "get", made["id"], "-o", "json")).stdout)
    assert changed["types"] is None
    await cli("webhooks", "change", made["id"], exit_code=Exit.USAGE)
    await cli("webhooks", "inbox", exit_code=Exit.NOT_FOUND)
    rotated = json.loads((await cli("webhooks", "rotate", made["id"], "-o", "json")).stdout)
    assert rotated["secret"] != made["secret"]
    await cli("webhooks", "recover", made["id"], "--since", "2026-01-01")
    await cli("webhooks", "delete", made["id"])
    assert (await cli("webhooks", "list", "-o", "ids")).stdout == ""


async def test_an_event_of_your_choice_is_signed_and_sent(cli: Run) -> None:
    secret = listen.fresh_secret()
    async with listening(answering(200, 500)) as sink:
        flags = ["--forward-to", sink.url, "--secret", secret]
        await cli("trigger", "media.failed", *flags, "--code", "resource_limit")
        headers, body = sink.parsed()
        told = Webhook(secret).verify(body, headers)
        assert told["data"]["error"]["code"] == "resource_limit"
        await cli("trigger", "media.ready", *flags, exit_code=Exit.UNEXPECTED)
        await cli("trigger", "media.redy", *flags, exit_code=Exit.USAGE)
        await cli("trigger", "media.ready", *flags, "--code", "internal", exit_code=Exit.USAGE)


def test_settings_are_shown_with_their_origin_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mill.toml"
    file.write_text("max_attempts = 3\n")
    monkeypatch.setenv("MEDIAMILL_CONFIG", str(file))
    monkeypatch.setenv("MEDIAMILL_DATABASE_URL", "postgresql://me:hidden@db/x")
    monkeypatch.setenv("MEDIAMILL_DATA_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["config", "show", "--origin"])
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()}
    assert rows["max_attempts"] == ["3", str(file)]
    assert rows["database_url"] == ["postgresql://me:***@db/x", "MEDIAMILL_DATABASE_URL"]
    assert rows["lease_seconds"] == ["7.0", "default"]
    assert "hidden" not in result.stdout


@pytest.mark.timeout(120)
def test_a_file_is_processed_without_any_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIAMILL_DATA_DIR", str(tmp_path / "none"))
    wrong_name = tmp_path / "photo.mp4"  # what it is decides, not what it is called
    wrong_name.write_bytes(make_media.save(make_media.texture((64, 48)), "JPEG"))
    flags = ["--into", str(tmp_path / "out")]
    result = CliRunner().invoke(main, ["run", str(wrong_name), *flags])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["media"]["width"], made["media"]["height"]) == (64, 48)
    assert made["media"]["preview"]["blurhash"]
    assert "photo.mp4: encode" in result.stderr
    for variant in made["variants"]:
        data = Path(variant["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == variant["sha256"]
    assert made["variants"]
    assert not (tmp_path / "none").exists()
    junk = tmp_path / "junk.jpg"
    junk.write_bytes(b"no picture")
    result = CliRunner().invoke(main, ["run", str(junk), "--into", str(tmp_path / "no")])
    assert result.exit_code == Exit.FAILED
    assert "unsupported_format" in result.stderr
    assert not (tmp_path / "no").exists()
    result = CliRunner().invoke(main, ["run", str(junk), "--recipe", "nowhere"])
    assert result.exit_code == Exit.USAGE


async def test_a_shell_is_offered_what_the_server_has(
    served: Served, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = await served.api.queued()
    dead = await dead_letter(served)

    async def offered(*words: str, begun: str = "") -> list[str]:
        monkeypatch.setenv("_MEDIAMILL_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["mediamill", *words, begun]))
        monkeypatch.setenv("COMP_CWORD", str(len(words) + 1))
        result = await asyncio.to_thread(
            CliRunner().invoke, main, [], prog_name="mediamill", complete_var="_MEDIAMILL_COMPLETE"
        )
        return [line.partition(",")[2] for line in result.stdout.splitlines() if line]

    assert body["id"] in await offered("media", "get")
    assert body["job"]["id"] in await offered("jobs", "cancel", begun="job_")
    assert await offered("jobs", "cancel", begun="med_") == []
    assert await offered("dlq", "replay") == [dead]
    assert await offered("submit", "--recipe", begun="w") == ["web"]
    assert "worker_crashed" in await offered("dlq", "list", "--code", begun="worker")
    assert await offered("trigger", begun="media.re") == ["media.ready"]
    monkeypatch.setenv("MEDIAMILL_URL", "http://127.0.0.1:9")
    assert await offered("media", "get") == []


async def test_ctrl_c_says_how_to_come_back_once_the_bars_are_gone(
    served: Served, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def closing(name: str, *, shown: bool) -> Iterator[None]:
        try:
            yield
        finally:
            click.echo("a bar is closed", err=True)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "_bar", closing)
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"\xff\xd8\xff\xe0")
    files = [str(tmp_path / name) for name in ("a.jpg", "b.jpg")]
    with monkeypatch.context() as broken:
        broken.setattr(MediaCalls, "wait", interrupted)
        result = await cli("submit", *files, "--watch", exit_code=Exit.INTERRUPTED)
        said = result.stderr.splitlines()
        made = [m["id"] for m in json.loads((await cli("media", "list", "-o", "json")).stdout)]
        assert said[-2:] == [f"  mediamill media wait {id_}" for id_ in made[::-1]]
        assert (
            "a bar is closed" not in said[said.index("It goes on without you. Come back with:") :]
        )
    with monkeypatch.context() as broken:
        broken.setattr(JobCalls, "wait", interrupted)
        result = await cli("jobs", "wait", "job_x", exit_code=Exit.INTERRUPTED)
        assert result.stderr.endswith("  mediamill jobs wait job_x\n")
    with monkeypatch.context() as broken:
        broken.setattr(MediaCalls, "submit", interrupted)
        result = await cli("submit", *files, exit_code=Exit.INTERRUPTED)
        assert "go on with the same command" in result.stderr


async def test_lists_are_filtered_and_addresses_are_fetched(served: Served, cli: Run) -> None:
    await served.api.queued()
    dead = await dead_letter(served)
    listed = await cli("jobs", "list", "--code", "worker_crashed", "-o", "ids")
    assert listed.stdout.split() == [dead]
    assert (await cli("media", "list", "--kind", "video", "-o", "ids")).stdout == ""
    failed = await cli("media", "list", "--code", "worker_crashed", "--recipe", "web", "-o", "ids")
    assert len(failed.stdout.split()) == 1
    fetched = await cli("submit", "http://127.0.0.1:9/a.jpg", "-o", "json")
    assert json.loads(fetched.stdout)[0]["filename"] == "a.jpg"
    await cli("submit", "http://169.254.169.254/", exit_code=Exit.USAGE)
    key = await served.api.new_key(served.api.tenant, "admin", "operate")
    seen = json.loads((await cli("top", "--once", "--api-key", key, "-o", "jsonl")).stdout)
    assert {"at", "queues", "workers", "running"} == set(seen)


def test_what_does_not_come_from_the_api_has_every_form_too(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDIAMILL_DATABASE_URL", database)
    monkeypatch.setenv("MEDIAMILL_DATA_DIR", str(tmp_path))

    def run(*args: str) -> str:
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        return result.stdout

    bare = run("keys", "create", "--name", "bare").strip()
    assert bare.startswith("mpk_")
    made = json.loads(run("keys", "create", "--scope", "media:read", "-o", "json"))
    assert made["key"].startswith("mpk_")
    assert made["scopes"] == ["media:read"]
    kept = json.loads(run("keys", "list", "-o", "json"))
    assert {k["name"]: k["scopes"] for k in kept} == {
        "bare": ["admin"],
        "command line": ["media:read"],
    }
    assert {k["state"] for k in kept} == {"active"}
    ids_ = run("keys", "list", "-o", "ids").split()
    run("keys", "revoke", ids_[0])
    assert "revoked" in run("keys", "list")
    settings = {row["name"]: row for row in json.loads(run("config", "show", "-o", "json"))}
    assert settings["database_url"]["origin"] == "MEDIAMILL_DATABASE_URL"
    assert run("estimates", "report", "-o", "json") == "[]\n"


def test_progress_is_plain_lines_without_a_terminal_and_bars_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def outputs(percent: float) -> tuple[OutputProgress, ...]:
        return (
            OutputProgress(name="720p", percent=percent, speed=2.5, seconds_left=8),
            OutputProgress(name="360p", percent=2 * percent),
        )

    said = [
        Progress("upload", "upload", 100.0),
        Progress("process", "encode", 30.0, outputs=outputs(20.0)),
        Progress("process", "encode", 60.0, outputs=outputs(40.0)[:1]),
        Progress("process", "ready", 100.0),
    ]
    with submit._bar("film.mp4", shown=True) as moved:
        for each in said:
            moved(each)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "film.mp4: upload 100 %"
    assert lines[1] == "film.mp4: encode 30 % (720p 20 %, 360p 40 %)"
    assert lines[-1] == "film.mp4: ready 100 %"
    assert not any("\x1b" in line for line in lines)

    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with submit._bar("film.mp4", shown=True) as moved:
        for each in said[:3]:
            moved(each)
    drawn = capsys.readouterr().err
    for text in ("film.mp4", "  720p", "40 %", "2.5× 8 s", "  360p", "100 %"):
        assert text in drawn
    assert "\x1b[3" not in drawn, "a color in spite of NO_COLOR"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_for_the_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completions", shell])
    assert "_MEDIAMILL_COMPLETE" in result.stdout
