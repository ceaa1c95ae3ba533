"""Weight formats, one file each.

A new one is a file here and its line in `_ALL`; for the native kernels a `format_*.h` with its line in `formats.h` and
its row in `kFormats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.common.config import PRECISIONS
from engine.formats.ggml import GGML
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.lut4 import LUT4
from engine.formats.weight_format import GROUP, TILE_ROWS, PlainFormat, TiledFormat, WeightFormat

FP32 = PlainFormat(name="fp32", words="32-bit", bits=32.0, dtype="float32", on_card=True)
BF16 = PlainFormat(name="bf16", words="16-bit", bits=16.0, dtype="bfloat16", worth=1.0, native=0, on_card=True)


@dataclass(frozen=True, kw_only=True)
class SizedFormat(WeightFormat):
    """A format known only by its size; nothing here reads or writes it."""

    tiled: bool = False

    @property
    def is_tiled(self) -> bool:
        return self.tiled

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        return (round(rows * columns * self.bytes_per_weight),)


AWQ4 = SizedFormat(name="awq4", words="AWQ, 4-bit", bits=4.0 + 20 / 128)
"""Groups of 128 weights with a 16-bit scale and a 4-bit zero point."""
HQQ4 = SizedFormat(name="hqq4", words="HQQ, 4-bit", bits=4.0 + 16 / 64 + 16 / 128)
"""Groups of 64 weights with 8-bit scale and zero point, themselves in groups of 128."""
AS_IN_FILE = SizedFormat(name="stored", words="as in the file", bits=4.9, tiled=True)
"""Each matrix in the format that keeps what its file holds; the bits are those of the most common files (Q4_K_M)."""


__all__ = ["GGML", "GROUP", "PRECISIONS", "TILE_ROWS", "PlainFormat", "TiledFormat", "WeightFormat"]

_ALL: tuple[WeightFormat, ...] = (FP32, BF16, INT8, INT4, LUT4, AWQ4, HQQ4, AS_IN_FILE)

FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (*_ALL, *GGML.values())}
"""All formats by name: ours, best quality first, and then those of GGUF files."""
LADDER: tuple[str, ...] = tuple(each.name for each in _ALL if each.worth)
"""Names of the formats that `auto` chooses from, best quality first."""
AUTO = "auto"
STORED = AS_IN_FILE.name
"""What `auto` tries first for checkpoints that are quantised already."""
SMALLEST = 64 * 1024
"""Weights of a linear layer below which it stays plain: the product costs less than handing it to threads."""
_ROUTERS = ("gate", "router", "wg", "classifier")
SMALL_MODEL = 10**9
"""Weights including all experts: smaller models keep their sensitive matrices in a finer format."""


def format_of(name: str) -> WeightFormat:
    return FORMATS[name]


def tiled_format(name: str) -> TiledFormat | None:
    found = FORMATS.get(name)
    return found if isinstance(found, TiledFormat) else None


def as_stored(name: str) -> PlainFormat:
    """The plain format that goes with a precision: for activations, biases and everything not quantised."""
    found = FORMATS.get(name)
    return found if isinstance(found, PlainFormat) else BF16


def is_precision(name: str) -> bool:
    return name in PRECISIONS and name != AUTO


def measured_as(name: str, bits: float = 0.0) -> str:
    """The format of `LADDER` whose measured speeds hold for `name`: the nearest in bits (for `auto`: the first)."""
    if name in LADDER or name not in FORMATS:
        return name if name in LADDER else LADDER[0]
    bits = bits or FORMATS[name].bits
    return min(LADDER, key=lambda each: abs(FORMATS[each].bits - bits))


def next_smaller(name: str) -> str | None:
    """The next coarser format that `auto` may choose; `None` if there is none."""
    bits = FORMATS[name].bits
    return next((each for each in LADDER if FORMATS[each].bits < bits), None)


def careful(name: str, weights: int) -> str:
    """The format of the experts' down_proj and of all dense layers, in a model with this many weights.

    Fewer weights average out fewer errors: 4 bits for everything cost the starter (0.13e9 weights) a fifth of its
    perplexity, four bits for gate and up alone a twentieth (`bench quality`).  A small model's bytes hardly matter.
    """
    found = FORMATS[name]
    return found.small_models if found.small_models and weights < SMALL_MODEL else name


def head_format(dense: str) -> str:
    """The format of a model's output layer on the CPU, if the other dense layers are in `dense`."""
    return FORMATS[dense].head or dense


def is_router(name: str) -> bool:
    """Whether a module of this name is a router: too small to matter, and rounding would change the routing."""
    return name.rpartition(".")[2] in _ROUTERS or name.endswith("router.proj")
