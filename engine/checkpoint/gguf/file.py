"""Reads and validates the headers of GGUF files: a model's metadata and where its tensors lie.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), version 3 or 2, which has the same layout,
little-endian: `GGUF`, the version, the number of tensors and of metadata entries; the metadata; name, shape (innermost
dimension first), type and offset of every tensor; then the data, to which the offsets are relative. A model may be
split over files `NAME-00001-of-0000N.gguf`, the first of which has the metadata.

A file is untrusted: every count and length is checked against what is left of the file before anything is allocated for
it, and the header has a limit of its own, so that reading it takes little memory whatever it says.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf import MAGIC, MOST_PARTS, PART, all_parts, named_parts, stem_of
from engine.checkpoint.headers import MAX_HEADER, TensorEntry, damaged
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.common.untrusted import Opener, open_untrusted, reason
from engine.formats.ggml import BLOCK_TYPES, BlockType

_VERSIONS = (2, 3)
_MOST_ENTRIES = 2**16
"""Of metadata, or tensors, in one file: real ones have a few thousand."""
_MOST_STRINGS = 2**21
"""In all arrays together: the largest vocabularies and their merges have a third of this."""
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 255
"""Bytes; ggml's own names have at most 63."""
_PIECE_BYTES = 2**16
_OTHER_KINDS = {
    "adapter": "a LoRA adapter, not a model: Switchyard runs whole models only",
    "mmproj": "the part of a model that sees pictures (mmproj): give the file with the language model",
    "clip": "the part of a model that sees pictures (mmproj): give the file with the language model",
    "switchyard": "weights that Switchyard has converted: open the model that they were made of",
    "imatrix": "an importance matrix for quantising, not a model: give the file with the model",
}
"""`general.type` or `general.architecture` of files without a language model -> what each is."""

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings of the metadata, decoded when it is asked for: a vocabulary's are hundreds of thousands."""

    count: int
    raw: bytes

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        raw, end, length_at = self.raw, 0, _LENGTH.unpack_from
        for _ in range(self.count):
            at = end + 8
            end = at + length_at(raw, end)[0]
            yield str(raw[at:end], "utf-8")


Value = str | bool | int | float | Strings | NDArray[Any]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF model of which the header has been read; shapes are in torch's order, outermost dimension first."""

    path: Path
    parts: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]
    digest: str
    open_file: Opener = open_untrusted
    arrays: Mapping[str, TensorEntry] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    @property
    def name(self) -> str:
        return stem_of(self.path)

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def value(self, key: str) -> Value | None:
        """What the metadata has under a key of the architecture, given without its name (`block_count`)."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_gguf(path: Path, open_file: Opener = open_untrusted) -> GgufFile:
    """The header of a GGUF model, and of all its parts.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `CHECKPOINT_DAMAGED` if a file or a part is missing, cut short or inconsistent;
            `MODEL_UNSUPPORTED` if it is of another version, or holds something else than a language model.
    """
    if open_file is not open_untrusted:
        return _model(path, open_file)
    try:
        path.stat()
    except OSError as error:
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no file {path} ({reason(error)}).") from error
    return _read(path, tuple(map(_state, all_parts(path))))


def read_projector(path: Path) -> GgufFile:
    """The header of a `mmproj` file, the part of a model that sees."""
    header = _Header(path, open_untrusted, dict(_TYPES))
    if header.metadata.get("general.architecture") != "clip":
        raise damaged(path, "is named mmproj, but is not the part of a model that sees")
    return GgufFile(path, (path,), header.metadata, header.tensors, header.digest, open_untrusted, header.arrays)


WHOLE = BlockType("I32", "", 26, 1, 4)
"""Of tables that are no weights."""
_TYPES = {**BLOCK_TYPES, WHOLE.id: WHOLE}
_ARRAYS = {"int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "I64"}


CONVERTED = "switchyard"
"""The architecture of files of converted weights, which are ours and go with a model (`engine.experts.container`)."""
_BYTES = BlockType("I8", "", 24, 1, 1)
"""The type of their tensors: of none that a model is made of."""


def read_converted(path: Path) -> tuple[bytes, Mapping[str, Value], Mapping[str, TensorEntry]]:
    """The header of a file of converted weights: its bytes, its metadata, and its tensors by name."""
    path.stat()
    header = _Header(path, open_untrusted, {_BYTES.id: _BYTES})
    if header.metadata.get("general.architecture") != CONVERTED:
        raise damaged(path, "is not a file of converted weights")
    with path.open("rb") as stream:
        return stream.read(header.end), header.metadata, header.tensors


def _state(file: Path) -> tuple[int, ...] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=4)
def _read(path: Path, states: tuple[tuple[int, ...] | None, ...]) -> GgufFile:  # noqa: ARG001 (changed files are read again)
    return _model(path, open_untrusted)


def _model(path: Path, open_file: Opener) -> GgufFile:
    first = _Header(path, open_file)
    metadata = first.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise damaged(path, "does not say of which architecture its model is")
    paths, headers = _parts_of(path, metadata, open_file), [first]
    for number, part in enumerate(paths[1:], 1):
        header = _Header(part, open_file)
        if (header.number("split.no"), header.number("split.count")) != (number, len(paths)):
            raise damaged(part, f"is not part {number + 1} of {len(paths)} of {path.name}")
        headers.append(header)
    tensors: dict[str, TensorEntry] = {}
    for header in headers:
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise damaged(header.path, f"has the tensor {min(twice)!r}, which another part has too")
        tensors.update(header.tensors)
    expected = first.number("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise damaged(path, f"has {len(tensors)} tensors in all parts instead of {expected}")
    return GgufFile(path, tuple(paths), metadata, tensors, first.digest, open_file, first.arrays)


def _parts_of(path: Path, metadata: Mapping[str, Value], open_file: Opener) -> list[Path]:
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int) or not 0 <= count <= MOST_PARTS:
        raise damaged(path, "says in a broken way of how many parts it is one")
    name = PART.match(path.name)
    if count <= 1:
        if name and int(name["count"]) > 1:
            raise damaged(path, f"is named as one of {int(name['count'])} parts but is not one")
        return [path]
    if name is None or int(name["count"]) != count or int(name["number"]) != number + 1:
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{path.name} is part {number + 1} of {count} of a model, but is not named so: give the parts their "
            f"names back (NAME-00001-of-{count:05}.gguf and so on).",
        )
    parts = named_parts(path, count)
    for at, part in enumerate(parts, 1):
        try:
            open_file(part).close()
        except FileNotFoundError:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"Part {at} of {count} is missing: {part.name} must be in the same folder, {path.parent}.",
            ) from None
        except OSError:  # reading its header says what is wrong
            continue
    return parts


class _Header:
    def __init__(self, path: Path, open_file: Opener, types: Mapping[int, BlockType] = _TYPES) -> None:
        self.path, self._types = path, types
        try:
            with open_file(path) as stream:
                self.size = stream.seek(0, os.SEEK_END)
                stream.seek(0)
                self._stream = stream
                self._buffer, self._at, self._strings = bytearray(), 0, 0
                self.arrays: dict[str, TensorEntry] = {}
                self._read_version()
                tensors, entries = self._count("tensors"), self._count("metadata entries")
                self.metadata = self._read_metadata(entries)
                if types is _TYPES:
                    for found in (self.metadata.get(f"general.{key}") for key in ("type", "architecture")):
                        if isinstance(found, str) and found in _OTHER_KINDS:
                            what = f"{path.name} is {_OTHER_KINDS[found]}."
                            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, what)
                self.tensors = self._read_tensors(tensors)
                self.end = self._at
                self.digest = hashlib.sha256(bytes(self._buffer[: self._at])).hexdigest()
        except OSError as error:
            raise damaged(path, f"cannot be read ({reason(error)})") from error
        del self._stream, self._buffer

    _stream: BinaryIO

    def number(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if type(value) is int else None

    def _read_version(self) -> None:
        if self.size == 0:
            raise damaged(self.path, "is empty")
        if self._take(4) != MAGIC:
            raise damaged(self.path, "is not a GGUF file")
        raw = self._take(4)
        version = int.from_bytes(raw, "little")
        if version in _VERSIONS:
            return
        if 0 < int.from_bytes(raw, "big") <= max(_VERSIONS):
            what = "is a GGUF file for big-endian machines: get the one for ordinary ones"
        elif version < min(_VERSIONS):
            newest = max(_VERSIONS)
            what = f"is a GGUF file of version {version}, which is out of use: get a current one (version {newest})"
        else:
            what = f"is a GGUF file of version {version}, which Switchyard does not know: a newer Switchyard may"
        raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{self.path.name} {what}.")

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._name()
            if key in metadata:
                raise self._broken(f"the key {key!r} twice")
            value = metadata[key] = self._value(self._integer(4))
            if isinstance(value, np.ndarray) and value.dtype.name in _ARRAYS:
                begin, dtype = self._at - value.nbytes, _ARRAYS[value.dtype.name]
                self.arrays[key] = TensorEntry(self.path, key, dtype, value.shape, begin, value.nbytes)
        return metadata

    def _read_tensors(self, count: int) -> dict[str, TensorEntry]:
        found: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, dimensions = self._name(), self._integer(4)
            if not 0 < dimensions <= _MOST_DIMENSIONS:
                raise self._broken(f"a tensor of {dimensions} dimensions")
            shape = tuple(self._integer(8) for _ in range(dimensions))[::-1]
            found.append((name, *self._form(name, shape, self._integer(4)), self._integer(8)))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise self._broken("an impossible alignment")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, dtype, shape, nbytes, offset in found:
            if name in tensors:
                raise self._broken(f"the tensor {name!r} twice")
            if offset % alignment:
                raise self._broken(f"the tensor {name!r} at an offset that is not aligned")
            tensors[name] = TensorEntry(self.path, name, dtype, shape, start + offset, nbytes)
        self._check_overlaps(tensors)
        end = max((entry.offset + entry.nbytes for entry in tensors.values()), default=0)
        if end > self.size:
            raise self._cut_short(f"{end:,}")
        return tensors

    def _form(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, tuple[int, ...], int]:
        kind = self._types.get(number)
        if kind is None:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{self.path.name} stores {name} as {unread_type(number)}, which Switchyard cannot read: "
                "get another quantisation of the model, Q4_K_M say.",
            )
        if 0 in shape or math.prod(shape) >= 2**63 or shape[-1] % kind.elements:
            raise self._broken(f"the tensor {name!r} in a shape that {kind.name} cannot have")
        return kind.name, shape, math.prod(shape) // kind.elements * kind.nbytes

    def _check_overlaps(self, tensors: Mapping[str, TensorEntry]) -> None:
        end = 0
        for entry in sorted(tensors.values(), key=lambda entry: entry.offset):
            if entry.offset < end:
                raise self._broken(f"the tensor {entry.key!r} where another one is")
            end = entry.offset + entry.nbytes

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._broken(f"a value of an unknown type ({kind})")
        dtype = np.dtype(_SCALARS[kind])
        value: Value = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return value

    def _array(self) -> Strings | NDArray[Any]:
        kind, count = self._integer(4), self._integer(8)
        if kind == _STRING:
            return self._array_of_strings(count)
        if kind not in _SCALARS:
            raise self._broken(f"a list of an unknown type ({kind})")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _array_of_strings(self, count: int) -> Strings:
        self._strings += count
        if self._strings > _MOST_STRINGS:
            raise self._broken(f"more than {_MOST_STRINGS:,} texts")
        begin = at = self._at
        buffer, have, length_at = self._buffer, len(self._buffer), _LENGTH.unpack_from
        for _ in range(count):  # most of the time that reading a header takes
            if at + 8 > have:
                have = self._reach(at + 8)
            at += 8 + length_at(buffer, at)[0]
            if at > have:
                have = self._reach(at)
        self._at = at
        return Strings(count, bytes(buffer[begin:at]))

    def _name(self) -> str:
        length = self._integer(8)
        if length > _LONGEST_NAME:
            raise self._broken(f"a name of {length:,} bytes")
        return plain_line(self._take(length).decode("utf-8", "replace"))

    def _text(self) -> str:
        return self._take(self._integer(8)).decode("utf-8", "replace")

    def _count(self, what: str) -> int:
        count = self._integer(8)
        if count > _MOST_ENTRIES:
            raise self._broken(f"{count:,} {what}")
        return count

    def _integer(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _take(self, nbytes: int) -> bytes:
        self._reach(self._at + nbytes)
        self._at += nbytes
        return bytes(self._buffer[self._at - nbytes : self._at])

    def _reach(self, end: int) -> int:
        """Reads on until the bytes up to `end` are there; lengths are believed only within the file's size.

        Returns:
            How many are there.
        """
        if end <= len(self._buffer):
            return len(self._buffer)
        if end > self.size:
            raise self._cut_short(f"at least {end:,}")
        if end > MAX_HEADER:
            raise self._broken(f"a header of more than {MAX_HEADER // 2**20} MiB")
        self._buffer += self._stream.read(max(end - len(self._buffer), _PIECE_BYTES))
        if len(self._buffer) < end:
            raise self._cut_short(f"at least {end:,}")
        return len(self._buffer)

    def _broken(self, what: str) -> EngineError:
        return damaged(self.path, f"has a broken header ({what})")

    def _cut_short(self, whole: str) -> EngineError:
        return EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"{self.path} is cut short, or still being written: it has {self.size:,} of {whole} bytes. "
            "Wait until it is complete, or download or copy it again.",
        )


_LENGTH = struct.Struct("<Q")


_UNREAD = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_DROPPED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
_IK_LLAMA_CPP = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT",
    156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
_IK_LLAMA_CPP_FROM = 137


def unread_type(number: int) -> str:
    """What a type is, in words, that is not among `BLOCK_TYPES`: ggml's, one of a program beside it, or a newer one."""
    if number in _UNREAD:
        return _UNREAD[number]
    if number in _DROPPED:
        return f"{_DROPPED[number]} (which llama.cpp no longer has)"
    if number in _IK_LLAMA_CPP or number >= _IK_LLAMA_CPP_FROM:
        return f"{_IK_LLAMA_CPP.get(number, f'type {number}')} (ik_llama.cpp's own)"
    return f"type {number} (a new one, or another program's own)"
