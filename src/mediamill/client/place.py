"""Where the API is, and with which key."""

from __future__ import annotations

import os


def place(url: str | None, api_key: str | None) -> tuple[str, str]:
    """Address and key as given, else as the environment names them. Raises ValueError."""
    address = url or os.environ.get("MEDIAMILL_URL")
    key = api_key or os.environ.get("MEDIAMILL_API_KEY")
    if not address:
        raise ValueError("no address: give `url`, or set MEDIAMILL_URL")
    if not key:
        raise ValueError("no key: give `api_key`, or set MEDIAMILL_API_KEY")
    return address.rstrip("/"), key
