"""What a disk can do to us, said so that a person can mend it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.errors import EngineError, ErrorCode

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SPARE_BYTES = 50 * 10**6
"""Left free for everybody else."""


@contextlib.contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """Turns an OSError of the work inside into an EngineError about `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise EngineError(ErrorCode.DISK_FULL, f"The disk of {folder} is full: make room and try again.") from error
        where = error.filename or folder
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"Cannot read or write {where} ({error.strerror or error}): check its permissions and the disk.",
        ) from error


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse before writing what will not fit.

    Raises:
        EngineError: `DISK_FULL`.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise EngineError(
            ErrorCode.DISK_FULL,
            f"{(needed_bytes + _SPARE_BYTES) // 10**6} MB are needed on the disk of {folder.parent}, where only "
            f"{free // 10**6} MB are free: make room, or set SWITCHYARD_HOME to a folder on another disk.",
        )
