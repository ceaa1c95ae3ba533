"""Keeping chats and models in another folder.

A change is written down now and carried out at the next start, before anything in the folder is open.  What is taken
along is copied, never moved: until the copy is whole the old folder stays in use, and afterwards it is left as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QCoreApplication

from app.services.single_instance import LOCK_NAME
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import new_folder, private_file, write_private
from engine.common.paths import chosen_data_dir_file, config_dir, data_dir, standard_data_dir
from engine.common.sizes import rounded_down, rounded_up

translate = QCoreApplication.translate

_CHUNK_BYTES = 4 * 2**20
_UNFINISHED = ".switchyard-unfinished"
_OURS = ("chats.sqlite3", "models")


@dataclass(frozen=True, slots=True)
class FolderChange:
    """A change for the next start: where to, and whether chats and models come along."""

    target: Path
    copy: bool


def holds_our_data(folder: Path) -> bool:
    """Whether Switchyard has been there before, so that its data there is simply used."""
    return any((folder / name).exists() for name in _OURS) and not (folder / _UNFINISHED).exists()


def plan_change(change: FolderChange) -> None:
    """Writes down what the next start does.

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
    """What the next start will do, if anything."""
    try:
        plan = json.loads(_plan_file().read_text(encoding="utf-8"))
        return FolderChange(Path(plan["target"]), bool(plan["copy"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cancel_change() -> None:
    """The next start keeps the present folder."""
    _plan_file().unlink(missing_ok=True)


def carry_out(change: FolderChange, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> bool:
    """Copies if wanted and makes the target the data folder; False if it was cancelled.

    Args:
        on_progress: hears `done` of `total` bytes.

    Raises:
        EngineError: `DISK_FULL` or `INVALID_REQUEST`; the present folder then stays in use.
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
    """Makes `folder` the data folder from now on."""
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
    mark = target / _UNFINISHED  # a copy that broke off is not taken for data
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
