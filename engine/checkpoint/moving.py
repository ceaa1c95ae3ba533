"""Moves a model to another disk, and copies one out of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.library import LibraryEntry


def move(
    model: str,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LibraryEntry:
    """Moves a model of the library into another model folder, with its prepared experts and what is known of it.

    On the same disk it is renamed; to another one it is copied, compared byte for byte by its checksums, put in place
    in one step, and only then removed from where it was.  A kill at any moment leaves it whole in one of the places.

    Args:
        on_progress: called with `done` and `total` bytes.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `BUSY` (in use); `INVALID_REQUEST` (the name is taken there, or the model
            belongs to another program); `DISK_FULL`; `CHECKPOINT_DAMAGED` (the copy or the original is not intact).
        RequestCancelled: `cancelled()` returned true; the model stays where it was.
    """
    raise NotImplementedError


def export(
    model: str,
    folder: Path,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Copies a model's files into a new folder of its name inside `folder`; returns that.

    Raises:
        EngineError, RequestCancelled: as `move`; nothing is left behind.
    """
    raise NotImplementedError
