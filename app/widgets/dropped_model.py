"""A model dragged into the window: a GGUF file, or a folder with a checkpoint."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QMimeData

SUFFIX = ".gguf"
_CONFIG = "config.json"


def dropped_model(data: QMimeData) -> Path | None:
    """The model that is dragged, if it is one alone."""
    urls = data.urls()
    if len(urls) != 1 or not urls[0].isLocalFile():
        return None
    path = Path(urls[0].toLocalFile())
    return path if path.suffix.lower() == SUFFIX or (path / _CONFIG).is_file() else None
