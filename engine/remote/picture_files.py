"""Files of pictures, as they are sent to other servers: unchanged, if they are what servers read."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from engine.common.chat import Picture, media_of
from engine.common.errors import EngineError, ErrorCode
from engine.common.foreign import reason
from engine.common.sizes import about

MOST_PICTURES = 8
"""In one message."""
MOST_PICTURE_BYTES = 16 * 10**6
MOST_ALL_BYTES = 24 * 10**6
"""Of the pictures of one request, which goes to the engine's process as one line."""


def read_pictures(paths: Sequence[Path]) -> tuple[Picture, ...]:
    """Pictures from their files.

    Raises:
        EngineError: `INVALID_REQUEST`: one cannot be read, is none, or is too large; or they are too many.
    """
    if len(paths) > MOST_PICTURES:
        raise _wrong(f"{len(paths)} pictures are too many for one message: give up to {MOST_PICTURES}.")
    found = tuple(map(_read, paths))
    nbytes = sum(len(each.data) for each in found) * 3 // 4
    if nbytes > MOST_ALL_BYTES:
        raise _wrong(f"The pictures have {about(nbytes)}, and one message takes {about(MOST_ALL_BYTES)}: send fewer.")
    return found


def _read(path: Path) -> Picture:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_PICTURE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"The picture {path} cannot be read ({reason(error)}): check its name.") from None
    media = media_of(data)
    if not media:
        raise _wrong(f"{path} is no picture that servers read: give a PNG, JPEG, WebP or GIF file.")
    if len(data) > MOST_PICTURE_BYTES:
        raise _wrong(f"The picture {path} is larger than {about(MOST_PICTURE_BYTES)}: make it smaller.")
    return Picture(media, base64.b64encode(data).decode("ascii"))


def _wrong(message: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, message)
