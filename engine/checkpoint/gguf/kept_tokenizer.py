"""Keeps the tokenizer of a GGUF file, built, in the cache folder: a large vocabulary takes seconds to build.

It is kept under the digest of the file's header, so that a file is known wherever it lies, and with digests of its own:
one that is damaged, or that an earlier Switchyard built, is built again.  It goes with its model (`forget_tokenizer`);
of files that went some other way, those used last stay.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.checkpoint.gguf import tokenizer
from engine.checkpoint.gguf.file import GgufFile, read_gguf
from engine.checkpoint.gguf.tokenizer import end_token_ids
from engine.common.files import private_folder, write_private
from engine.common.paths import cache_dir
from engine.common.untrusted import parse_json, read_untrusted

_RECORD = "kept.json"
"""Written last, with the digests of the others."""
_MOST_KEPT = 32
_MOST_BYTES = 512 * 2**20
_LARGEST = 256 * 2**20
_log = logging.getLogger(__name__)


def kept_tokenizer(file: GgufFile) -> Path | None:
    """The folder with the files that `keep_tokenizer` was given, unharmed; None if there is none."""
    folder = _folder(file)
    record = _record(folder)
    try:
        if record is None or any(
            hashlib.sha256(read_untrusted(folder / name, _LARGEST)).hexdigest() != digest
            for name, digest in record["files"].items()
        ):
            return None
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)  # what was not used for longest goes first
    return folder


def kept_end_token_ids(file: GgufFile) -> tuple[int, ...]:
    """See `end_token_ids`: as kept, or found now."""
    record = _record(_folder(file))
    return tuple(record["ends"]) if record is not None else end_token_ids(file.metadata, file.path)


def keep_tokenizer(file: GgufFile, files: Mapping[str, str]) -> None:
    """Keeps what `tokenizer_files` built, once it was found to be of use.  Never fails: it can be built again."""
    folder, contents = _folder(file), {name: text.encode("utf-8") for name, text in files.items()}
    record = {
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
        "ends": end_token_ids(file.metadata, file.path),
        "builder": _builder(),
    }
    if not record["builder"]:
        return
    try:
        private_folder(folder.parent)
        for name, content in contents.items():
            write_private(folder / name, content)
        write_private(folder / _RECORD, json.dumps({"record": record, "digest": _digest(record)}))
        os.utime(folder)
        _make_room(folder)
    except OSError as error:
        _log.warning("the tokenizer of %s could not be kept: %s", file.path.name, error)


def forget_tokenizer(gguf: Path) -> None:
    shutil.rmtree(_folder(read_gguf(gguf)), ignore_errors=True)


def _folder(file: GgufFile) -> Path:
    return cache_dir() / "tokenizers" / file.digest[:32]


def _record(folder: Path) -> dict[str, Any] | None:
    """What is kept beside the files, if it is unharmed and from this builder."""
    try:
        kept = parse_json(read_untrusted(folder / _RECORD, 2**20))
        record: dict[str, Any] = kept["record"]
        return record if kept["digest"] == _digest(record) and record["builder"] == _builder() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _builder() -> str:
    """Changes with what builds tokenizers; empty if that cannot be told."""
    try:
        return hashlib.sha256(inspect.getsource(tokenizer).encode()).hexdigest()
    except (OSError, TypeError):
        return ""


def _make_room(newest: Path) -> None:
    """Removes those not used for longest that are too many, or too large together; never the newest."""
    others = sorted(
        (entry.stat(follow_symlinks=False).st_mtime_ns, entry.path)
        for entry in os.scandir(newest.parent)
        if entry.path != str(newest)
    )
    kept, nbytes = 1, _size(newest)
    for _, path in reversed(others):
        kept, nbytes = kept + 1, nbytes + _size(Path(path))
        if kept > _MOST_KEPT or nbytes > _MOST_BYTES:
            shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    return 0
