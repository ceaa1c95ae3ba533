"""A model dragged into the window or opened with it: a GGUF file, or a folder with a checkpoint."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from PySide6.QtCore import QMimeData

SUFFIX = ".gguf"
_CONFIG = "config.json"
_MOST_ENTRIES = 1000
"""Of a folder, looked through while it is dragged."""


def dropped_model(data: QMimeData) -> Path | None:
    """The model that is dragged, if it is one alone."""
    urls = data.urls()
    return model_at(Path(urls[0].toLocalFile())) if len(urls) == 1 and urls[0].isLocalFile() else None


def model_at(path: Path) -> Path | None:
    if path.suffix.lower() == SUFFIX or (path / _CONFIG).is_file():
        return path
    try:
        with os.scandir(path) as entries:
            found = any(entry.name.lower().endswith(SUFFIX) for entry in itertools.islice(entries, _MOST_ENTRIES))
    except OSError:
        return None  # a file of another kind, or a folder that cannot be read
    return path if found else None
