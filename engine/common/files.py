"""Whole files and private ones.

A crash, a full disk or a power cut leaves the old file or the new one, never half of either.  What is the user's own
(chats, settings, journals, logs) is for the user alone, whatever the umask: files 0600 in folders 0700.  On Windows the
folders are the user's profile's, which other users cannot read anyway, and there are no such modes to set.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from engine.common.paths import chosen_data_dir

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_SHORT = 40
"""Characters of a name that a hidden file beside it repeats: the name may be as long as its disk allows."""


class NewFile:
    """A hidden file in the folder of `path`, to be written and then put in its place; without that it is removed.

    While it is written nobody else may read it.  Then it takes the mode of the file that it replaces, or the one that
    the umask gives to new files.

    Args:
        private: it stays for the user alone.

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
        """Puts the file, which is complete and closed, in its place.

        Raises:
            OSError: what was there is still there.
        """
        self.finish()
        self.path.replace(self._target)

    def finish(self) -> None:
        """Puts what is in the file, which is complete and closed, safely on the disk, and gives it its mode.

        Raises:
            OSError: it could not be done.
        """
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        if os.name != "nt":
            self.path.chmod(_FILE_MODE if self._private else self._usual_mode())

    def take_free_name(self, path: Path) -> None:
        """Gives the finished file another name in its folder, if nobody has that.

        Raises:
            FileExistsError: somebody has, if only since a moment ago.
            OSError: it could not be done.
        """
        if os.name == "nt":  # where a rename replaces nothing
            self.path.rename(path)
            return
        try:
            os.link(self.path, path)
        except FileExistsError:
            raise
        except OSError:  # no links on this file system
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            self.path.replace(path)

    def _usual_mode(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return stat.S_IMODE(self._target.stat().st_mode)
        # The umask cannot be asked for without changing it for every thread; an empty file tells it as well.
        probe = self.path.with_suffix(".mode")
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            return stat.S_IMODE(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
            probe.unlink()


def remove_left_over(path: Path) -> None:
    """Removes what a process that was killed left of a `NewFile` for `path`; only for whoever alone may write to it."""
    name = re.compile(re.escape(f".{path.name[:_SHORT]}.") + r"[0-9a-f]{12}\.(part|mode)")
    with contextlib.suppress(OSError):
        for file in path.parent.iterdir():
            if name.fullmatch(file.name):
                file.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file where a user wants it, in place of what was there, making its folder if need be.

    Text is written as UTF-8 with the line ends that it has.

    Raises:
        OSError: what was there is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as new:
        _fill(new, content)


def write_private(path: Path, content: str | bytes) -> None:
    """As `write_whole`, for a file of ours: it and its folder are for the user alone.

    Raises:
        OSError: what was there is still there.
    """
    private_folder(path.parent)
    with NewFile(path, private=True) as new:
        _fill(new, content)


def _fill(new: NewFile, content: str | bytes) -> None:
    new.path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    new.take_place()


def private_folder(folder: Path) -> None:
    """As `new_folder`, for a folder of ours: one that is there becomes private, too.

    A data folder that the user chose may hold other things as well, so that it keeps its mode; what lies in it is
    private all the same.

    Raises:
        OSError: it cannot be made.
    """
    new_folder(folder)
    if folder != chosen_data_dir():
        _restrict(folder, _FOLDER_MODE)


def new_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for the user alone; one that is there is left as it is.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_dir():
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing or [folder]):  # where a file is in the way, this says so
        with contextlib.suppress(FileExistsError) if missing else contextlib.nullcontext():
            each.mkdir(mode=_FOLDER_MODE)
            _restrict(each, _FOLDER_MODE)


def private_file(path: Path) -> None:
    """Makes an empty file for the user alone, if there is none, for a library that would make a public one.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE))
    _restrict(path, _FILE_MODE)


def make_private(folders: Iterable[Path]) -> None:
    """Takes from other users what an earlier version let them read: the folders, if they exist, and files in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if folder.is_dir():
                private_folder(folder)
                if folder != chosen_data_dir():
                    restrict_files(folder.iterdir())


def restrict_files(paths: Iterable[Path]) -> None:
    """Makes those that are files private, as far as they are ours."""
    for path in paths:
        _restrict(path, _FILE_MODE)


def _restrict(path: Path, mode: int) -> None:
    """Takes every right from others; a file of somebody else stays as it is, and so does what a link points to."""
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
    """A log for the user alone, made with its first entry; its folder must be there."""

    def __init__(self, path: Path, *, max_bytes: int, older: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=older, encoding="utf-8", delay=True)

    def _open(self) -> TextIOWrapper:
        private_file(Path(self.baseFilename))
        return super()._open()
