"""What was computed of prompts and answers, kept on disk: where, whether and how much of it, and how it is removed.

Chats go on at once after a restart with what is kept.  It is made of what was written in them, so it is as private as
they are: nobody but the user can read it, and it can be turned off and cleared.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.common.files import Lock, new_folder, private_folder, write_private
from engine.common.paths import cache_dir, config_dir

SUFFIX = ".kept"
PART = ".part"
STANDARD_BYTES = 4 * 10**9
LEAST_BYTES, MOST_BYTES = 100 * 10**6, 10**12
LEFT_FREE_BYTES = 2 * 10**9
"""Of the disk, left to others: a faster answer is worth less than a full disk costs."""
_PATIENCE_S = 2.0
_OURS = re.compile(r"[0-9a-f]{32}\.(kept|part)")


@dataclass(frozen=True, slots=True)
class KeptContextSettings:
    """What the user wants of it.

    Attributes:
        on_disk: whether anything is kept on disk.
        disk_bytes: the most that it takes there, of all models together.
    """

    on_disk: bool = True
    disk_bytes: int = STANDARD_BYTES


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One file, and when it was last of use."""

    path: Path
    nbytes: int
    used_ns: int


def kept_context_dir() -> Path:
    """Where it lies, for all models; not created here."""
    return cache_dir() / "context"


def kept_context_settings() -> KeptContextSettings:
    """As saved; what is missing or makes no sense is as if never set."""
    usual = KeptContextSettings()
    try:
        saved = json.loads(_settings_file().read_text(encoding="utf-8"))
        on_disk, disk_bytes = saved["on_disk"], saved["disk_bytes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return usual
    if type(on_disk) is not bool or type(disk_bytes) is not int:
        return usual
    return KeptContextSettings(on_disk, min(max(disk_bytes, LEAST_BYTES), MOST_BYTES))


def save_kept_context_settings(settings: KeptContextSettings) -> None:
    """Holds from now on, for programs that run as well.

    Raises:
        OSError: it cannot be written.
    """
    write_private(_settings_file(), json.dumps(asdict(settings)) + "\n")


def kept_files(folder: Path) -> list[KeptFile]:
    """Finished ones, in any order; none where the folder cannot be read."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and _OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):  # another program may have removed it just now
                    status = entry.stat(follow_symlinks=False)
                    found.append(KeptFile(Path(entry.path), status.st_size, status.st_mtime_ns))
    return found


def kept_context_bytes() -> int:
    """What it takes on disk now."""
    return sum(file.nbytes for file in kept_files(kept_context_dir()))


def clear_kept_context() -> int:
    """Removes all of it; returns how many bytes that were.  Programs that run only compute again what they need.

    Raises:
        OSError: some of it cannot be removed.
    """
    folder, removed = kept_context_dir(), 0
    if not folder.is_dir():
        return 0
    with changing(folder):
        for file in kept_files(folder):
            file.path.unlink(missing_ok=True)
            removed += file.nbytes
        remove_parts(folder)
    return removed


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[bool]:
    """Within it no other program adds or removes files here; it may get false, if one takes very long.

    Raises:
        OSError: the folder cannot be written to.
    """
    new_folder(folder)
    private_folder(folder)
    lock = Lock(folder / "lock")
    is_taken = lock.take(_PATIENCE_S)
    try:
        yield is_taken
    finally:
        if is_taken:
            lock.release()


def remove_parts(folder: Path) -> None:
    """Removes what killed programs left half written; only within `changing`."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(PART) and _OURS.fullmatch(entry.name):
                Path(entry.path).unlink(missing_ok=True)


def room_on_disk(folder: Path, held: int) -> int:
    """The most bytes that may be kept in a folder that holds `held` of them: by the setting and by the free space."""
    settings = kept_context_settings()
    if not settings.on_disk:
        return 0
    return max(0, min(settings.disk_bytes, held + shutil.disk_usage(folder).free - LEFT_FREE_BYTES))


def _settings_file() -> Path:
    return config_dir() / "kept-context.json"
