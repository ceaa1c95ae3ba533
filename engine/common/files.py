"""Atomic writes, private files, locks, and disk errors that a user can fix.

A crash, a full disk or a power cut leaves the old file or the new one, never half of either. The user's own files
(chats, settings, journals, logs) are readable by the user alone, whatever the umask: files 0600 in folders 0700. On
Windows these modes do not exist; the folders are in the user's profile, which other users cannot read. A lock on an
open file dies with its process, so a killed process never blocks another.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.paths import chosen_data_dir
from engine.common.sizes import rounded_down, rounded_up

if TYPE_CHECKING:
    from filelock import FileLock

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_LOCK_POLL_S, _LOOK_AGAIN_S = 0.02, 0.002
_HELD_OPEN = (5, 32)
"""Windows' codes for a file that another program reads just now: access denied, sharing violation."""
_REPLACE_TRIES, _REPLACE_AGAIN_S = 20, 0.05
_SHORT = 40
"""Characters of the name that the hidden file repeats: the name itself may be as long as the disk allows."""


class NewFile:
    """A hidden file beside `path`, written first and then renamed to it; removed if that does not happen.

    While it is written, other users cannot read it. Afterwards it takes the mode of the file that it replaces, or the
    umask's default.

    Args:
        private: keep it readable by the user alone.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, path: Path, *, private: bool = False) -> None:
        self._target, self._private = path, private
        self.path = path.with_name(f".{path.name[:_SHORT]}.{uuid.uuid4().hex[:12]}.part")
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE))

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.unlink(missing_ok=True)

    def take_place(self) -> None:
        """Renames the file, complete and closed, to `path`.

        Raises:
            OSError: the old file is unchanged.
        """
        self.finish()
        replace_file(self.path, self._target)

    def finish(self) -> None:
        """Flushes the file, complete and closed, to the disk, and sets its mode."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        if os.name != "nt":
            self.path.chmod(_FILE_MODE if self._private else self._usual_mode())

    def take_free_name(self, path: Path) -> None:
        """Renames the finished file within its folder, if that name is free.

        Raises:
            FileExistsError: the name is taken, even if only just now.
        """
        if os.name == "nt":  # where a rename never replaces a file
            self.path.rename(path)
            return
        try:
            os.link(self.path, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            self.path.replace(path)

    def _usual_mode(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_IMODE(self._target.stat().st_mode)
        # Reading the umask changes it for every thread; an empty file shows it too.
        probe = self.path.with_suffix(".mode")
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            return stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
            probe.unlink()


def replace_file(new: Path, old: Path) -> None:
    """Renames a file to another's name; on Windows, waits for those who only read the old one just then.

    Raises:
        OSError: the old file is unchanged.
    """
    for _ in range(_REPLACE_TRIES):
        try:
            new.replace(old)
        except PermissionError as error:
            if getattr(error, "winerror", None) not in _HELD_OPEN:
                raise
            time.sleep(_REPLACE_AGAIN_S)
        else:
            return
    new.replace(old)


def remove_left_over(path: Path) -> None:
    """Removes the `NewFile` that a killed process left for `path`.  The caller must be the only writer of `path`."""
    name = re.compile(re.escape(f".{path.name[:_SHORT]}.") + r"[0-9a-f]{12}\.(part|mode)")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if name.fullmatch(file.name):
                file.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file where the user wants it, replacing any old one and making its folder if necessary.

    Text is written as UTF-8, with its line endings unchanged.

    Raises:
        OSError: the old file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as new:
        _fill(new, content)


def write_private(path: Path, content: str | bytes) -> None:
    """Like `write_whole`, for a file of Switchyard's: it and its folder are readable by the user alone.

    Raises:
        OSError: the old file is unchanged.
    """
    private_folder(path.parent)
    with NewFile(path, private=True) as new:
        _fill(new, content)


def _fill(new: NewFile, content: str | bytes) -> None:
    new.path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    new.take_place()


def private_folder(folder: Path) -> None:
    """Like `new_folder`, for a folder of Switchyard's: an existing one becomes private too.

    A data folder that the user chose may hold other things as well, so it keeps its mode; the files in it are private
    all the same.
    """
    new_folder(folder)
    if folder != chosen_data_dir():
        _restrict(folder, _FOLDER_MODE)


def new_folder(folder: Path) -> None:
    """Creates a folder and its missing parents for the user alone; an existing folder is left unchanged."""
    if folder.is_dir():
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing or [folder]):  # raises if a file is in the way
        try:
            each.mkdir(mode=_FOLDER_MODE)
        except FileExistsError:
            if not each.is_dir():  # else another thread or process was faster
                raise
        else:
            _restrict(each, _FOLDER_MODE)


def private_file(path: Path) -> None:
    """Creates an empty file for the user alone, if there is none, before a library would create a public one."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE))
    _restrict(path, _FILE_MODE)


def make_private(folders: Iterable[Path]) -> None:
    """Makes the folders, if they exist, and the files in them private: an earlier version did not."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder.is_dir():
                private_folder(folder)
                if folder != chosen_data_dir():
                    restrict_files(folder.iterdir())


def is_no_file(path: Path, file_suffixes: tuple[str, ...] = ()) -> bool:
    """Whether a pipe or device lies there, or a folder with a name that ends as a file's; links are followed."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    pipe = stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    return pipe or (stat.S_ISDIR(mode) and path.name.endswith(file_suffixes))


def restrict_files(paths: Iterable[Path]) -> None:
    """Makes these files private if they belong to the user; skips anything that is not a file."""
    for path in paths:
        _restrict(path, _FILE_MODE)


def _restrict(path: Path, mode: int) -> None:
    """Removes other users' rights; another user's file and the target of a link are left alone."""
    if os.name == "nt":
        return
    with contextlib.suppress(OSError):
        now = path.lstat().st_mode
        wanted = stat.S_ISDIR if mode == _FOLDER_MODE else stat.S_ISREG
        if stat.S_ISLNK(now):
            now = path.stat().st_mode if mode == _FOLDER_MODE else now
        if wanted(now) and stat.S_IMODE(now) & 0o077:
            path.chmod(stat.S_IMODE(now) & mode)


class PrivateLog(RotatingFileHandler):
    """A log for the user alone, created with its first entry; its folder must exist."""

    def __init__(self, path: Path, *, max_bytes: int, older: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=older, encoding="utf-8", delay=True)

    def _open(self) -> TextIOWrapper:
        private_file(Path(self.baseFilename))
        return super()._open()


def take_lock(path: Path, patience_s: float = 0.0, cancelled: CancelCheck = never_cancelled) -> FileLock | None:
    """The lock at `path`, which dies with its process, if it becomes free in time (below 0: whenever it does).

    Raises:
        OSError: the file cannot be created.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=_FILE_MODE, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(patience_s, _LOCK_POLL_S, cancel_check=cancelled)
    except Timeout:
        return None
    return lock


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock.  Who tries to take it in the moment of a look needs some patience."""
    for is_last in (False, True):
        try:
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            return False
        try:
            if try_lock(descriptor):
                unlock(descriptor)
                return False
        finally:
            os.close(descriptor)
        if not is_last:  # another may just have looked
            time.sleep(_LOOK_AGAIN_S)
    return True


def try_lock(descriptor: int) -> bool:
    """Takes the lock on an open file if it is free; returns whether it did."""
    from filelock import lock_descriptor

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:
        return False


def unlock(descriptor: int) -> None:
    from filelock import unlock_descriptor

    with contextlib.suppress(OSError):
        unlock_descriptor(descriptor)


@contextlib.contextmanager
def holding(path: Path, patience_s: float, busy: str) -> Iterator[None]:
    """The lock at `path`, while the body runs.

    Args:
        patience_s: how long to wait for another process that has it.
        busy: the sentence if it keeps it.

    Raises:
        OSError: its folder cannot be written to.
    """
    lock = take_lock(path, patience_s)
    if lock is None:
        raise EngineError(ErrorCode.BUSY, busy)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def locked_file(folder: Path, prefix: str) -> Iterator[Path]:
    """A new file `PREFIX....lock` in a folder, locked by this process until the block ends; the caller deletes it.

    Raises:
        OSError: the folder cannot be written to.
    """
    lock = None
    while lock is None:  # whoever removes the files of killed processes may lock or delete it first
        path = folder / f"{prefix}{uuid.uuid4().hex[:12]}.lock"
        lock = take_lock(path)
    try:
        yield path
    finally:
        lock.release()


def remove_unlocked(lock_path: Path) -> bool:
    """Removes a lock file that a killed process left; returns whether nobody holds it."""
    try:
        with lock_path.open("r+b") as lock:
            if not try_lock(lock.fileno()):
                return False
            if sys.platform == "win32":  # where an open file cannot be deleted
                lock.close()
            lock_path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


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
    """Fails before a write that will not fit."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise EngineError(
            ErrorCode.DISK_FULL,
            f"{rounded_up(needed_bytes + _SPARE_BYTES)} needed on the disk of {folder.parent}, but only "
            f"{rounded_down(free)} free: make room, or set SWITCHYARD_HOME to a folder on another disk.",
        )
