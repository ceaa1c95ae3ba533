"""Names for files that are written whole before they take their place."""

from __future__ import annotations

import contextlib
import re
import uuid
from pathlib import Path


def beside(path: Path) -> Path:
    """A hidden file in the folder of `path`, which nobody has: on the same disk, so that it can be renamed to it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")


def remove_left_over(path: Path) -> None:
    """Removes what somebody who was killed left `beside` this path; only for whoever alone may write to it."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.part")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if name.fullmatch(file.name):
                file.unlink(missing_ok=True)
