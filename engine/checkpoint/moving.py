"""Moves a model to another disk, and copies one out of the library."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.checkpoint.gguf import SUFFIX
from engine.checkpoint.importing import copy_file, discard, staging_folder, sweep
from engine.checkpoint.library import (
    LibraryEntry,
    converted_of,
    describe,
    exclusive_use,
    files_of,
    move_usage,
    reading,
    show,
    total_bytes,
    where,
)
from engine.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    counted,
    damaged_files,
    read_manifest,
    sha256_of,
    write_manifest,
)
from engine.checkpoint.model_directories import OWN, Found, take_model_folder
from engine.checkpoint.names import folder_name, starter_folder
from engine.checkpoint.ownership import is_ours, named, others_beside, own_files, owner
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import models_dir

Progress = Callable[[int, int], None]
_SAME_TIME_S = 2.0


def move(
    model: str, folder: Path, on_progress: Progress = lambda *_: None, cancelled: CancelCheck = lambda: False
) -> LibraryEntry:
    """Moves a model of the library into another model folder, with what was converted of it and what is known of it.

    On the same disk it is renamed; to another one it is copied, read again and compared by its checksums, put in place
    in one step, and only then removed from where it was.  A kill at any moment leaves it whole in at least one of the
    places; the same call ends what was begun.

    Args:
        model: its name, or its path as it is listed.
        folder: becomes a model folder if it is none.
        on_progress: called with `done` and `total` bytes, each byte counted when it is written and when it is read.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `BUSY` (in use); `INVALID_REQUEST` (the name is taken there, or it is not in the
            library); `DISK_FULL`; `CHECKPOINT_DAMAGED` (the original, or its copy, is not what the manifest says).
        RequestCancelled: `cancelled()` returned true; the model stays where it was.
    """
    found = _of_library(model)
    source = found.path
    if source == starter_folder():
        raise EngineError(ErrorCode.INVALID_REQUEST, "The starter model is built in the library and stays there.")
    folder = take_model_folder(folder)
    with disk_errors_explained(folder):
        for place in {source.parent, folder, models_dir()}:  # what a killed move left
            sweep(place)
    target = folder / source.name
    if source.is_symlink() or source.resolve() == target.resolve():
        why = "is a link to another folder" if source.is_symlink() else f"is in {folder} already"
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{found.name} {why}: there is nothing to move.")
    with exclusive_use(source), exclusive_use(target), disk_errors_explained(folder):
        if read_manifest(source) is None:  # to be known as the library's in the other folder
            write_manifest(source, Manifest(f"moved from {source}", ()))
        manifest = read_manifest(source)
        if manifest is None or manifest != read_manifest(target):
            if target.name.casefold() in {entry.name.casefold() for entry in folder.iterdir()}:
                raise EngineError(
                    ErrorCode.INVALID_REQUEST,
                    f"{folder} already has a model called {target.name!r}: remove that first.",
                )
            if not _renamed(source, target):
                _check_is_copied_whole(source)
                with staging_folder(folder) as staging:
                    _copy(files_of(source), source, staging, manifest, on_progress, cancelled)
                    _put(staging, source, target)
        elif damaged_files(target, manifest, on_progress=on_progress, cancelled=cancelled):
            raise _damaged(target, "was put there before")
        # Else it was killed before it could remove the original, which may have been loaded since.
        _take_along(source, target)
        if source.exists():
            _discard_copied(source, target)
    return describe(target, target.name)


def export(
    model: str, folder: Path, on_progress: Progress = lambda *_: None, cancelled: CancelCheck = lambda: False
) -> Path:
    """Copies a model's files, with a manifest, into a new folder of its name inside `folder`; returns that.

    Raises:
        EngineError: as `move`.
        RequestCancelled: `cancelled()` returned true.  Nothing is left behind then, nor after an error.
    """
    entry = show(model)
    path = entry.path
    folder = Path(folder).expanduser().absolute()
    target = folder / folder_name(path.name if path.is_dir() and not entry.is_in_place else entry.name)
    if not folder.is_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder} is not a folder: check the path.")
    if os.path.lexists(target):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{target} exists already: remove it, or choose another folder.")
    with reading(path), disk_errors_explained(folder), staging_folder(folder) as staging:
        _copy(own_files(path), path, staging, read_manifest(path), on_progress, cancelled)
        staging.rename(target)
    return target


def _of_library(model: str) -> Found:
    found = named(model)
    if found.origin != OWN or not is_ours(found):
        whose = "is not in the library" if is_ours(found) else f"belongs to {owner(found)}"
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{found.name} {whose} and stays where it is: `switchyard models import` adds a copy to the library.",
        )
    return found


def _renamed(source: Path, target: Path) -> bool:
    """Whether it could be renamed: not to another disk."""
    try:
        _put(source, source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _put(folder: Path, source: Path, target: Path) -> None:
    """Renames a folder with the model of `source` to `target`, after what is kept elsewhere: killed between the two, it
    is still at `source`, and the next call takes along the rest."""
    _take_along(source, target)
    try:
        folder.rename(target)
    except OSError:
        _take_along(target, source)
        raise


def _take_along(source: Path, target: Path) -> None:
    before, after = where(source), where(target)
    for file in converted_of(source):
        file.replace(file.with_name(file.name.replace(f"-{before}.gguf", f"-{after}.gguf")))
    move_usage(source, target)


def _copy(
    files: list[Path],
    source: Path,
    staging: Path,
    manifest: Manifest | None,
    on_progress: Progress,
    cancelled: CancelCheck,
) -> None:
    """Copies files of a model into an empty folder, with a manifest, and reads them again."""
    base = source if source.is_dir() else source.parent
    files = [file for file in files if file.name != MANIFEST_NAME]
    total = total_bytes(files)
    require_space(staging, total)
    advance, records = counted(on_progress, 2 * total, cancelled), []
    for file in files:
        name = file.relative_to(base).as_posix()
        name += SUFFIX if base != source and not name.lower().endswith(SUFFIX) else ""
        copy = staging / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        digest = copy_file(file, copy, advance)
        records.append(FileRecord(name, copy.stat().st_size, digest))
    _compare(source, records, manifest)
    for record in records:
        if sha256_of(_from_disk(staging / record.path), on_bytes=advance, cancelled=cancelled) != record.sha256:
            raise _damaged(staging / record.path, "was written")
    write_manifest(staging, manifest or Manifest(f"copied from {source}", tuple(records)))


def _compare(source: Path, records: Iterable[FileRecord], manifest: Manifest | None) -> None:
    found = {record.path: record for record in records}
    for record in manifest.files if manifest is not None else ():
        if found.get(record.path) != record:
            raise _damaged(source / record.path, "was added to the library")


def _check_is_copied_whole(source: Path) -> None:
    """Raises if the folder holds anything but files and folders: a copy would not have it."""
    for path in others_beside(source, files_of(source)):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} is a link that leads to a folder or nowhere, and would be lost on another disk: take it out of "
            "the model's folder first.",
        )


def _discard_copied(source: Path, target: Path) -> None:
    """Removes what was copied.  Anything that somebody has put there or changed since stays, with its folder."""
    copied = [file for file in files_of(source) if _is_same(file, target / file.relative_to(source))]
    if not others_beside(source, copied):
        discard(source)
        return
    for file in sorted(copied, key=lambda file: file.name == MANIFEST_NAME):  # by which this is known to have begun
        file.unlink()
    for folder in sorted({file.parent for file in copied}, reverse=True):  # the innermost first
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_same(file: Path, copy: Path) -> bool:
    """Whether a copy, which has the original's times, is still what lies there; of a manifest, which was written anew,
    whether it says the same."""
    try:
        one, other = file.stat(), copy.stat()
    except OSError:
        return False
    if file.name == MANIFEST_NAME:
        return read_manifest(file.parent) == read_manifest(copy.parent)
    # To two seconds, which is what a stick's file system keeps of a time.
    return one.st_size == other.st_size and abs(one.st_mtime - other.st_mtime) <= _SAME_TIME_S


def _damaged(file: Path, since: str) -> EngineError:
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{file} is missing or has changed since it {since}, so nothing was moved: verify the model.",
    )


def _from_disk(file: Path) -> Path:
    """The same file, dropped from the system's memory where that can be asked for, to see what the disk holds."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file
