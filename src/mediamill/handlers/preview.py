"""The preview of a video: size, length and placeholder within moments, while the encode still
waits."""

from __future__ import annotations

from mediamill.handlers import Done, Outcome, Work, look, picture, poster
from mediamill.media import Description
from mediamill.probe import MediaInfo

_SIDE = 320
_FRAMES = 24


async def handle(work: Work) -> Outcome:
    """Look at the file and one frame of it. Its failure moves nothing: the main job tells why."""
    info = await look.look(work)
    if not isinstance(info, MediaInfo) or info.video is None:
        return Done(result={"preview": False})
    path = await work.fetch()
    width, height = picture.still_size(info.video, _SIDE)
    await work.enter("preview")
    still = await poster.take(work, path, info, width, height, name="preview", frames=_FRAMES)
    await work.show_preview(
        still.preview,
        Description(
            width=info.video.width,
            height=info.video.height,
            duration_seconds=info.duration_seconds,
        ),
    )
    return Done(result={"preview": True})
