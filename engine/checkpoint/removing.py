"""Removes a model: its own files alone, to the trash."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.gguf.names import gguf_at
from engine.checkpoint.importing import discard
from engine.checkpoint.library import converted_of, exclusive_use, files_of, forget_usage, remove_converted, total_bytes
from engine.checkpoint.model_directories import Found, model_folders
from engine.checkpoint.ownership import is_ours, named, owner, to_remove
from engine.common.errors import EngineError, ErrorCode


@dataclass(frozen=True, slots=True)
class Removed:
    """What became of a model.

    Attributes:
        bytes: of its files and of what was converted of them.
        folder: where it was.
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
