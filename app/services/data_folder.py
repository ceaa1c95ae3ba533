"""Moving the data folder.

A change is scheduled and carried out at the next start, before any file in the folder is open.  Data is copied, never
moved: the old folder stays in use until the copy is complete, and is not changed afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QCoreApplication

from app.services.single_instance import LOCK_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import is_no_file, new_folder, private_file, write_private
from engine.common.paths import (
    cache_dir,
    chosen_data_dir_file,
    config_dir,
    data_dir,
    jobs_dir,
    log_dir,
    sessions_dir,
    standard_data_dir,
)
from engine.common.sizes import rounded_down, rounded_up

translate = QCoreApplication.translate

_CHUNK_BYTES = 4 * 2**20
_UNFINISHED = ".switchyard-unfinished"
_FILE_SUFFIXES = (".json", ".jsonl", ".log", ".lock", ".sqlite3", ".sqlite3-wal", ".sqlite3-shm", ".txt")
_OURS = ("chats.sqlite3", "models")


@dataclass(frozen=True, slots=True)
class FolderChange:
    """A change for the next start: the new folder, and whether to copy chats and models to it."""

    target: Path
    copy: bool


def what_is_no_file() -> Path | None:
    """Something else in the place of one of our files, such as a pipe, which whoever opened it would wait for; None if
    there is nothing of the kind."""
    return next((odd for folder in _own_folders() for odd in _no_files_in(folder)), None)


def _own_folders() -> Iterator[Path]:
    yield config_dir()  # first: a file in it says where the others are
    yield from (jobs_dir(), sessions_dir(), cache_dir(), log_dir(), data_dir())
    large = {"models", "banks", "converted", "parts", "jobs", "sessions"}
    with contextlib.suppress(OSError):
        yield from [path for path in data_dir().iterdir() if path.name not in large and path.is_dir()]


def _no_files_in(folder: Path) -> Iterator[Path]:
    named = (config_dir(), data_dir(), log_dir())  # elsewhere a folder may be called as it likes
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if not entry.is_file(follow_symlinks=False) and is_no_file(path, _FILE_SUFFIXES if folder in named else ()):
                yield path


def holds_our_data(folder: Path) -> bool:
    return any((folder / name).exists() for name in _OURS) and not (folder / _UNFINISHED).exists()


def plan_change(change: FolderChange) -> None:
    """Schedules the change for the next start.

    Raises:
        EngineError: `INVALID_REQUEST`, if the folder cannot be used.
    """
    target = change.target
    current = data_dir()
    if target.resolve() == current.resolve():
        cancel_change()
        return
    if change.copy and (target.resolve().is_relative_to(current.resolve())):
        raise _refused(
            translate("DataFolder", "{0} is inside the current data folder; choose a folder outside it.").format(target)
        )
    try:
        new_folder(target)
        probe = target / f".switchyard-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
        write_private(_plan_file(), json.dumps({"target": str(target), "copy": change.copy}))
    except OSError as error:
        reason = error.strerror or str(error)
        raise _refused(
            translate("DataFolder", "{0} cannot be written to ({1}); choose another folder.").format(target, reason)
        ) from error


def planned_change() -> FolderChange | None:
    try:
        plan = json.loads(_plan_file().read_text(encoding="utf-8"))
        return FolderChange(Path(plan["target"]), bool(plan["copy"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cancel_change() -> None:
    _plan_file().unlink(missing_ok=True)


def carry_out(change: FolderChange, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> bool:
    """Copies the data if requested and switches to the target folder; False if it was cancelled.

    Args:
        on_progress: called with the bytes `done` of `total`.

    Raises:
        EngineError: `DISK_FULL` or `INVALID_REQUEST`; the present folder stays in use.
    """
    source = data_dir()
    if change.copy and source.is_dir() and not holds_our_data(change.target):
        try:
            if not _copy(source, change.target, on_progress, cancelled):
                return False
        except OSError as error:
            reason = error.strerror or str(error)
            raise _refused(
                translate("DataFolder", "The data could not be copied to {0} ({1}); {2} stays in use.").format(
                    change.target, reason, source
                )
            ) from error
    use_folder(change.target)
    cancel_change()
    return True


def use_folder(folder: Path) -> None:
    if folder == standard_data_dir():
        chosen_data_dir_file().unlink(missing_ok=True)
    else:
        write_private(chosen_data_dir_file(), f"{folder}\n")


def _copy(source: Path, target: Path, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> bool:
    files = [path for path in source.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    total = sum(path.stat().st_size for path in files)
    new_folder(target)
    free = shutil.disk_usage(target).free
    if total > free:
        raise EngineError(
            ErrorCode.DISK_FULL,
            translate("DataFolder", "{0} has {1} free, but {2} are to be copied; {3} stays in use.").format(
                target, rounded_down(free), rounded_up(total), source
            ),
        )
    mark = target / _UNFINISHED  # marks an interrupted copy, so that it is not taken for data
    mark.touch(0o600)
    done = 0
    for path in files:
        place = target / path.relative_to(source)
        new_folder(place.parent)
        private_file(place)
        with path.open("rb") as reader, place.open("wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                if cancelled():
                    return False
                writer.write(chunk)
                done += len(chunk)
                on_progress(done, total)
            writer.flush()
            os.fsync(writer.fileno())
        shutil.copystat(path, place)
    mark.unlink()
    return True


def _plan_file() -> Path:
    return config_dir() / "data-folder-next.json"


def _refused(sentence: str) -> EngineError:
    return EngineError(ErrorCode.INVALID_REQUEST, sentence)
