"""The folder of a server's link to its engine: nobody else may enter it, and no killed server leaves one for ever."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from engine.common.files import try_lock

PREFIX = "switchyard-link-"


class LinkFolder:
    """A new folder, after those of servers that were killed have been removed.

    It is locked as long as its process lives; where folders cannot be locked, none is removed.

    Attributes:
        place: of the link in it; None on Windows, whose pipes have no file.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self.place: str | None = None
        if os.name == "posix":
            remove_abandoned()
            while self._descriptor < 0:
                self.place = os.path.join(self._made(), "engine")

    def _made(self) -> str:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        descriptor = os.open(folder, os.O_RDONLY)
        try_lock(descriptor)
        if os.path.isdir(folder):
            self._descriptor = descriptor
        else:  # another server that started just then took it for abandoned
            os.close(descriptor)
        return folder

    def leave(self) -> None:
        """Gives up the lock, once the folder has been removed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned() -> None:
    """Removes folders of this user that no living process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        try:
            if try_lock(descriptor):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def forget_link(address: str) -> None:
    """Removes what is left of a link whose server has ended."""
    if os.name == "posix" and address:
        shutil.rmtree(os.path.dirname(address), ignore_errors=True)
