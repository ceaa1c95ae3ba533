"""What a disk can do to us, said so that a person can fix it."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_SPARE_BYTES = 50 * 10**6
"""Left free for everybody else."""


def is_full(error: OSError) -> bool:
    """Whether it says that there is no room: on the disk, or in what its user may have of it."""
    return error.errno in _FULL


@contextlib.contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """Turns an OSError of the work inside into an EngineError about `folder`."""
    try:
        yield
    except OSError as error:
        if is_full(error):
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
            f"{rounded_up(needed_bytes + _SPARE_BYTES)} are needed on the disk of {folder.parent}, where only "
            f"{rounded_down(free)} are free: make room, or set SWITCHYARD_HOME to a folder on another disk.",
        )
