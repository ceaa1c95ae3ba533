"""The format of a bank file: its header, and the offset of everything in it.

    preamble (32 bytes)  magic, format version, length and digest of the header
    header               canonical JSON: precision, layouts, layers, the source's fingerprint
    table                for each layer the checksums of its E records and a seal over them (8 bytes each)
    records              layer by layer, page-aligned, laid out as in RAM

The table and the records start on page boundaries.  A layer's seal is written after its records have reached the disk,
so the table of an unfinished file is its journal.  Numbers and records are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.checksums import CHECKSUM_BYTES
from engine.experts.record import RECORD_ALIGNMENT, PartSpec, RecordLayout

MAGIC = b"SWYBANK\n"
FORMAT_VERSION = 1
"""Of the file.  A file of another version is rebuilt, never converted."""

LAYOUT_VERSION = 2
"""Of the records' content: incremented when kernels read the bytes of a part in another way."""

CONVERTER = "converter"
"""Of a header's `source`: the library that converted the model, with its version."""

PREAMBLE = struct.Struct("<8sII8s8x")
_MAX_HEADER = 64 * 2**20
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8, torch.int32)
}


class UnusableBankError(EngineError):
    """A bank file that cannot be used and has to be rebuilt.  The message says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The prepared experts in {path} cannot be used because {reason}: prepare the model again.",
        )
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class BankLayerSpec:
    """One experts module: its name in the model, how many experts it has, and the layout of their records."""

    name: str
    num_experts: int
    layout: RecordLayout

    @property
    def nbytes(self) -> int:
        """Bytes of all its records."""
        return self.num_experts * self.layout.nbytes


@dataclass(frozen=True)
class BankHeader:
    """What a bank file holds.  Two files with equal headers hold the same experts.

    Attributes:
        precision: name of the weights' format, for example `bf16`.
        group_size: how many weights share a scale; `None` without scales.
        checksum: name of the records' checksum.
        source: fingerprint of the model that the bank was built from.
        layers: in file order.
    """

    precision: str
    group_size: int | None
    checksum: str
    source: Mapping[str, Any]
    layers: tuple[BankLayerSpec, ...]
    layout_version: int = LAYOUT_VERSION

    @cached_property
    def encoded(self) -> bytes:
        """Preamble and header as stored in the file, padded to a page."""
        body = json.dumps(self._as_json(), sort_keys=True, separators=(",", ":")).encode()
        whole = PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(body), digest(body)) + body
        return whole.ljust(_pages(len(whole)), b"\0")

    @property
    def table_offset(self) -> int:
        """Where the first layer's checksums start."""
        return len(self.encoded)

    @cached_property
    def table_rows(self) -> tuple[int, ...]:
        """Where each layer's checksums start."""
        rows, offset = [], self.table_offset
        for layer in self.layers:
            rows.append(offset)
            offset += (layer.num_experts + 1) * CHECKSUM_BYTES
        return tuple(rows)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer's records start."""
        entries = sum(layer.num_experts + 1 for layer in self.layers)
        offsets, offset = [], self.table_offset + _pages(entries * CHECKSUM_BYTES)
        for layer in self.layers:
            offsets.append(offset)
            offset += layer.nbytes
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        if not self.layers:
            return self.table_offset
        return self.layer_offsets[-1] + self.layers[-1].nbytes

    @cached_property
    def records_nbytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Layer name -> its index."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    def record_offset(self, layer: int, expert: int) -> int:
        """Where a record starts."""
        return self.layer_offsets[layer] + expert * self.layers[layer].layout.nbytes

    def seal(self, layer: int, checksums: bytes) -> bytes:
        """Digest stored after a finished layer's checksums; binds them to this layer of this bank."""
        return digest(self.encoded + layer.to_bytes(4, "little") + checksums)

    def difference(self, other: BankHeader) -> str | None:
        """Why a bank with header `other` cannot be used in place of this one; `None` if it can."""
        if self.layout_version != other.layout_version:
            return "its records have the layout of another version of Switchyard"
        if (self.precision, self.group_size) != (other.precision, other.group_size):
            return f"it holds the experts in {other.precision} rather than {self.precision}"
        if self.source != other.source:
            ours, theirs = self.source.get(CONVERTER), other.source.get(CONVERTER)
            if ours != theirs and {**other.source, CONVERTER: ours} == self.source:
                return f"it was made with {theirs}, and here is {ours}"
            return "the model that it was made from has changed"
        if _described(self.layers) != _described(other.layers):
            return "its layers are not those of the model"
        return None

    def _as_json(self) -> dict[str, Any]:
        # What is stored of two layouts may be equal: it then is one, as it will be when the header is read again.
        stored = [RecordLayout(layer.layout.parts, layer.layout.nbytes) for layer in self.layers]
        layouts = list(dict.fromkeys(stored))
        return {
            "precision": self.precision,
            "group_size": self.group_size,
            "checksum": self.checksum,
            "layout_version": self.layout_version,
            "source": self.source,
            "layouts": [_layout_to_json(layout) for layout in layouts],
            "layers": [
                [layer.name, layer.num_experts, layouts.index(layout)]
                for layer, layout in zip(self.layers, stored, strict=True)
            ],
        }


def _described(layers: tuple[BankLayerSpec, ...]) -> list[tuple[Any, ...]]:
    """What a file stores about layers: less than kernels need to know about a layout."""
    return [(spec.name, spec.num_experts, spec.layout.nbytes, spec.layout.parts) for spec in layers]


def parse_preamble(path: Path, raw: bytes) -> tuple[int, bytes]:
    """The first bytes of a file -> length and digest of its header.

    Raises:
        UnusableBankError: the file is not a bank, or has another format version.
    """
    if len(raw) < PREAMBLE.size:
        raise UnusableBankError(path, "the file is cut short")
    magic, version, length, expected = PREAMBLE.unpack_from(raw)
    if magic != MAGIC:
        raise UnusableBankError(path, "the file is not a prepared model, or its first bytes are damaged")
    if version != FORMAT_VERSION:
        raise UnusableBankError(path, f"the file has format version {version}, not {FORMAT_VERSION}")
    if length > _MAX_HEADER:
        raise UnusableBankError(path, "its header is damaged")
    return length, expected


def parse_header(path: Path, body: bytes, expected: bytes) -> BankHeader:
    """The header's bytes -> the header.

    Raises:
        UnusableBankError: they are damaged.
    """
    if digest(body) != expected:
        raise UnusableBankError(path, "its header is damaged")
    try:
        content = json.loads(body)
        layouts = [_layout_from_json(value) for value in content["layouts"]]
        layers = tuple(BankLayerSpec(str(name), int(count), layouts[at]) for name, count, at in content["layers"])
        return BankHeader(
            str(content["precision"]),
            content["group_size"],
            str(content["checksum"]),
            content["source"],
            layers,
            int(content["layout_version"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UnusableBankError(path, f"its header is damaged ({error})") from error


def digest(data: bytes) -> bytes:
    """Digest of a header or table: these are small, so any digest is fast enough."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _layout_to_json(layout: RecordLayout) -> dict[str, Any]:
    return {
        "nbytes": layout.nbytes,
        "parts": [
            [part.name, list(part.shape), str(part.dtype).removeprefix("torch."), part.transposed, part.offset]
            for part in layout.parts
        ],
    }


def _layout_from_json(value: dict[str, Any]) -> RecordLayout:
    parts = tuple(
        PartSpec(str(name), tuple(int(size) for size in shape), _DTYPES[dtype], bool(transposed), int(offset))
        for name, shape, dtype, transposed, offset in value["parts"]
    )
    layout = RecordLayout(parts, int(value["nbytes"]))
    if layout.nbytes <= 0 or layout.nbytes % RECORD_ALIGNMENT:
        raise ValueError("the record size is not a whole number of pages")
    for part in parts:
        inside = part.offset >= 0 and part.offset + part.nbytes <= layout.nbytes
        if not inside or part.offset % part.dtype.itemsize or any(size < 0 for size in part.shape):
            raise ValueError(f"{part.name} lies outside its record")
    return layout


def _pages(count: int) -> int:
    return -(-count // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
