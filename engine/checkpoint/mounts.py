"""Whether the disk that a model folder lies on is connected.

Of an unplugged disk only the place is left where it was mounted: an empty folder, or none. A library that began there
would lie on another disk, and be hidden when the right one comes back. So where each folder's disk was mounted is kept
beside the settings, and a folder that is empty or gone, and on another disk than before, is not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import private_folder, write_private
from engine.common.paths import config_dir, models_dir
from engine.common.untrusted import parse_json, read_untrusted

_MOST_BYTES = 2**20


def note_connected(folder: Path) -> None:
    """Remembers where the disk of a model folder is mounted, if anything is in it.  May wait for that disk."""
    noted, mount = _noted(), _mount_of(folder)
    if _is_filled(folder) and noted.get(str(folder)) != mount:
        with contextlib.suppress(OSError):
            private_folder(config_dir())
            write_private(_file(), json.dumps({**noted, str(folder): mount}, indent=2) + "\n")


def forget_disk(folder: Path) -> None:
    """The user means the folder as it is now, on whatever disk."""
    noted = _noted()
    if noted.pop(str(folder), None) is not None:
        with contextlib.suppress(OSError):
            write_private(_file(), json.dumps(noted, indent=2) + "\n")


def trouble_with(folder: Path) -> str:
    """Why a model folder is not used now, in a sentence; empty if nothing is wrong.  May wait for its disk.

    The library's own folder may be gone: it is made when it is needed.
    """
    if _is_filled(folder):
        return ""
    is_there, mount = folder.is_dir(), _noted().get(str(folder), "")
    if mount and mount != _mount_of(folder):
        state = "is empty" if is_there else "is not there"
        anew = "To begin anew without it, add the folder again"
        return f"The model folder {folder} {state}, and was on the disk at {mount}: connect that disk. {anew}."
    if not is_there and folder != models_dir():
        return f"The model folder {folder} is not there: connect its disk, or take the folder off the list."
    return ""


def check_connected(folder: Path) -> None:
    """Raises if something is wrong with a model folder.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if trouble := trouble_with(folder):
        raise EngineError(ErrorCode.INVALID_REQUEST, trouble)


@dataclass(frozen=True, slots=True)
class Room:
    """How much a model folder can still take.

    Attributes:
        free: bytes; None, and `trouble` says why in a sentence, if the folder is not used now.
        is_elsewhere: whether it is on another disk than the library's own folder.
    """

    folder: Path
    free: int | None
    trouble: str = ""
    is_elsewhere: bool = False


def rooms_of(folders: Sequence[Path], within_s: float = 2.0) -> tuple[Room, ...]:
    """The room in each of these folders; a disk that does not answer in time counts as away."""
    found: dict[Path, Room] = {}

    def look(folder: Path) -> None:
        trouble = trouble_with(folder)
        place = next((each for each in (folder, *folder.parents) if each.exists()), folder)  # it may not be made yet
        with contextlib.suppress(OSError):
            elsewhere = _mount_of(folder) != _mount_of(models_dir())
            found[folder] = Room(folder, None if trouble else shutil.disk_usage(place).free, trouble, elsewhere)

    threads = [threading.Thread(target=look, args=(folder,), daemon=True) for folder in folders]
    for thread in threads:
        thread.start()
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return tuple(found.get(each) or Room(each, None, f"The disk of {each} does not answer.") for each in folders)


def _is_filled(folder: Path) -> bool:
    """Whether anything is in it; a folder that cannot be read is not empty."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _mount_of(folder: Path) -> str:
    """Where the disk of a folder is mounted, links followed; where the folder is gone, the disk of what is left."""
    try:
        place = folder.resolve()
    except (OSError, RuntimeError):  # a link to itself
        place = folder
    return str(next((each for each in (place, *place.parents) if os.path.ismount(each)), place))


def _file() -> Path:
    return config_dir() / "model-folder-disks.json"


def _noted() -> dict[str, str]:
    try:
        raw = parse_json(read_untrusted(_file(), _MOST_BYTES))
        return {folder: mount for folder, mount in raw.items() if isinstance(folder, str) and isinstance(mount, str)}
    except (OSError, ValueError, AttributeError):
        return {}
