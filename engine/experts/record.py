"""The record: everything that one expert is, in one contiguous, aligned piece of memory.

All experts of a layer have records of one layout, one after the other, so that a layer is one tensor of bytes
[E, record bytes], an expert is one row of it, and moving an expert between tiers is one copy.  Matrices are stored
as `torch.nn.functional.linear` wants them, [out, in], whatever the module's own layout is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.common.footprint import PART_ALIGNMENT as PART_ALIGNMENT
from engine.common.footprint import RECORD_ALIGNMENT as RECORD_ALIGNMENT
from engine.common.footprint import record_bytes, round_up
from engine.experts.record_memory import RecordMemory

_IN_HUGE_PAGES = 4 * 2**20
"""Bytes of records from which on huge pages are worth a mapping of their own."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One tensor of an expert.

    Attributes:
        name: the module's parameter name (`gate_up_proj`, `down_proj_bias`, ...).
        shape: of one expert, as stored in the record.
        dtype: as stored in the record.
        transposed: whether the module's own parameter has the last two dimensions the other way round.
        offset: bytes from the start of the record.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the parts of an expert lie in its record."""

    parts: tuple[PartSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], *, transposed: bool) -> RecordLayout:
        """The layout for parts of these module shapes (of one expert) and dtypes, in this order."""
        parts, offset = [], 0
        for name, (shape, dtype) in shapes.items():
            turned = transposed and len(shape) == 2
            stored = (shape[1], shape[0]) if turned else shape
            part = PartSpec(name, stored, dtype, turned, offset)
            parts.append(part)
            offset = round_up(offset + part.nbytes, PART_ALIGNMENT)
        return cls(tuple(parts), record_bytes(part.nbytes for part in parts))

    @property
    def unquantised(self) -> RecordLayout:
        """The layout of the same expert as the checkpoint's conversion makes it."""
        return self

    def stacked_view(self, records: torch.Tensor, part: PartSpec) -> torch.Tensor:
        """A part of all experts, [E, *shape], as a view of their records [E, nbytes] (uint8)."""
        typed = records.view(part.dtype)
        strides = [math.prod(part.shape[i + 1 :]) for i in range(len(part.shape))]
        return typed.as_strided(
            (records.shape[0], *part.shape),
            (self.nbytes // part.dtype.itemsize, *strides),
            typed.storage_offset() + part.offset // part.dtype.itemsize,
        )


def allocate_records(count: int, layout: RecordLayout, device: torch.device) -> torch.Tensor:
    """Page-aligned memory for `count` records: [count, layout.nbytes], uint8, not initialised.

    Raises:
        MemoryError, RuntimeError: there is not so much.
    """
    if device.type == "cpu" and count * layout.nbytes >= _IN_HUGE_PAGES:
        return RecordMemory(count, layout.nbytes).records
    raw = torch.empty(count * layout.nbytes + RECORD_ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % RECORD_ALIGNMENT
    return raw[skip : skip + count * layout.nbytes].view(count, layout.nbytes)
