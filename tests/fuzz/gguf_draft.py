"""GGUF files taken apart and put together again, also those that nothing should read."""

import math
import struct
from dataclasses import dataclass, field
from typing import Any

from engine.formats.ggml import BLOCK_TYPES

_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32
_MOST_DATA = 2**16


@dataclass(slots=True)
class Value:
    """A value of the metadata: of type 9, content is the type of its items and a list of them."""

    kind: int
    content: Any


@dataclass(slots=True)
class Tensor:
    """An entry of the tensor table; the shape is in the file's order."""

    name: str
    shape: list[int]
    kind: int = 0
    offset: int = 0


@dataclass(slots=True)
class GgufDraft:
    """What a file is to have."""

    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""

    @classmethod
    def read(cls, content: bytes) -> "GgufDraft | None":
        """A file's draft; `None` if it is not well-formed."""
        try:
            return _Cursor(content).draft()
        except (struct.error, IndexError, KeyError):
            return None

    def written(self, *, fitting: bool = True) -> bytes:
        """The file.

        Args:
            fitting: with offsets and as much data as the tensors' shapes call for, if that is little.
        """
        if fitting:
            self._fit()
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))]
        for key, value in self.metadata.items():
            parts += [_text(key), struct.pack("<I", value.kind), _content(value.kind, value.content)]
        for tensor in self.tensors:
            shape = [number % 2**64 for number in tensor.shape]
            parts += [_text(tensor.name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
            parts.append(struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64))
        header = b"".join(parts)
        return header + bytes(-len(header) % _ALIGNMENT) + self.data

    def _fit(self) -> None:
        end = 0
        for tensor in self.tensors:
            tensor.offset = end
            kind = BLOCK_TYPES.get(tensor.kind)
            if kind is not None:
                end += -(-math.prod(tensor.shape) * kind.nbytes // kind.elements // _ALIGNMENT) * _ALIGNMENT
        if 0 <= end <= _MOST_DATA:
            self.data = self.data[:end] + bytes(max(0, end - len(self.data)))


class _Cursor:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def draft(self) -> GgufDraft:
        _magic, _version, tensors, entries = self._take("4sIQQ")
        draft = GgufDraft()
        for _ in range(entries):
            key, (kind,) = self._text(), self._take("I")
            draft.metadata[key] = Value(kind, self._value(kind))
        for _ in range(tensors):
            name, (dimensions,) = self._text(), self._take("I")
            if dimensions > 100:
                raise IndexError
            shape = list(self._take(f"{dimensions}Q"))
            kind, offset = self._take("IQ")
            draft.tensors.append(Tensor(name, shape, kind, offset))
        draft.data = self._content[self._at + -self._at % _ALIGNMENT :]
        return draft

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._content, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _text(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._content):
            raise IndexError
        self._at += length
        return self._content[self._at - length : self._at].decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == 8:
            return self._text()
        if kind != 9:
            return self._take(_FORMS[kind])[0]
        inner, count = self._take("IQ")
        if count > len(self._content) or inner == 9:
            raise IndexError
        return inner, [self._value(inner) for _ in range(count)]


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else bytes(8)
    return struct.pack("<Q", len(content)) + content


def _content(kind: int, content: Any) -> bytes:
    if kind == 9:
        inner, items = content if isinstance(content, tuple) else (4, [])
        return struct.pack("<IQ", inner, len(items)) + b"".join(_content(inner, item) for item in items)
    if kind == 8:
        return _text(content)
    form = _FORMS.get(kind, "I")
    number = content if isinstance(content, int | float) else 0
    if form in "fd":
        try:
            return struct.pack(f"<{form}", number)
        except OverflowError:
            return struct.pack(f"<{form}", math.inf)
    size = struct.calcsize(form)
    whole = int(number) if math.isfinite(number) else 0
    return (whole % 2 ** (8 * size)).to_bytes(size, "little")
