"""What a weight format is: how its bytes lie, what they cost, and how people call it.

Nothing here or in a format's file imports torch before something is quantised: the planner and the window ask formats
for sizes and words.
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
"""Weights of a row that share a scale: tiles are 32 x 32."""


@dataclass(frozen=True, kw_only=True)
class WeightFormat(ABC):
    """How the weights of a matrix are stored.

    Attributes:
        name: as in settings, records and measurements.
        words: what people read: `8-bit`.
        bits: of one weight, scales and zero points counted.
        worth: how many times as fast as the format before it it has to be for `auto` to take it; 0: never.
        native: its number in `switchyard_kernels.h`; `None` where the native kernels do not read it.
        on_card: whether the graphics card's own kernels read it; else PyTorch's operators do, after unpacking it.
        small_models: name of the format of the most sensitive matrices of a small model whose others are in this one.
        head: name of the format of a model's output layer on the CPU, where an error comes through to the text at once.
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
        """Bytes of one weight, scales and zero points counted."""
        return self.bits / 8

    @property
    def is_tiled(self) -> bool:
        """Whether matrices are in tiles, so that they have to be quantised and only some kernels read them."""
        return False

    @abstractmethod
    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Bytes of each part that a matrix [rows, columns] is stored as."""


@dataclass(frozen=True, kw_only=True)
class PlainFormat(WeightFormat):
    """Numbers of one floating type, row by row.

    Attributes:
        dtype: torch's name of the type.
    """

    dtype: str

    @property
    def width(self) -> int:
        """Bytes of a number."""
        return int(self.bits) // 8

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `WeightFormat.part_bytes`."""
        return (self.width * rows * columns,)


@dataclass(frozen=True, kw_only=True)
class TiledFormat(WeightFormat):
    """Codes in tiles of 32 x 32, with a scale in bf16 for each 32 weights of a row (`engine.formats.tiles`).

    A weight is scale * value; the value is the code itself, the code less a zero point, or what a table has for it.

    Attributes:
        code_bits: 8 (signed) or 4 (unsigned).
        has_zeros: whether each scale has a zero point, in sixteenths, beside it.
        table: the values of 16 codes, from -127 to 127, where codes are looked up: what new matrices are fitted to.  A
            stored matrix has its own.
    """

    code_bits: int
    has_zeros: bool = False
    table: tuple[int, ...] | None = None

    @property
    def is_tiled(self) -> bool:
        """See `WeightFormat.is_tiled`."""
        return True

    def parts(self, rows: int, columns: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Suffix of a part's name -> its shape and torch's name of its type: what a matrix is made of."""
        grid = (-(-rows // TILE_ROWS), -(-columns // GROUP))
        parts: dict[str, tuple[tuple[int, ...], str]] = {
            "": ((*grid, TILE_ROWS * GROUP * self.code_bits // 8), "uint8"),
            "_scales": ((*grid, TILE_ROWS), "bfloat16"),
        }
        if self.has_zeros:
            parts["_zeros"] = ((*grid, TILE_ROWS), "uint8")
        if self.table is not None:
            parts["_table"] = ((len(self.table),), "int8")
        return parts

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `WeightFormat.part_bytes`."""
        tiles = -(-rows // TILE_ROWS) * -(-columns // GROUP)
        sizes = [tiles * TILE_ROWS * GROUP * self.code_bits // 8, tiles * TILE_ROWS * 2]
        if self.has_zeros:
            sizes.append(tiles * TILE_ROWS)
        if self.table is not None:
            sizes.append(len(self.table))
        return tuple(sizes)

    @abstractmethod
    def fit(self, groups: torch.Tensor, rounds: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The best codes for groups of weights, in torch, on any device: what the native kernels do, for reference.

        Args:
            groups: fp32 [..., 32].
            rounds: of the optimisation, where there is one; 0 is the plain way.

        Returns:
            uint8 codes [..., 32] (int8 where they have a sign), bf16 scales [...], NaN for a group with an infinity
            or a NaN, and uint8 zeros [...] in sixteenths or `None`.
        """
