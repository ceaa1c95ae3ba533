"""Names for files that are written whole before they take their place."""

from __future__ import annotations

import uuid
from pathlib import Path


def beside(path: Path) -> Path:
    """A hidden file in the folder of `path`, which nobody has: on the same disk, so that it can be renamed to it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.part")
