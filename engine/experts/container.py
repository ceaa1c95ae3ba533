"""Converted weights: one file for a model and a precision, in GGUF's container, read by our one reader of its headers.

Each tensor is the records of one experts module, or the record of one linear layer: bytes [records, bytes of one], laid
out as in RAM and beginning on a page.  The metadata say what they are and what they were made of, and hold a checksum
of each record and, for each tensor, a seal over these.  A seal is written after its tensor has reached the disk, so the
header of an unfinished file is its journal: who makes the file goes on after the last tensor that is sealed.  It is
`NAME.part` until all are, and locked meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64_digest

from engine.checkpoint.gguf import MAGIC
from engine.checkpoint.gguf.file import CONVERTED, read_converted
from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import is_full, take_lock
from engine.common.footprint import RECORD_ALIGNMENT
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.direct_file import DirectFile, Part, bytes_of
from engine.experts.record import LayerSpec
from engine.formats.tiles import RecordLayout

VERSION = 3
"""Of the content: incremented when kernels read the bytes of a part in another way.  Another one is made again."""
CONVERTER = "converter"
"""Of `Contents.source`: the library that converted the model, with its version."""
DIGEST_BYTES = 8

CHECKSUM = "xxh3_64"
"""Of the records, computed on every read.  Measured on one busy core: 6.3 GB/s, where blake2b has 0.4."""


def _blake2b(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


_TEXT, _UINT32, _UINT64, _ARRAY = 8, 4, 10, 9
_BYTES = 24
_DIGESTS = "switchyard.digests"
_PIECE = 8 * 2**20
_TOGETHER = 256 * 2**20
"""Bytes of small tensors that are sealed together: waiting for the disk takes milliseconds."""


class UnusableContainerError(EngineError):
    """Converted weights that cannot be used and have to be made again.

    Attributes:
        reason: in words that follow `because`.
        damaged: the tensor that is not what it was; empty if it is not one alone.
    """

    def __init__(self, path: Path, reason: str, damaged: str = "") -> None:
        super().__init__(
            ErrorCode.CHECKPOINT_DAMAGED, f"The converted weights in {path} cannot be used because {reason}."
        )
        self.path, self.reason, self.damaged = path, reason, damaged


@dataclass(frozen=True)
class Contents:
    """What a file holds, and what that was made of and by: two files with equal contents hold the same weights."""

    name: str
    precision: str
    source: Mapping[str, Any]
    tensors: tuple[LayerSpec, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    @cached_property
    def header(self) -> bytes:
        """The header with a seal on nothing, padded to a page."""
        texts = {
            "general.architecture": CONVERTED,
            "general.name": self.name,
            "switchyard.precision": self.precision,
            "switchyard.checksum": CHECKSUM,
            "switchyard.source": json.dumps(self.source, sort_keys=True),
            "switchyard.layouts": json.dumps(self.layouts),
        }
        numbers = {"general.alignment": RECORD_ALIGNMENT, "switchyard.version": VERSION}
        made = [MAGIC + struct.pack("<IQQ", 3, len(self.tensors), len(texts) + len(numbers) + 1)]
        made += [_packed(key) + struct.pack("<I", _TEXT) + _packed(value) for key, value in texts.items()]
        made += [_packed(key) + struct.pack("<II", _UINT32, value) for key, value in numbers.items()]
        made += [_digests_key(self.table_size), bytes(self.table_size * DIGEST_BYTES)]
        offset = 0
        for spec in self.tensors:
            shape = struct.pack("<IQQ", 2, spec.layout.nbytes, spec.num_experts)
            made.append(_packed(spec.name) + shape + struct.pack("<IQ", _BYTES, offset))
            offset += spec.nbytes
        whole = b"".join(made)
        return whole.ljust(-(-len(whole) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT, b"\0")

    @property
    def size(self) -> int:
        return len(self.header) + self.nbytes

    @cached_property
    def rows(self) -> list[int]:
        """Where the checksums of each tensor begin in the table, and where this ends; each is followed by a seal."""
        return list(itertools.accumulate((spec.num_experts + 1 for spec in self.tensors), initial=0))

    @property
    def table_size(self) -> int:
        return self.rows[-1]

    @cached_property
    def identity(self) -> bytes:
        """Of the file, whatever is sealed of it."""
        return _identity(self.header, self.table_size * DIGEST_BYTES)

    @cached_property
    def layouts(self) -> list[str]:
        return [_described(spec.layout) for spec in self.tensors]

    @cached_property
    def offsets(self) -> list[int]:
        return list(itertools.accumulate((spec.nbytes for spec in self.tensors[:-1]), initial=len(self.header)))

    def difference(self, precision: str, source: Mapping[str, Any]) -> str | None:
        """Why a file of that cannot be used where this is wanted, or part of it; `None` if it can."""
        if precision != self.precision:
            return f"they are in {precision} rather than {self.precision}"
        if source != self.source:
            ours, theirs = self.source.get(CONVERTER), source.get(CONVERTER)
            if ours != theirs and {**source, CONVERTER: ours} == self.source:
                return f"they were made with {theirs}, and here is {ours}"
            return "the model that they were made from has changed"
        return None


@dataclass(frozen=True)
class Container:
    """A file whose header has been read."""

    path: Path
    precision: str
    source: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    layouts: Mapping[str, str]
    digests: Mapping[str, Sequence[bytes]]
    table: int
    identity: bytes

    def parts(self, name: str) -> list[Part]:
        begin, (count, size) = self.entries[name].offset, self.entries[name].shape
        return [Part(0, size, [(self.path, begin + record * size) for record in range(count)])]

    def is_intact(self, name: str, first: int, records: torch.Tensor) -> bool:
        """Whether these are the records of a tensor from `first` on, uint8 [count, bytes of one], contiguous."""
        wanted = self.digests[name][first : first + len(records)]
        return all(xxh3_64_digest(bytes_of(each)) == digest for each, digest in zip(records, wanted, strict=True))

    def damaged(self, name: str) -> UnusableContainerError:
        return UnusableContainerError(self.path, "a part of them was damaged", name)


def open_container(path: Path, wanted: Contents) -> Container:
    """Reads the header of a file that holds what is wanted, and perhaps more; of its tensors only these are given.

    Raises:
        FileNotFoundError: there is none.
        UnusableContainerError: it is unfinished, damaged, or of something else.
    """
    found = _read(path)
    if (reason := wanted.difference(found.precision, found.source)) is not None:
        raise UnusableContainerError(path, reason)
    for spec, layout in zip(wanted.tensors, wanted.layouts, strict=True):
        entry = found.entries.get(spec.name)
        if entry is None or entry.shape != (spec.num_experts, spec.layout.nbytes) or found.layouts[spec.name] != layout:
            raise UnusableContainerError(path, "its layers are not those of the model")
    if unsealed := found.entries.keys() - found.digests.keys():
        raise UnusableContainerError(path, "their checksums are damaged", min(unsealed))
    return replace(found, entries={spec.name: replace(found.entries[spec.name], dtype="U8") for spec in wanted.tensors})


def _read(path: Path) -> Container:
    try:
        raw, said, tensors = read_converted(path)
        if said.get("switchyard.version") != VERSION:
            raise UnusableContainerError(path, "another version of Switchyard made them")
        checksum, table = said["switchyard.checksum"], said[_DIGESTS]
        if checksum != CHECKSUM:
            raise UnusableContainerError(path, f"their checksums ({checksum}) cannot be computed here")
        counts = [entry.shape[0] for entry in tensors.values()]
        if not isinstance(table, np.ndarray) or len(table) != sum(counts) + len(counts):
            raise ValueError("its table has another length")
        layouts = dict(zip(tensors, map(str, json.loads(str(said["switchyard.layouts"]))), strict=True))
        identity = _identity(raw, table.nbytes)
        digests, at = dict[str, Sequence[bytes]](), 0
        for index, (name, count) in enumerate(zip(tensors, counts, strict=True)):
            *row, seal = (table[each].tobytes() for each in range(at, at + count + 1))
            at += count + 1
            if seal == _seal(identity, index, b"".join(row)):
                digests[name] = row
        source = json.loads(str(said["switchyard.source"]))
        precision = str(said["switchyard.precision"])
        at = _table_at(raw, len(table))
        return Container(path, precision, source, tensors, layouts, digests, at, identity)
    except (UnusableContainerError, FileNotFoundError):
        raise
    except (EngineError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UnusableContainerError(path, "the file is damaged") from error


def _identity(raw: bytes, table_nbytes: int) -> bytes:
    """Of a header whatever its table holds: a seal fits one tensor of one file."""
    begin = _table_at(raw, table_nbytes // DIGEST_BYTES)
    return _blake2b(raw[:begin] + raw[begin + table_nbytes :].rstrip(b"\0"))


def _table_at(raw: bytes, size: int) -> int:
    key = _digests_key(size)
    return raw.index(key) + len(key)


def _seal(key: bytes, index: int, row: bytes) -> bytes:
    return _blake2b(key + index.to_bytes(4, "little") + row)


def part_path(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def reopen(error: UnusableContainerError) -> None:
    """Makes a file of which one tensor is damaged an unfinished one that lacks it, and removes any other."""
    path = error.path
    with contextlib.suppress(OSError):
        if error.damaged:
            with contextlib.suppress(UnusableContainerError, ValueError):
                found = _read(path)
                before = list(found.entries.values())[: list(found.entries).index(error.damaged) + 1]
                at = found.table + (sum(entry.shape[0] + 1 for entry in before) - 1) * DIGEST_BYTES
                with path.open("r+b") as stream:
                    stream.seek(at)
                    stream.write(bytes(DIGEST_BYTES))
                path.replace(part_path(path))
                return
        path.unlink(missing_ok=True)


@contextmanager
def making(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """Holds the lock for making this file; waits while another process holds it."""
    lock_path = path.with_name(path.name + ".lock")

    def is_given_up() -> bool:
        check()
        return False

    lock = take_lock(lock_path, -1.0, is_given_up)
    assert lock is not None
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere an open file cannot be deleted, and the release removes it
            lock_path.unlink(missing_ok=True)
        lock.release()


class ContainerWriter:
    """Writes the file next to `path` and renames it when it is complete.  Use it inside `making(path)`.

    Closing before `finish` keeps tensors that are sealed for the next attempt; a file without any is deleted.

    Args:
        left_free: bytes of the disk that are left to others.
        direct: whether to leave nothing of it in the page cache.

    Attributes:
        finished: indexes of the tensors that need not be written.
    """

    def __init__(self, path: Path, contents: Contents, *, left_free: int = 0, direct: bool = True) -> None:
        self.path, self.contents = path, contents
        self.finished: set[int] = set()
        self._part, self._left_free, self._is_there = part_path(path), left_free, False
        self._table = _table_at(contents.header, contents.table_size)
        self._pending: list[tuple[int, bytes]] = []
        with self._reporting():
            self._file = DirectFile(self._part, writable=True, direct=direct)
        try:
            with self._reporting():
                self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ContainerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, index: int, records: torch.Tensor, on_written: Callable[[int], None]) -> None:
        """Writes the records of one tensor, uint8 [count, nbytes], and seals it, perhaps later with others."""
        begin, data = self.contents.offsets[index], bytes_of(records)
        with ThreadPoolExecutor(1, "checksums") as beside, self._reporting():
            row = beside.submit(lambda: b"".join(xxh3_64_digest(bytes_of(record)) for record in records))
            for at in range(0, len(data), _PIECE):
                self._file.write(begin + at, data[at : at + _PIECE])
                if at + _PIECE < len(data):
                    on_written(_PIECE)
            self._pending.append((index, row.result()))
            if sum(self.contents.tensors[each].nbytes for each, _ in self._pending) >= _TOGETHER:
                self._settle()
        on_written((len(data) - 1) % _PIECE + 1)  # of the last one: what stops now leaves all of it

    def finish(self) -> None:
        """Atomically replaces any previous file with the complete one, and syncs the rename to disk."""
        with self._reporting():
            self._settle()
            if len(self.finished) != len(self.contents.tensors):
                raise ValueError(f"only {len(self.finished)} of {len(self.contents.tensors)} tensors have been written")
            self._file.close()
            os.replace(self._part, self.path)
        self._is_there = True
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        self.finished.clear()
        self._pending.clear()
        self.close()

    def close(self) -> None:
        if self._pending and self._file.descriptor >= 0:
            with contextlib.suppress(OSError):
                self._settle()
        self._file.close()
        if not self._is_there and not self.finished:
            self._part.unlink(missing_ok=True)

    def _settle(self) -> None:
        if self._pending:
            self._file.sync()
        key, starts = self.contents.identity, self.contents.rows
        for index, row in self._pending:
            sealed = row + _seal(key, index, row)
            self._file.write(self._table + starts[index] * DIGEST_BYTES, memoryview(sealed))
        self._file.sync()
        self.finished.update(index for index, _ in self._pending)
        self._pending.clear()

    def _resume(self) -> None:
        """Keeps the tensors that an earlier attempt at the same file has sealed; otherwise starts from scratch."""
        contents = self.contents
        with contextlib.suppress(UnusableContainerError, FileNotFoundError):
            found = _read(self._part)
            if found.identity == contents.identity:
                self.finished = {
                    index
                    for index, spec in enumerate(contents.tensors)
                    if spec.name in found.digests and self._ends_well(index, found.digests[spec.name][-1])
                }
        if not self.finished:
            os.ftruncate(self._file.descriptor, 0)
        if self._missing() + self._left_free > shutil.disk_usage(self._part.parent).free:
            raise self._disk_full()
        if not self.finished:
            self._file.write(0, memoryview(contents.header))
            os.ftruncate(self._file.descriptor, contents.size)

    def _ends_well(self, index: int, digest: bytes) -> bool:
        """Whether the last record of a sealed tensor is intact: a cheap check of the bytes most likely to be lost."""
        spec = self.contents.tensors[index]
        record = bytearray(spec.layout.nbytes)
        self._file.read_into(self.contents.offsets[index] + spec.nbytes - len(record), memoryview(record))
        return xxh3_64_digest(record) == digest

    def _missing(self) -> int:
        return max(self.contents.size - getattr(os.fstat(self._file.descriptor), "st_blocks", 0) * 512, 0)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error) or error.errno == errno.EFBIG:
                raise self._disk_full() from error
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._part} cannot be written ({error.strerror}): check the folder's permissions and the disk.",
            ) from error

    def _disk_full(self) -> EngineError:
        folder, left = self.path.parent, self._left_free
        free = shutil.disk_usage(folder).free
        others = f", and {rounded_up(left)} are to stay free for other things" if left else ""
        return EngineError(
            ErrorCode.DISK_FULL,
            f"Converting {self.contents.name} needs {rounded_up(self._missing())} more in {folder}, where "
            f"{rounded_down(free)} are free{others}: free some space there, or choose a data folder on another disk.",
        )


def _packed(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _digests_key(size: int) -> bytes:
    return _packed(_DIGESTS) + struct.pack("<IIQ", _ARRAY, _UINT64, size)


def _described(layout: RecordLayout) -> str:
    parts = [
        f"{part.name} {str(part.dtype).removeprefix('torch.')}{list(part.shape)}@{part.offset}{'T' * part.transposed}"
        for part in layout.parts
    ]
    return f"{layout.nbytes}: {', '.join(parts)}"


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
