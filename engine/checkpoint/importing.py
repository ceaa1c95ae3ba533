"""Imports a checkpoint, a directory or a GGUF file, into the library: validated first, then atomically.

Staging folders: filled under a hidden name, renamed into place, cleaned up after a crash.

A staging folder is `.staging-XXXX` with a locked `.staging-XXXX.lock` beside it. The lock dies with its process, so an
unlocked one marks a killed process's leftovers: the next staging in the same place removes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from engine.checkpoint.config_file import read_config
from engine.checkpoint.gguf import SUFFIX, gguf_at
from engine.checkpoint.library import TEMPLATE_FOLDER, LibraryEntry, describe
from engine.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, counted, sha256_of, write_manifest
from engine.checkpoint.model_directories import NO_NAME, check_connected
from engine.checkpoint.names import check_new_name, folder_name, name_of, resolve
from engine.checkpoint.shards import INDEX_NAME, check_filled, read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, locked_file, new_folder, require_space, try_lock
from engine.common.paths import models_dir
from engine.common.untrusted import open_untrusted

_PREFIX = ".staging-"
_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """An empty folder inside `parent`, removed afterwards unless `put_in_place` moved it.

    Raises:
        OSError: if `parent` cannot be written.
    """
    new_folder(parent)
    sweep(parent)
    with _locked_name(parent) as folder:
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, target: Path) -> None:
    """Renames a staged `folder` to `target`, replacing an old one (through a trash folder).

    Another process may do the same at the same time: the last rename wins. `target` is never incomplete, but absent for
    a moment while an old one is replaced.

    Raises:
        OSError: if it cannot be renamed.
    """
    for _attempt in range(10):
        if target.exists() or target.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                discard(target)
        try:
            folder.rename(target)
        except OSError as error:
            # Another process put its folder there between our two renames, and may have removed it since.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) and not target.exists():
                raise
        else:
            return
    raise OSError(f"{target} is being replaced by other processes over and over")


def discard(path: Path) -> None:
    """Renames `path` in one step, then deletes it, so that a partly deleted one is never seen.

    Raises:
        OSError: if it cannot be moved.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    with _locked_name(path.parent) as trash:
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Deletes staging folders that killed processes left in `parent`; those in use stay."""
    for lock_path in parent.glob(f"{_PREFIX}*{_LOCK_SUFFIX}"):
        with contextlib.suppress(OSError), lock_path.open("r+b") as lock:
            if not try_lock(lock.fileno()):
                continue
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            if sys.platform == "win32":  # where an open file cannot be deleted
                lock.close()
            if not lock_path.with_suffix("").exists():
                lock_path.unlink()


@contextlib.contextmanager
def _locked_name(parent: Path) -> Iterator[Path]:
    """An unused name in `parent` whose lock file this process holds."""
    lock_path = None
    try:
        with locked_file(parent, _PREFIX) as lock_path:
            yield lock_path.with_suffix("")
    finally:
        if lock_path is not None and not lock_path.with_suffix("").exists():
            with contextlib.suppress(OSError):
                lock_path.unlink(missing_ok=True)


_CHUNK_BYTES = 4 * 2**20
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".md")
_SIDE_NAMES = ("license", "licence", "notice", "use_policy", "copying")


def import_model(
    path: Path,
    name: str | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LibraryEntry:
    """Adds the checkpoint at `path` to the library as `name` (by default its folder's or its file's name).

    Weights are hard-linked where the file system allows it, so they take no extra space; everything else is copied.
    Only what a model needs is imported: no program code, no pickles, no hidden files.

    Args:
        on_progress: called with `done` and `total` bytes.

    Raises:
        EngineError: what is wrong with the checkpoint (`CHECKPOINT_DAMAGED`, `CHECKPOINT_UNSAFE`,
            `MODEL_UNSUPPORTED`, `MODEL_NOT_FOUND`), the name (`INVALID_REQUEST`) or the disk (`DISK_FULL`).
        RequestCancelled: `cancelled()` returned true; nothing is left behind.
    """
    source = resolve(str(path))
    folder = source if source.is_dir() else source.parent
    if folder.parent == models_dir():
        raise EngineError(ErrorCode.INVALID_REQUEST, f"{folder.name} is already in the library.")
    name = name if name is not None else _default_name(source)
    check_new_name(name)
    weights = weights_of(source)
    before = _states(weights)
    check_connected(models_dir())
    with disk_errors_explained(models_dir()), staging_folder(models_dir()) as staging:
        side_files = list(_side_files(source)) if source.is_dir() else []
        total = sum(file.stat().st_size for file in (*weights, *side_files))
        advance = counted(on_progress, total, cancelled)
        records = [_take(file, folder, staging, advance, may_link=False) for file in side_files]
        for file in weights:  # one whose name says nothing, as in Ollama's store, gets the model's
            called = file.name if file.suffix.lower() in (SUFFIX, ".safetensors") else f"{name}{SUFFIX}"
            records.append(_take(file, folder, staging, advance, may_link=True, called=called))
        # The source may have changed during the copy: check what the library now holds.
        weights_of(staging)
        if _states(weights) != before:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{source} changed while it was imported: wait until it is complete, and import it again.",
            )
        files = tuple(sorted(records, key=lambda record: record.path))
        write_manifest(staging, Manifest(f"imported from {source}", files))
        check_new_name(name)
        staging.rename(models_dir() / name)
    return describe(models_dir() / name, name)


def weights_of(source: Path) -> list[Path]:
    """The files with the weights of a checkpoint, if it is whole and understood."""
    read_config(source)
    tensors = read_tensors(source)
    check_filled(tensors.values())
    gguf = gguf_at(source)
    if gguf is None:
        return sorted({file for tensor in tensors.values() for file in tensor.files})
    from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need
    from engine.checkpoint.gguf.tokenizer import tokenizer_files

    model = read_gguf(gguf)
    tokenizer_files(model.metadata, gguf)
    return list(model.parts)


def _states(files: list[Path]) -> list[tuple[int, int]]:
    return [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in files)]


def _side_files(source: Path) -> Iterable[Path]:
    for file in sorted(source.iterdir()):
        plain = file.name.lower()
        wanted = plain.endswith(_SIDE_SUFFIXES) or plain.startswith(_SIDE_NAMES)
        # Neither our own manifest, which is rewritten, nor indexes of weights that are not imported.
        is_other = file.name == MANIFEST_NAME or (plain.endswith(".index.json") and file.name != INDEX_NAME)
        if file.is_file() and wanted and not plain.startswith(".") and not is_other:
            yield file
    yield from sorted((source / TEMPLATE_FOLDER).glob("*.jinja"))


def _take(
    file: Path, source: Path, target: Path, advance: Callable[[int], None], *, may_link: bool, called: str = ""
) -> FileRecord:
    """Links or copies one file and returns its record.  Follows links: a hub cache keeps the bytes elsewhere."""
    relative = Path(called) if called else file.relative_to(source)
    copy = target / relative
    copy.parent.mkdir(exist_ok=True)
    if may_link and _try_link(file.resolve(), copy):
        digest = sha256_of(copy, on_bytes=advance)
    else:
        require_space(target, file.stat().st_size)
        digest = copy_file(file, copy, advance)
    return FileRecord(relative.as_posix(), copy.stat().st_size, digest)


def _try_link(file: Path, copy: Path) -> bool:
    try:
        os.link(file, copy)
    except OSError:  # another file system, or one without hard links
        return False
    return True


def copy_file(file: Path, copy: Path, advance: Callable[[int], None]) -> str:
    """Copies a file, with its times, to the disk; returns its SHA-256.  `advance` is called with each count of bytes.

    Raises:
        OSError: it failed.
    """
    digest = hashlib.sha256()
    with open_untrusted(file) as reader, copy.open("wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
            advance(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    shutil.copystat(file, copy)
    return digest.hexdigest()


def _default_name(source: Path) -> str:
    """The model's name, or its own in a GGUF file that has a converter's."""
    name = name_of(source)
    if NO_NAME.match(name) and (gguf := gguf_at(source)) is not None:
        from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need

        name = read_gguf(gguf).text("general.name") or name
    return folder_name(name)
