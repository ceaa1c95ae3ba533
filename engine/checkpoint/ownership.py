"""Whose a model is, and which of the files where it lies are its own: what may be moved or removed, and what never.

And its removal: its own files alone, to the trash.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.gguf import SUFFIX, gguf_at
from engine.checkpoint.importing import discard
from engine.checkpoint.library import (
    converted_of,
    exclusive_use,
    files_of,
    forget_usage,
    is_about,
    model_files,
    remove_converted,
    total_bytes,
)
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.model_directories import FOLDER, OWN, Found, find_models, model_folders, origin_of
from engine.checkpoint.names import find_named, in_library, is_path_like, not_in_library
from engine.checkpoint.shards import PICKLE_SUFFIXES
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import models_dir

_WEIGHTS = (SUFFIX, ".safetensors", *PICKLE_SUFFIXES)
_HUB_NOTES = Path(".cache", "huggingface")
"""What the hub's library keeps in a folder that it downloads to: `download/FILE.metadata` for each file, and locks."""
_OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")


def named(name: str) -> Found:
    """The listed model of that name, or at that path.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `INVALID_REQUEST` (a path that is not listed).
    """
    path = Path(name)
    if not path.is_absolute():
        found = find_named(name)
    elif path.parent == models_dir():
        found = Found(path.name, path, OWN) if in_library(path.name) is not None else None
    else:
        found = next((each for each in find_models()[0] if each.path == path), None)
    if found is None:
        if is_path_like(name) and Path(name).expanduser().exists():
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{name} is not the name of a model here; only listed models are moved or removed.",
            )
        raise not_in_library(name)
    return found


def is_ours(found: Found) -> bool:
    return owner(found) in (OWN, FOLDER)


def owner(found: Found) -> str:
    """Whose a model is: not only by the folder in which it was found, as that may be another program's store, or have
    a link to one.  Of a model that is itself a link, whose the link is."""
    if found.origin not in (OWN, FOLDER):
        return found.origin
    return origin_of(found.path.parent if found.path.is_symlink() else found.path)


def own_files(path: Path) -> list[Path]:
    """The files of a model, with its weights: by its manifest, by what the hub's library noted, or by their names.

    Raises:
        EngineError: `INVALID_REQUEST` (nothing tells which files are the model's).
    """
    files = _known(path)
    if path.is_dir() and not has_record(path) and not _has_weights(files):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path} has no record of which of its files are the model's, and their names do not tell: nothing was "
            "done.",
        )
    return files


def _known(path: Path) -> list[Path]:
    """The files of a model, also where its weights are not among them."""
    files = model_files(path)
    if not path.is_dir() or has_record(path):
        return files
    files = sorted({*files, *_of_the_hub(path)})
    return files if _has_weights(files) else [file for file in files if not is_about(file)]


def _has_weights(files: Iterable[Path]) -> bool:
    return any(file.suffix in (SUFFIX, ".safetensors") for file in files)


def _of_the_hub(folder: Path) -> list[Path]:
    """The files that the hub's library has downloaded into a folder, but weights: those may be another model's."""
    notes = folder / _HUB_NOTES / "download"
    found = (folder / note.relative_to(notes).with_suffix("") for note in sorted(notes.rglob("*.metadata")))
    return [file for file in found if file.is_file() and not file.name.lower().endswith(_WEIGHTS)]


def has_record(path: Path) -> bool:
    manifest = read_manifest(path)
    return manifest is not None and bool(manifest.files)


def others_beside(folder: Path, own: Iterable[Path]) -> list[Path]:
    """What lies in a model's folder, or in the folders in it, and is not its own: other files, and links to folders.

    The notes of the hub's library, and what a system leaves in every folder, are nobody's.
    """
    mine, others = set(own), []
    for place, folders, files in os.walk(folder):
        if Path(place) == folder / _HUB_NOTES.parent and _HUB_NOTES.name in folders:
            folders.remove(_HUB_NOTES.name)
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        others += [Path(place, name) for name in (*links, *files)]
    return sorted(path for path in others if path not in mine and path.name not in _OF_THE_SYSTEM)


def to_remove(found: Found, folders: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """What of a model is removed, and what stays beside it: its folder, if all in it is the model's, or else its files.

    Args:
        folders: of models, which always stay.
    """
    path = found.path
    if path.is_symlink():
        return [path], []
    if not path.is_dir():
        return own_files(path), []
    if path not in folders and not others_beside(path, _known(path)):
        return [path], []
    own = own_files(path)
    if not has_record(path):  # a card or a licence may be about the others
        own = [file for file in own if not is_about(file)]
    return own, others_beside(path, own)


@dataclass(frozen=True, slots=True)
class Removed:
    """What became of a model.

    Attributes:
        bytes: of its files and of what was converted of them.
        others: how many files in that folder were not the model's, and stay.
    """

    bytes: int
    folder: Path
    others: int = 0


def remove(model: str, *, permanently: bool = False) -> Removed:
    """Moves a model to the trash, or deletes it.  What was converted of it is deleted in any case.

    Only the model's own files go, by its manifest, by the notes of the hub's library, or by their names: anything else
    in its folder stays, and so does what belongs to another program.  A model that is a symbolic link is unlinked; its
    target stays.

    Args:
        model: its name, or its path as it is listed.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `BUSY` (in use); `INVALID_REQUEST` (it belongs to another program, its files
            cannot be told from others, or there is no trash on its disk).
    """
    found = _removable(model)
    with exclusive_use(found.path):
        is_link = found.path.is_symlink()
        paths, others = to_remove(found, model_folders())
        files = [file for path in paths for file in (files_of(path) if path.is_dir() else [path])]
        size = 0 if is_link else total_bytes(files)
        converted = [] if is_link else converted_of(found.path)  # looked up before the path is gone
        folder = found.path if found.path.is_dir() else found.path.parent
        if not is_link:
            _forget_tokenizer(found.path)
        try:
            for path in paths:
                if permanently or is_link:
                    discard(path)
                else:
                    _to_trash(path)
        except OSError as error:
            code = ErrorCode.BUSY if error.errno in (errno.EBUSY, errno.EACCES) else ErrorCode.INVALID_REQUEST
            raise EngineError(
                code,
                f"Cannot remove {found.path} ({error.strerror or error}): close whatever is using it and try again.",
            ) from error
        for each in sorted({path.parent for path in paths}, reverse=True):  # the innermost first
            if each.is_relative_to(found.path) and each not in model_folders():
                with contextlib.suppress(OSError):  # others' files lie there
                    each.rmdir()
        if not is_link:
            forget_usage(found.path)
        return Removed(size + remove_converted(converted), folder, len(others))


def _forget_tokenizer(path: Path) -> None:
    from engine.checkpoint.gguf.kept_tokenizer import forget_tokenizer  # imports numpy, which others do not need

    with contextlib.suppress(EngineError):  # of a file that cannot be read none was kept
        gguf = gguf_at(path)
        if gguf is not None:
            forget_tokenizer(gguf)


def _removable(model: str) -> Found:
    found = named(model)
    if not is_ours(found):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{found.name} belongs to {owner(found)}, so Switchyard never removes it: remove it there ({found.path}).",
        )
    return found


def _to_trash(path: Path) -> None:
    from send2trash import TrashPermissionError, send2trash

    try:
        send2trash(path)
    except TrashPermissionError:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The disk of {path} has no trash that can be written to: `switchyard models remove --permanently` deletes "
            "it for good.",
        ) from None
