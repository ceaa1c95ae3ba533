"""The block types of GGUF files, as they lie there: how many bytes hold how many weights, and which weights these are.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp. Every quantised type is the same idea: groups of codes, each with
a scale and perhaps an offset. What differs is how the bits are packed. The `gguf` package reads them; taken apart here
are those whose codes our own tiles keep. A new type is its line in `TYPES` here and, if that package lacks it, a
function, natively a file in kernels/native/src/types and its line in all.h there, and for cards a struct in
kernels/cuda/src/blocks.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.lut4 import IQ4_NL_TABLE, LUT4, MXFP4_TABLE
from engine.formats.weight_format import TiledFormat, WeightFormat

if TYPE_CHECKING:  # the window asks for sizes and names only
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Floats = NDArray[np.float32]

GRIDS = Path(__file__).with_name("grids.h")
"""The tables of the IQ types, for all who read them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Blocks, taken apart: w = scale * value - offset, where `BlockType` says which value a code stands for.

    Attributes:
        codes: uint8, or int8 where codes are signed, [blocks, groups, codes of a group].
        scales: [blocks, groups].
        offsets: [blocks, groups], if the type has them.
    """

    codes: NDArray[Any]
    scales: Floats
    offsets: Floats | None = None


@dataclass(frozen=True)
class BlockType(WeightFormat):
    """A number format of ggml.

    Attributes:
        name: as in ggml, and as the `dtype` of a `TensorEntry`.
        id: its number in files.
        elements, nbytes: of one block.
        split: blocks, uint8 [blocks, bytes of a block], taken apart: of types whose codes are kept, and of those that
            the `gguf` package does not read.
        halves: where a block has its fp16 scale, and that of its offsets.
        zero: what is subtracted from each code.
        table: what codes are positions in, if they are.
        kept_in: the format in tiles that keeps its codes.  native/src/ggml_blocks.h has the same.
        put: sets the scales of blocks to about these, where they are no fp16: what tests and proofs make up needs it.
    """

    name: str
    words: str
    bits: float = field(init=False)
    id: int
    elements: int
    nbytes: int
    split: Callable[[Bytes], Groups] | None = None
    halves: tuple[int, ...] = ()
    zero: int = 0
    table: tuple[int, ...] | None = None
    kept_in: TiledFormat | None = None
    put: Callable[[Bytes, Floats], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", 8 * self.nbytes / self.elements)

    @property
    def is_blocks(self) -> bool:
        return self.elements > 1

    @property
    def in_tiles(self) -> TiledFormat | None:
        """The format in tiles that loses least: that which keeps the codes, else int8; `None` for plain numbers."""
        return self.kept_in or INT8 if self.is_blocks else None

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows * -(-columns // self.elements) * self.nbytes,)

    def dequantise(self, raw: Bytes) -> Floats:
        """Rows of blocks, uint8 [..., bytes of a row] -> float32 [..., elements of a row].

        The same numbers as ggml's own reference, in single precision and in the same order.
        """
        import numpy as np

        shape = (*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.elements)
        if not raw.size:
            return np.zeros(shape, np.float32)
        if not self.is_blocks:
            return _plain(self.name, np.ascontiguousarray(raw)).reshape(shape)
        if self.split is None:
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(all="ignore"):
                found: Floats = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(self.id))
            return found
        groups = self.apart(raw)
        if self.table is not None:
            values: Floats = np.array(self.table, np.float32)[groups.codes]
        else:
            values = groups.codes.astype(np.float32)
            if self.zero:
                values -= np.float32(self.zero)
        with np.errstate(all="ignore"):
            values *= groups.scales[..., None]
            if groups.offsets is not None:
                values -= groups.offsets[..., None]
        return values.reshape(shape)

    def apart(self, raw: Bytes) -> Groups:
        """The codes of rows of blocks, uint8 [..., bytes of a row]; only where there is a `split`."""
        import numpy as np

        assert self.split is not None
        with np.errstate(all="ignore"):  # a broken file may hold infinities
            return self.split(np.ascontiguousarray(raw).reshape(-1, self.nbytes))


def _half(two_bytes: Bytes) -> NDArray[Any]:
    return _as(two_bytes, "<f2").astype("f4")


def _as(raw: Bytes, dtype: str) -> NDArray[Any]:
    import numpy as np

    return np.ascontiguousarray(raw).view(dtype)


def _fields(packed: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """[...] numbers -> [..., shifts]: what lies above each of these bits."""
    import numpy as np

    found: NDArray[Any] = packed[..., None] >> np.array(shifts, packed.dtype)
    return found


def _nibbles(pairs: Bytes) -> NDArray[Any]:
    """[..., n] bytes -> [..., 2, n] codes: all low halves come before all high ones."""
    import numpy as np

    return np.stack((pairs & 15, pairs >> 4), -2)


def _bits(mask: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 8 * n], the lowest bit of a byte first."""
    import numpy as np

    return np.unpackbits(np.ascontiguousarray(mask), axis=-1, bitorder="little")


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).reshape(-1, 1, 32), _half(blocks[:, :2]))


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]).reshape(-1, 1, 32), _half(blocks[:, :2]), -_half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _bits(blocks[:, 2:6]) << 4
    return Groups(codes[:, None], _half(blocks[:, :2]))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(_as(blocks[:, 2:], "i1")[:, None], _half(blocks[:, :2]))


def _q4_k(blocks: Bytes) -> Groups:
    """Scales and offsets of the 8 groups have 6 bits each, packed in 12 bytes."""
    import numpy as np

    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = np.concatenate((first & 63, (third & 15) | (first >> 2 & 48)), -1)
    lowest = np.concatenate((second & 63, (third >> 4) | (second >> 2 & 48)), -1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return Groups(codes, _half(blocks[:, :2]) * steps, _half(blocks[:, 2:4]) * lowest)


def _put_iq1_m(blocks: Bytes, scales: Floats) -> None:
    halves = scales.astype("<f2").view("u2")
    for nibble in range(4):
        at = blocks[:, 49 + 2 * nibble]
        at &= 15
        at |= ((halves >> 4 * nibble & 15) << 4).astype("u1")


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).reshape(-1, 1, 32), _half(blocks[:, :2]))


def _iq4_xs(blocks: Bytes) -> Groups:
    high = _fields(_as(blocks[:, 2:4], "<u2")[:, 0], *range(0, 16, 2)) & 3
    low = _fields(blocks[:, 4:8], 0, 4).reshape(-1, 8) & 15
    steps = (low | high << 4).astype("f4") - 32
    return Groups(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32), _half(blocks[:, :2]) * steps)


def _mxfp4(blocks: Bytes) -> Groups:
    import numpy as np

    exponents = blocks[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)  # the halves of the two smallest are subnormal
    bits = np.where(exponents < 2, small, (np.maximum(exponents, 1) - 1) << 23).astype(np.uint32)
    return Groups(_nibbles(blocks[:, 1:]).reshape(-1, 1, 32), bits.view(np.float32))


def _put_mxfp4(blocks: Bytes, scales: Floats) -> None:
    import numpy as np

    blocks[:, 0] = np.round(np.log2(scales)) + 128


def _put_nvfp4(blocks: Bytes, scales: Floats) -> None:
    import numpy as np

    tenths = np.log2(np.maximum(scales, 2.0**-7)) + 8  # exponents from 1 on
    blocks[:, :4] = (np.minimum(tenths, 14).astype(np.uint8) << 3)[:, None] | blocks[:, :4] & 7


def _q1_0(blocks: Bytes) -> Groups:
    return Groups((_bits(blocks[:, 2:]) << 1)[:, None], _half(blocks[:, :2]))


def _q2_0(blocks: Bytes) -> Groups:
    return Groups((_fields(blocks[:, 2:], 0, 2, 4, 6) & 3).reshape(-1, 1, 64), _half(blocks[:, :2]))


def _plain(name: str, raw: Bytes) -> Floats:
    import numpy as np

    if name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f4").astype(np.float32) if name == "F32" else _half(raw)


TYPES = (
    BlockType("F32", "32-bit", 0, 1, 4),
    BlockType("F16", "16-bit", 1, 1, 2),
    BlockType("Q4_0", "4-bit", 2, 32, 18, _q4_0, (0,), zero=8, kept_in=INT4),
    BlockType("Q4_1", "4-bit", 3, 32, 20, _q4_1, (0, 2), kept_in=INT4),
    BlockType("Q5_0", "5-bit", 6, 32, 22, _q5_0, (0,), zero=16, kept_in=INT8),
    BlockType("Q5_1", "5-bit", 7, 32, 24, halves=(0, 2)),
    BlockType("Q8_0", "8-bit", 8, 32, 34, _q8_0, (0,), kept_in=INT8),
    BlockType("Q2_K", "2-bit", 10, 256, 84, halves=(80, 82)),
    BlockType("Q3_K", "3-bit", 11, 256, 110, halves=(108,)),
    BlockType("Q4_K", "4-bit", 12, 256, 144, _q4_k, (0, 2), kept_in=INT4),
    BlockType("Q5_K", "5-bit", 13, 256, 176, halves=(0, 2)),
    BlockType("Q6_K", "6-bit", 14, 256, 210, halves=(208,)),
    BlockType("IQ2_XXS", "2-bit", 16, 256, 66, halves=(0,)),
    BlockType("IQ2_XS", "2-bit", 17, 256, 74, halves=(0,)),
    BlockType("IQ3_XXS", "3-bit", 18, 256, 98, halves=(0,)),
    BlockType("IQ1_S", "1-bit", 19, 256, 50, halves=(0,)),
    BlockType("IQ4_NL", "4-bit", 20, 32, 18, _iq4_nl, (0,), table=IQ4_NL_TABLE, kept_in=LUT4),
    BlockType("IQ3_S", "3-bit", 21, 256, 110, halves=(0,)),
    BlockType("IQ2_S", "2-bit", 22, 256, 82, halves=(0,)),
    BlockType("IQ4_XS", "4-bit", 23, 256, 136, _iq4_xs, (0,), table=IQ4_NL_TABLE, kept_in=LUT4),
    BlockType("IQ1_M", "1-bit", 29, 256, 56, put=_put_iq1_m),
    BlockType("BF16", "16-bit", 30, 1, 2),
    BlockType("TQ1_0", "ternary", 34, 256, 54, halves=(52,)),
    BlockType("TQ2_0", "ternary", 35, 256, 66, halves=(64,)),
    BlockType("MXFP4", "4-bit", 39, 32, 17, _mxfp4, table=MXFP4_TABLE, put=_put_mxfp4, kept_in=LUT4),
    BlockType("NVFP4", "4-bit", 40, 64, 36, put=_put_nvfp4),
    BlockType("Q1_0", "1-bit", 41, 128, 18, _q1_0, (0,), zero=1),
    BlockType("Q2_0", "2-bit", 42, 64, 18, _q2_0, (0,), zero=1),
)

GGML: Mapping[str, BlockType] = {each.name: each for each in TYPES}
"""By ggml's names."""
BLOCK_TYPES: Mapping[int, BlockType] = {each.id: each for each in TYPES}
"""By their numbers in files."""
