"""Small files that are whole, whatever happens while they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_kept(path: Path, text: str) -> None:
    """Puts a text in a file, in place of what was there; its folder is made.

    Raises:
        OSError: it could not be written; what was there is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
