"""Reads and validates the headers of safetensors files.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length N, N bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}`, then the data, to which the offsets
are relative.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted
from engine.common.untrusted import Opener, open_untrusted, parse_json, reason

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
MAX_HEADER = 32 * 2**20
"""Most bytes.  The format allows three times as many, which a malicious file turns into gigabytes of objects; the
header of a file with all 90,000 tensors of the biggest models is a third of this."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: where its bytes are, and what they are called there."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file,)

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self,)

    def row(self, index: int) -> TensorEntry:
        """One row of its first dimension, which the shape still has: an expert's, of a stack of all."""
        return self.rows(index, 1)

    def rows(self, begin: int, count: int) -> TensorEntry:
        each = self.nbytes // self.shape[0]
        return replace(self, shape=(count, *self.shape[1:]), offset=self.offset + begin * each, nbytes=count * each)

    def below(self, index: int) -> TensorEntry:
        return replace(self.rows(index, 1), shape=self.shape[1:])


def read_header(file: Path, open_file: Opener = open_untrusted) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, by name.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, naming the file, if it is missing, cut short or inconsistent.
    """
    try:
        with open_file(file) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            raw = _header_bytes(file, stream.read(8), size, stream)
    except FileNotFoundError as error:
        raise damaged(file, "is missing") from error
    except OSError as error:
        raise damaged(file, f"cannot be read ({reason(error)})") from error
    try:
        content = parse_json(raw, object_pairs_hook=_unique)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        for key in content:
            key.encode("utf-8")  # a lone surrogate: valid in JSON, rejected everywhere else
    except ValueError as error:
        raise damaged(file, f"has a broken header ({error})") from error
    start = 8 + len(raw)
    content.pop("__metadata__", None)
    entries = {key: _entry(file, key, value, start, size) for key, value in content.items()}
    _check_layout(file, sorted(entries.values(), key=lambda entry: entry.offset), start, size)
    return entries


def _header_bytes(file: Path, length_bytes: bytes, size: int, stream: BinaryIO) -> bytes:
    if size == 0:
        raise damaged(file, "is empty")
    if len(length_bytes) < 8:
        raise damaged(file, f"is cut short: it has only {size} bytes")
    length = int.from_bytes(length_bytes, "little")
    if length > MAX_HEADER:
        raise damaged(file, f"is not a safetensors file, or its header is larger than {MAX_HEADER // 2**20} MiB")
    raw = stream.read(length)
    if len(raw) < length:
        raise damaged(file, "is cut short within its header")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name twice")
    return result


def _entry(file: Path, key: str, value: Any, start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
            raise ValueError("numbers")
        bits = DTYPE_BITS[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"has a broken header (at tensor {quoted(key)})") from error
    if (end - begin) * 8 != bits:
        raise damaged(file, f"has a broken header (tensor {quoted(key)} has a size that does not match its shape)")
    if start + end > size:
        raise damaged(file, f"is cut short: tensor {quoted(key)} ends at byte {start + end} of {size}")
    return TensorEntry(file, key, dtype, tuple(shape), start + begin, end - begin)


def _check_layout(file: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    """Checks that data has no gaps or overlaps, as the format demands: this detects flipped bits in a header."""
    position = start
    for entry in entries:
        if entry.offset != position:
            raise damaged(file, f"has a broken header (tensor {quoted(entry.key)} overlaps another or leaves a gap)")
        position += entry.nbytes
    if position != size:
        raise damaged(file, f"is {size - position} bytes longer than its header says")


def damaged(file: Path | str, what: str) -> EngineError:
    return EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file} {what}: download or copy the model again.")
