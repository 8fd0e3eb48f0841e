"""A gallery on FastAPI: browsers upload to Mediamill itself, and a webhook says what came of it.

This application never touches the bytes of a picture. It opens a slot for each, and the page sends
the file straight to the storage.
"""

from __future__ import annotations

import html
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

from mediamill.client import AsyncClient, Media, NotFound, Problem, SignatureMismatch, unwrap

PAGE: Final = Path(__file__).with_name("page.html").read_text("utf-8")
SECRET: Final = os.environ["GALLERY_WEBHOOK_SECRET"]
DATABASE: Final = os.environ.get("GALLERY_DATABASE", "gallery.sqlite3")
ENDED: Final = ("ready", "failed", "expired")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One client for all requests; it reads MEDIAMILL_URL and MEDIAMILL_API_KEY."""
    with sqlite3.connect(DATABASE) as database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS pictures (id TEXT PRIMARY KEY, name TEXT NOT NULL,"
            " state TEXT NOT NULL, sequence INTEGER NOT NULL DEFAULT 0, problem TEXT)"
        )
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


class NewPicture(BaseModel):
    """What the page knows of a file before it sends it."""

    name: str = Field(max_length=255)
    size: int = Field(gt=0)
    content_type: str = "application/octet-stream"


@app.post("/pictures", status_code=201)
async def open_picture(wanted: NewPicture, request: Request) -> dict[str, Any]:
    """A slot for the page to fill: `upload` has method, address and headers of the one request."""
    slot = await _client(request).media.open(
        wanted.size, filename=wanted.name, content_type=wanted.content_type, recipe="web"
    )
    _write("INSERT INTO pictures (id, name, state) VALUES (?, ?, ?)", slot.id, wanted.name, "new")
    return {"id": slot.id, "upload": slot.upload.as_dict()}


@app.post("/pictures/{id}/uploaded", status_code=202)
async def uploaded(id: str, request: Request) -> dict[str, str]:
    """The page says that it has sent the file. Without this Mediamill finds it too, but later."""
    _known(id)
    media = await _client(request).media.complete(id)
    return {"state": media.state}


@app.post("/hooks", status_code=204)
async def told(request: Request) -> Response:
    """What Mediamill tells. It may come twice and in any order: the sequence sorts that out."""
    try:
        event = unwrap(await request.body(), request.headers, secret=SECRET)
    except SignatureMismatch as error:
        raise HTTPException(401, str(error)) from None
    if event.type.startswith("media.") and "state" in event.data:
        _write(
            "UPDATE pictures SET state = ?, sequence = ?, problem = ?"
            " WHERE id = ? AND sequence < ?",
            event.data["state"],
            event.data["sequence"],
            (event.data.get("error") or {}).get("title"),
            event.data["media_id"],
            event.data["sequence"],
        )
    return Response(status_code=204)


@app.get("/")
async def index() -> HTMLResponse:
    rows = _read("SELECT * FROM pictures ORDER BY id DESC LIMIT 50")
    items = "".join(
        f'<li><a href="/pictures/{row["id"]}">{html.escape(row["name"])}</a> {row["state"]}</li>'
        for row in rows
    )
    return HTMLResponse(PAGE.replace("<!-- pictures -->", items))


@app.get("/pictures/{id}")
async def picture(id: str, request: Request) -> HTMLResponse:
    """The status of a picture, and at the end the picture: in the best format that the browser
    knows, by addresses that were signed for this page."""
    row = _known(id)
    text = f"<h1>{html.escape(row['name'])}</h1><p>{row['state']}</p>"
    if row["problem"]:
        text += f"<p>{html.escape(row['problem'])}</p>"
    if row["state"] == "ready":
        text += _shown(await _client(request).media.get(id))
    refresh = {} if row["state"] in ENDED else {"Refresh": "2"}
    return HTMLResponse(f"<!doctype html><title>Gallery</title>{text}", headers=refresh)


@app.exception_handler(Problem)
async def refused(_: Request, error: Exception) -> JSONResponse:
    """What Mediamill refuses goes on to the page, in Mediamill's words: they are for people."""
    assert isinstance(error, Problem)
    status = 404 if isinstance(error, NotFound) else 503 if error.retryable else 400
    said = {"code": error.code, "detail": error.detail, "advice": error.advice}
    return JSONResponse(said, status)


def _shown(media: Media) -> str:
    """A <picture> of the widest variants; the last one is what every browser knows."""
    widest = max((v.width or 0 for v in media.variants), default=0)
    best = [v for v in media.variants if v.width == widest]
    sources = "".join(
        f'<source type="{v.content_type}" srcset="{html.escape(v.url)}">' for v in best[:-1]
    )
    image = f'<img src="{html.escape(best[-1].url)}" width="{widest}" height="{best[-1].height}">'
    return f"<picture>{sources}{image}</picture>"


def _client(request: Request) -> AsyncClient:
    client: AsyncClient = request.app.state.client
    return client


def _known(id: str) -> sqlite3.Row:
    rows = _read("SELECT * FROM pictures WHERE id = ?", id)
    if not rows:
        raise HTTPException(404, "There is no such picture.")
    return rows[0]


def _read(statement: str, *args: object) -> list[sqlite3.Row]:
    with sqlite3.connect(DATABASE) as database:
        database.row_factory = sqlite3.Row
        return database.execute(statement, args).fetchall()


def _write(statement: str, *args: object) -> None:
    with sqlite3.connect(DATABASE) as database:
        database.execute(statement, args)
