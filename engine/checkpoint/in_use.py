"""Who uses a model: many processes may read it at once, but it is moved or removed only by one that is alone with it.

Everybody puts a locked file of their own into the model's folder of locks, in the data folder: a store of another
program may be read-only, and is not ours to write to. Only then they look at the others' files, so of two that begin at
the same time at least one sees the other. A lock dies with its process; a file without a lock means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.usage import where
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, locked_file, new_folder, remove_unlocked
from engine.common.paths import data_dir

_READER, _ALONE = "reader-", "alone-"


@contextlib.contextmanager
def reading(model: Path) -> Iterator[None]:
    """Uses the checkpoint at a path for the block.

    Where no lock can be kept (a read-only data folder), it is used all the same.

    Raises:
        EngineError: `BUSY` while it is being moved or removed.
    """
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(_announced(model, _READER))
        except OSError:
            mine = None
        if mine is not None and _others(mine, _ALONE):
            raise EngineError(ErrorCode.BUSY, f"{model.name} is being moved or removed: wait until that is done.")
        yield


@contextlib.contextmanager
def alone_with(model: Path) -> Iterator[None]:
    """Makes sure that nobody else uses the checkpoint at a path, nor begins to during the block.

    Raises:
        EngineError: `BUSY` if somebody does.
    """
    with contextlib.ExitStack() as held:
        with disk_errors_explained(data_dir()):
            mine = held.enter_context(_announced(model, _ALONE))
        if _others(mine, _ALONE):
            raise EngineError(
                ErrorCode.BUSY, f"{model.name} is being moved or removed already: wait until that is done."
            )
        if _others(mine, _READER):
            raise EngineError(
                ErrorCode.BUSY,
                f"{model.name} is in use: unload it in Switchyard's window, end other programs with it, and try again.",
            )
        yield


def _locks_of(model: Path) -> Path:
    return data_dir() / "locks" / where(model)


@contextlib.contextmanager
def _announced(model: Path, prefix: str) -> Iterator[Path]:
    """A locked file of ours in the model's folder of locks."""
    folder, path = _locks_of(model), None
    new_folder(folder)
    try:
        with locked_file(folder, prefix) as path:
            yield path
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _others(mine: Path, prefix: str) -> bool:
    """Whether others hold such a lock; files of killed processes are removed."""
    files = [file for file in mine.parent.iterdir() if file.name.startswith(prefix) and file != mine]
    return any(not remove_unlocked(file) for file in files)
