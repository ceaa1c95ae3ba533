"""Formats known by their size only: those of published systems, and what a checkpoint holds already."""

from __future__ import annotations

from dataclasses import dataclass

from engine.formats.weight_format import WeightFormat


@dataclass(frozen=True, kw_only=True)
class SizedFormat(WeightFormat):
    """A format known only by its size; nothing here reads or writes it.

    Attributes:
        tiled: `is_tiled`.
    """

    tiled: bool = False

    @property
    def is_tiled(self) -> bool:
        """See `WeightFormat.is_tiled`."""
        return self.tiled

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `WeightFormat.part_bytes`."""
        return (round(rows * columns * self.bytes_per_weight),)


AWQ4 = SizedFormat(name="awq4", words="AWQ, 4-bit", bits=4.0 + 20 / 128)
"""Groups of 128 weights with a 16-bit scale and a 4-bit zero point."""
HQQ4 = SizedFormat(name="hqq4", words="HQQ, 4-bit", bits=4.0 + 16 / 64 + 16 / 128)
"""Groups of 64 weights with 8-bit scale and zero point, themselves in groups of 128."""
AS_IN_FILE = SizedFormat(name="stored", words="as in the file", bits=4.9, tiled=True)
"""Each matrix in the format that keeps what its file holds; the bits are those of the most common files (Q4_K_M)."""
