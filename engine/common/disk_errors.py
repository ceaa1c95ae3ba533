"""Disk errors, reported so that a user can fix them."""

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
"""Left free for other programs."""


def is_full(error: OSError) -> bool:
    """Whether the disk is full or the user's quota is used up."""
    return error.errno in _FULL


@contextlib.contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """Turns an OSError raised inside the block into an EngineError about `folder`."""
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
    """Fails before a write that will not fit.

    Raises:
        EngineError: `DISK_FULL`.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise EngineError(
            ErrorCode.DISK_FULL,
            f"{rounded_up(needed_bytes + _SPARE_BYTES)} needed on the disk of {folder.parent}, but only "
            f"{rounded_down(free)} free: make room, or set SWITCHYARD_HOME to a folder on another disk.",
        )
