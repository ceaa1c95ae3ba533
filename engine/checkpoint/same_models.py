"""One model in several stores: known by what its weights are, and listed once.

Two copies are the same if their weights are the same files (by link), have the same SHA-256 where that is known without
reading them (our manifest, the names in the hub's cache and in Ollama's store), or are GGUF files of one name and size
with the same bytes at many places. Models that merely resemble each other must never count as one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoint.gguf.names import SUFFIX
from engine.checkpoint.manifest import Manifest
from engine.checkpoint.model_directories import FOLDER, OWN
from engine.common.untrusted import open_untrusted

if TYPE_CHECKING:
    from engine.checkpoint.library import LibraryEntry

_DIGEST = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_SAMPLES, _SAMPLE_BYTES = 64, 2**12
_LEAST_BYTES = 2**16
"""Smaller weights are no model worth telling apart."""


def link_key(weights: Sequence[Path]) -> str:
    """The same for links to the same files; empty if that cannot be told."""
    try:
        found = [(status.st_dev, status.st_ino) for status in (file.stat() for file in weights)]
    except OSError:
        return ""
    return f"file:{sorted(found)}" if found and all(inode for _, inode in found) else ""


def content_keys(weights: Sequence[Path], folder: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """What the weights are, as far as that is known, or from some of their bytes."""
    with contextlib.suppress(OSError, RuntimeError):
        if not weights or sum(file.stat().st_size for file in weights) < _LEAST_BYTES:
            return ()
        known = {record.path: record.sha256 for record in manifest.files} if manifest is not None else {}
        digests = [
            _digest(file) or known.get(os.path.relpath(file, folder).replace(os.sep, "/"), "") for file in weights
        ]
        keys = [f"sha256:{' '.join(sorted(digests))}"] if all(digests) else []
        if all(file.name.lower().endswith(SUFFIX) for file in weights):
            keys.append(f"gguf:{' '.join(sorted(_sampled(file) for file in weights))}")
        return tuple(keys)
    return ()


def _digest(file: Path) -> str:
    match = _DIGEST.fullmatch(file.resolve().name)
    return match[1] if match is not None else ""


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name.casefold()}\0{size}\0".encode(errors="surrogateescape"))
    with open_untrusted(file) as reader:
        for at in range(_SAMPLES):
            reader.seek((size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
            digest.update(reader.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def listed_once(entries: Iterable[LibraryEntry]) -> list[LibraryEntry]:
    """The same entries in their order, copies of one model as one that names the others: the user's own before those
    of other programs."""
    groups: list[list[LibraryEntry]] = []
    by_key: dict[str, list[LibraryEntry]] = {}
    for entry in entries:
        keys = () if entry.problem else entry.content
        met = {id(by_key[key]): by_key[key] for key in keys if key in by_key}
        group = next(iter(met.values()), None)
        if group is None:
            group = []
            groups.append(group)
        for other in list(met.values())[1:]:  # of which only this one tells that they are the same
            group += other
            groups.remove(other)
            by_key |= {key: group for key, known in by_key.items() if known is other}
        group.append(entry)
        by_key |= dict.fromkeys(keys, group)
    return [_as_one(group) for group in groups]


def _as_one(group: list[LibraryEntry]) -> LibraryEntry:
    first = min(group, key=lambda entry: (OWN, FOLDER).index(entry.origin) if entry.origin in (OWN, FOLDER) else 2)
    return replace(first, also=tuple((one.origin, one.path) for one in group if one is not first))
