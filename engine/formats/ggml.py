"""The block types of GGUF files, as they lie there: how many bytes hold how many weights, and their names for people.

What the numbers are: `engine.checkpoint.gguf.types`, and natively one file a type in kernels/native/src/types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.formats.weight_format import WeightFormat


@dataclass(frozen=True, kw_only=True)
class BlockFormat(WeightFormat):
    """Rows of blocks.

    Attributes:
        number: ggml's.
        elements, nbytes: of a block.
    """

    number: int
    elements: int
    nbytes: int

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """See `WeightFormat.part_bytes`."""
        return (rows * -(-columns // self.elements) * self.nbytes,)


def _block(name: str, number: int, elements: int, nbytes: int, words: str) -> BlockFormat:
    bits = 8 * nbytes / elements
    return BlockFormat(name=name, words=words, bits=bits, number=number, elements=elements, nbytes=nbytes)


GGML: Mapping[str, BlockFormat] = {
    each.name: each
    for each in (
        _block("F32", 0, 1, 4, "32-bit"),
        _block("F16", 1, 1, 2, "16-bit"),
        _block("Q4_0", 2, 32, 18, "4-bit"),
        _block("Q4_1", 3, 32, 20, "4-bit"),
        _block("Q5_0", 6, 32, 22, "5-bit"),
        _block("Q5_1", 7, 32, 24, "5-bit"),
        _block("Q8_0", 8, 32, 34, "8-bit"),
        _block("Q2_K", 10, 256, 84, "2-bit"),
        _block("Q3_K", 11, 256, 110, "3-bit"),
        _block("Q4_K", 12, 256, 144, "4-bit"),
        _block("Q5_K", 13, 256, 176, "5-bit"),
        _block("Q6_K", 14, 256, 210, "6-bit"),
        _block("IQ4_NL", 20, 32, 18, "4-bit"),
        _block("IQ4_XS", 23, 256, 136, "4-bit"),
        _block("BF16", 30, 1, 2, "16-bit"),
        _block("MXFP4", 39, 32, 17, "4-bit"),
    )
}
"""By ggml's names."""
