"""The definition of a weight format: its memory layout, its cost and its display name.

Nothing here or in a format's file imports torch until something is quantised: the planner and the window use sizes and
names only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TILE_ROWS = 32
"""Rows of a tile."""
GROUP = 32
"""Weights of a row that share a scale; tiles are 32 x 32."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat(ABC):
    """How the weights of a matrix are stored.

    Attributes:
        name: identifier in settings, records and measurements.
        words: display name, such as `8-bit`.
        bits: per weight, including scales and zero points.
        worth: speedup over the previous format required for `auto` to choose it; 0: never chosen.
        native: its number in `switchyard_kernels.h`; `None` where the native kernels do not read it.
        on_card: whether our GPU kernels read it; otherwise it is unpacked for PyTorch's operators.
        small_models: format of the most sensitive matrices of a small model, if the others are in this one.
        head: format of the output layer on the CPU, where errors reach the logits directly.
    """

    name: str
    words: str
    bits: float
    worth: float = 0.0
    native: int | None = None
    on_card: bool = False
    small_models: str = ""
    head: str = ""

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8

    @property
    def is_tiled(self) -> bool:
        """Whether matrices are tiled: they have to be quantised, and only some kernels read them."""
        return False

    @abstractmethod
    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Bytes of each stored part of a matrix [rows, columns]."""


@dataclass(frozen=True, kw_only=True)
class PlainFormat(WeightFormat):
    dtype: str

    @property
    def width(self) -> int:
        return int(self.bits) // 8

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        return (self.width * rows * columns,)


@dataclass(frozen=True, kw_only=True)
class TiledFormat(WeightFormat):
    """Codes in tiles of 32 x 32, with a scale per 32 weights of a row (`engine.formats.tiles`).

    A weight is scale * value; the value is the code itself, the code minus a zero point, or a table entry.

    Attributes:
        code_bits: 8 (signed) or 4 (unsigned).
        has_zeros: whether each scale has a zero point, in sixteenths.
        table: the 16 values, from -127 to 127, to which new matrices are fitted, if codes index a table. A stored
            matrix has its own.
        scale_type: torch's name of the scales' type, of 16 bits.
    """

    code_bits: int
    has_zeros: bool = False
    table: tuple[int, ...] | None = None
    scale_type: str = "bfloat16"

    @property
    def is_tiled(self) -> bool:
        return True

    def parts(self, rows: int, columns: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Suffix of a part's name -> its shape and torch dtype name: the parts of a matrix."""
        grid = (-(-rows // TILE_ROWS), -(-columns // GROUP))
        parts: dict[str, tuple[tuple[int, ...], str]] = {
            "": ((*grid, TILE_ROWS * GROUP * self.code_bits // 8), "uint8"),
            "_scales": ((*grid, TILE_ROWS), self.scale_type),
        }
        if self.has_zeros:
            parts["_zeros"] = ((*grid, TILE_ROWS), "uint8")
        if self.table is not None:
            parts["_table"] = ((len(self.table),), "int8")
        return parts

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        tiles = -(-rows // TILE_ROWS) * -(-columns // GROUP)
        sizes = [tiles * TILE_ROWS * GROUP * self.code_bits // 8, tiles * TILE_ROWS * 2]
        if self.has_zeros:
            sizes.append(tiles * TILE_ROWS)
        if self.table is not None:
            sizes.append(len(self.table))
        return tuple(sizes)

    @abstractmethod
    def fit(self, groups: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The best codes for groups of weights, in torch, on any device: the reference for the native kernels.

        Args:
            groups: fp32 [..., 32].
            rounds: of the optimisation, if there is one; 0 skips it.

        Returns:
            uint8 codes [..., 32] (int8 if signed), scales [...], NaN for a group with an infinity or a NaN, and
            uint8 zeros [...] in sixteenths or `None`.
        """
