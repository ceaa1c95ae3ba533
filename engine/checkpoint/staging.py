"""Staging folders: filled under a hidden name, renamed into place, cleaned up after a crash.

A staging folder is `.staging-XXXX` with a locked `.staging-XXXX.lock` beside it. The lock dies with its process, so an
unlocked one marks a killed process's leftovers: the next staging in the same place removes them.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from engine.common.files import locked_file, new_folder, try_lock

_PREFIX = ".staging-"
_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """An empty folder inside `parent`, removed afterwards unless `put_in_place` moved it.

    Raises:
        OSError: if `parent` cannot be written.
    """
    new_folder(parent)
    sweep(parent)
    with _locked_name(parent) as folder:
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Renames a staged `folder` to `target`, replacing an old one (through a trash folder).

    Another process may do the same at the same time: the last rename wins. `target` is never incomplete, but absent for
    a moment while an old one is replaced.

    Raises:
        OSError: if it cannot be renamed.
    """
    for _attempt in range(10):
        if target.exists() or target.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                discard(target)
        try:
            folder.rename(target)
        except OSError as error:
            # Another process put its folder there between our two renames, and may have removed it since.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not target.exists():
                raise
        else:
            return
    raise OSError(f"{target} is being replaced by other processes over and over")


def discard(path: Path) -> None:
    """Renames `path` in one step, then deletes it, so that a partly deleted one is never seen.

    Raises:
        OSError: if it cannot be moved.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    with _locked_name(path.parent) as trash:
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Deletes staging folders that killed processes left in `parent`; those in use stay."""
    for lock_path in parent.glob(f"{_PREFIX}*{_LOCK_SUFFIX}"):
        with contextlib.suppress(OSError), lock_path.open("r+b") as lock:
            if not try_lock(lock.fileno()):
                continue
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            if sys.platform == "win32":  # where an open file cannot be deleted
                lock.close()
            if not lock_path.with_suffix("").exists():
                lock_path.unlink()


@contextlib.contextmanager
def _locked_name(parent: Path) -> Iterator[Path]:
    """An unused name in `parent` whose lock file this process holds."""
    lock_path = None
    try:
        with locked_file(parent, _PREFIX) as lock_path:
            yield lock_path.with_suffix("")
    finally:
        if lock_path is not None and not lock_path.with_suffix("").exists():
            with contextlib.suppress(OSError):
                lock_path.unlink(missing_ok=True)
