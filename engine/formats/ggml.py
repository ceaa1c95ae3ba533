"""The block types of GGUF files, as they lie there: how many bytes hold how many weights, and which weights these are.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp. Every quantised type is the same idea: groups of codes, each with
a scale and perhaps an offset. What differs is how the bits are packed. A new type is its function and its line in
`TYPES` here, natively a file in kernels/native/src/types and its line in all.h there, and for cards a struct in
kernels/cuda/src/blocks.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
        split: blocks, uint8 [blocks, bytes of a block], taken apart; `None` for plain numbers.
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
    def in_tiles(self) -> TiledFormat | None:
        """The format in tiles that loses least: that which keeps the codes, else int8; `None` for plain numbers."""
        return None if self.split is None else self.kept_in or INT8

    def part_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows * -(-columns // self.elements) * self.nbytes,)

    def dequantise(self, raw: Bytes) -> Floats:
        """Rows of blocks, uint8 [..., bytes of a row] -> float32 [..., elements of a row].

        The same numbers as ggml's own reference, in single precision and in the same order.
        """
        import numpy as np

        shape = (*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.elements)
        if self.split is None:
            return _plain(self.name, np.ascontiguousarray(raw)).reshape(shape)
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
        """The codes of rows of blocks, uint8 [..., bytes of a row]; only for quantised types."""
        import numpy as np

        assert self.split is not None
        with np.errstate(all="ignore"):  # a broken file may hold infinities
            return self.split(np.ascontiguousarray(raw).reshape(-1, self.nbytes))


def _half(two_bytes: Bytes) -> NDArray[Any]:
    return _as(two_bytes, "<f2").astype("f4")


def _as(raw: Bytes, dtype: str) -> NDArray[Any]:
    import numpy as np

    return np.ascontiguousarray(raw).view(dtype)


def _floats(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers.astype("f4")


def _shifted(packed: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """[..., n] numbers -> [..., shifts, n]: what lies above each of these bits."""
    import numpy as np

    found: NDArray[Any] = packed[..., None, :] >> np.array(shifts, packed.dtype)[:, None]
    return found


def _fields(packed: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """[...] numbers -> [..., shifts]: what lies above each of these bits."""
    import numpy as np

    found: NDArray[Any] = packed[..., None] >> np.array(shifts, packed.dtype)
    return found


def _nibbles(pairs: Bytes) -> NDArray[Any]:
    """[..., n] bytes -> [..., 2, n] codes: all low halves come before all high ones."""
    return _shifted(pairs, 0, 4) & 15


def _bits(mask: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 8 * n], the lowest bit of a byte first."""
    import numpy as np

    return np.unpackbits(np.ascontiguousarray(mask), axis=-1, bitorder="little")


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    import numpy as np

    return np.concatenate(parts, -1)


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).reshape(-1, 1, 32), _half(blocks[:, :2]))


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]).reshape(-1, 1, 32), _half(blocks[:, :2]), -_half(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _bits(blocks[:, 2:6]) << 4
    return Groups(codes[:, None], _half(blocks[:, :2]))


def _q5_1(blocks: Bytes) -> Groups:
    codes = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _bits(blocks[:, 4:8]) << 4
    return Groups(codes[:, None], _half(blocks[:, :2]), -_half(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(_as(blocks[:, 2:], "i1")[:, None], _half(blocks[:, :2]))


def _pairs_of_bits(packed: Bytes) -> NDArray[Any]:
    """64 bytes: of each 128 codes, two bits for each 32 of them."""
    return _shifted(packed.reshape(-1, 2, 32), 0, 2, 4, 6) & 3


def _q2_k(blocks: Bytes) -> Groups:
    steps, scale, lowest = blocks[:, :16], _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    codes = _pairs_of_bits(blocks[:, 16:80])
    return Groups(codes.reshape(-1, 16, 16), scale * (steps & 15), lowest * (steps >> 4))


def _q3_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _shifted(blocks[:, 104:108], 0, 2, 4, 6).reshape(-1, 16) & 3
    steps = _floats(low | high << 4) - 32
    third = _shifted(blocks[:, :32], *range(8)).reshape(-1, 2, 4, 32) & 1
    codes = _pairs_of_bits(blocks[:, 32:96]) | third << 2
    return Groups(codes.reshape(-1, 16, 16), _half(blocks[:, 108:110]) * steps)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the 8 groups of a Q4_K or Q5_K block: 6 bits of each, packed in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = _joined((first & 63, (third & 15) | (first >> 2 & 48)))
    lowest = _joined((second & 63, (third >> 4) | (second >> 2 & 48)))
    return _half(blocks[:, :2]) * steps, _half(blocks[:, 2:4]) * lowest


def _q4_k(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = _shifted(blocks[:, 16:48], *range(8)) & 1
    return Groups(low | fifth << 4, *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), 0, 2, 4, 6).reshape(-1, 8, 32) & 3
    steps = _as(blocks[:, 192:208], "i1")
    return Groups((low | high << 4).reshape(-1, 16, 16), _half(blocks[:, 208:210]) * steps)


@cache
def _grid(name: str, bits: int, values: tuple[int, ...]) -> NDArray[np.int8]:
    """A table of grids.h: what each position stands for, int8 [positions, weights]."""
    import numpy as np

    found = re.search(rf"GRID_{name}\[\d+\] = {{([^}}]*)}}", GRIDS.read_text(encoding="utf-8"))
    assert found is not None
    words = np.array([int(each, 16) for each in found[1].replace(",", " ").split()], np.uint16)
    codes = _fields(words, *range(0, 16 // bits // 4 * 4 * bits, bits)) & (2**bits - 1)
    grid: NDArray[np.int8] = np.array(values, np.int8)[codes]
    return grid


def _iq2_grid(name: str) -> NDArray[np.int8]:
    return _grid(name, 2, (8, 25, 43))


def _signs(bits: Bytes) -> NDArray[np.int8]:
    """[..., n] bytes -> [..., 8 * n]: -1 where a bit is set, else 1."""
    signs: NDArray[np.int8] = 1 - 2 * _as(_bits(bits), "i1")
    return signs


def _odd_signs(seven: NDArray[Any]) -> NDArray[np.int8]:
    """[..., n] numbers of 7 bits -> [..., 8 * n]: as `_signs`, the eighth so that there is an even number of -1."""
    bits: NDArray[Any] = seven.astype("u1") & 127
    parity = bits ^ bits >> 4
    parity ^= parity >> 2
    return _signs(bits | (parity ^ parity >> 1) << 7)


def _iq2_xxs(blocks: Bytes) -> Groups:
    pairs = blocks[:, 2:].reshape(-1, 8, 8)
    signs = _as(pairs[..., 4:], "<u4")[..., 0]
    codes = _iq2_grid("IQ2_XXS")[pairs[..., :4]].reshape(-1, 8, 32) * _odd_signs(_fields(signs, 0, 7, 14, 21))
    return Groups(codes, _half(blocks[:, :2]) * (_floats(signs >> 28) * 2 + 1) * 0.125)


def _nibble_scales(blocks: Bytes, packed: Bytes) -> NDArray[Any]:
    """[blocks, n] bytes, a nibble for each 16 weights, low ones first -> [blocks, 2 * n]."""
    steps: NDArray[Any] = _floats(_fields(packed, 0, 4) & 15).reshape(len(packed), -1)
    scales: NDArray[Any] = _half(blocks[:, :2]) * (steps * 2 + 1) * 0.125
    return scales


def _iq2_xs(blocks: Bytes) -> Groups:
    words = _as(blocks[:, 2:66], "<u2")
    codes = _iq2_grid("IQ2_XS")[words & 511].reshape(-1, 256) * _odd_signs(words >> 9)
    return Groups(codes.reshape(-1, 16, 16), _nibble_scales(blocks, blocks[:, 66:74]))


def _iq2_s(blocks: Bytes) -> Groups:
    high = _fields(blocks[:, 66:74], 0, 2, 4, 6).reshape(-1, 32) & 3
    codes = _iq2_grid("IQ2_S")[blocks[:, 2:34] | high.astype("u2") << 8].reshape(-1, 256) * _signs(blocks[:, 34:66])
    return Groups(codes.reshape(-1, 16, 16), _nibble_scales(blocks, blocks[:, 74:82]))


def _iq3_xxs(blocks: Bytes) -> Groups:
    signs = _as(blocks[:, 66:98], "<u4")
    grid = _grid("IQ3_XXS", 3, (4, 12, 20, 28, 36, 44, 52, 62))
    codes = grid[blocks[:, 2:66]].reshape(-1, 256) * _odd_signs(_fields(signs, 0, 7, 14, 21).reshape(-1, 32))
    return Groups(codes.reshape(-1, 8, 32), _half(blocks[:, :2]) * (_floats(signs >> 28) * 2 + 1) * 0.25)


def _iq3_s(blocks: Bytes) -> Groups:
    positions = blocks[:, 2:66] | _bits(blocks[:, 66:74]).astype("u2") << 8
    codes = _grid("IQ3_S", 3, tuple(range(1, 16, 2)))[positions].reshape(-1, 256) * _signs(blocks[:, 74:106])
    steps = _fields(blocks[:, 106:110], 0, 4).reshape(-1, 8) & 15
    return Groups(codes.reshape(-1, 8, 32), _half(blocks[:, :2]) * (_floats(steps) * 2 + 1))


def _iq1(positions: NDArray[Any], is_less: NDArray[Any]) -> NDArray[np.int8]:
    """[blocks, 32] eights of weights -> [blocks, 256]: eight times these, and one more or less."""
    shifts = 1 - 2 * is_less.astype("i1")
    codes: NDArray[np.int8] = _grid("IQ1", 2, (-1, 0, 1))[positions] * 8 + shifts[..., None]
    return codes.reshape(-1, 256)


def _iq1_s(blocks: Bytes) -> Groups:
    words = _as(blocks[:, 34:50], "<u2")
    positions = blocks[:, 2:34] | (_fields(words, 0, 3, 6, 9).reshape(-1, 32) & 7) << 8
    codes = _iq1(positions, (words >> 15).repeat(4, -1))
    return Groups(codes.reshape(-1, 8, 32), _half(blocks[:, :2]) * (_floats(words >> 12 & 7) * 2 + 1) * 0.125)


def _iq1_m(blocks: Bytes) -> Groups:
    high, steps = _fields(blocks[:, 32:48], 0, 4).reshape(-1, 32), _as(blocks[:, 48:56], "<u2")
    top = steps >> 12
    scale = top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12
    codes = _iq1(blocks[:, :32] | (high & 7).astype("u2") << 8, high >> 3 & 1)
    threes = _fields(steps, 0, 3, 6, 9).reshape(-1, 16) & 7
    return Groups(codes.reshape(-1, 16, 16), _floats(scale.view("<f2"))[:, None] * (_floats(threes) * 2 + 1) * 0.125)


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
    steps = _floats(low | high << 4) - 32
    return Groups(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32), _half(blocks[:, :2]) * steps)


def _trits(packed: Bytes, count: int) -> Bytes:
    """[blocks, n] bytes -> [blocks, count * n]: numbers of base 3, the first of all bytes first."""
    import numpy as np

    first = packed[:, None] * np.array([3**place for place in range(count)], np.uint8)[:, None]
    return (first.astype("u2") * 3 >> 8).astype("u1").reshape(len(packed), -1)


def _tq1_0(blocks: Bytes) -> Groups:
    codes = _joined([_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)])
    return Groups(codes[:, None], _half(blocks[:, 52:54]))


def _tq2_0(blocks: Bytes) -> Groups:
    return Groups(_pairs_of_bits(blocks[:, :64]).reshape(-1, 1, 256), _half(blocks[:, 64:66]))


def _mxfp4(blocks: Bytes) -> Groups:
    import numpy as np

    exponents = blocks[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)  # the halves of the two smallest are subnormal
    bits = np.where(exponents < 2, small, (np.maximum(exponents, 1) - 1) << 23).astype(np.uint32)
    return Groups(_nibbles(blocks[:, 1:]).reshape(-1, 1, 32), bits.view(np.float32))


def _put_mxfp4(blocks: Bytes, scales: Floats) -> None:
    import numpy as np

    blocks[:, 0] = np.round(np.log2(scales)) + 128


def _nvfp4(blocks: Bytes) -> Groups:
    import numpy as np

    numbers = blocks[:, :4].astype(np.int32)
    exponents, fractions = numbers >> 3 & 15, numbers & 7
    # Halved, as the table is doubled.
    scales = np.ldexp(_floats(fractions + 8 * (exponents > 0)), np.maximum(exponents, 1) - 11)
    scales[numbers == 0x7F] = 0
    codes = _nibbles(blocks[:, 4:].reshape(-1, 4, 8)).reshape(-1, 4, 16)
    return Groups(np.array(MXFP4_TABLE, np.int8)[codes], scales.astype(np.float32))


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
    BlockType("Q5_1", "5-bit", 7, 32, 24, _q5_1, (0, 2)),
    BlockType("Q8_0", "8-bit", 8, 32, 34, _q8_0, (0,), kept_in=INT8),
    BlockType("Q2_K", "2-bit", 10, 256, 84, _q2_k, (80, 82)),
    BlockType("Q3_K", "3-bit", 11, 256, 110, _q3_k, (108,), zero=4),
    BlockType("Q4_K", "4-bit", 12, 256, 144, _q4_k, (0, 2), kept_in=INT4),
    BlockType("Q5_K", "5-bit", 13, 256, 176, _q5_k, (0, 2)),
    BlockType("Q6_K", "6-bit", 14, 256, 210, _q6_k, (208,), zero=32),
    BlockType("IQ2_XXS", "2-bit", 16, 256, 66, _iq2_xxs, (0,)),
    BlockType("IQ2_XS", "2-bit", 17, 256, 74, _iq2_xs, (0,)),
    BlockType("IQ3_XXS", "3-bit", 18, 256, 98, _iq3_xxs, (0,)),
    BlockType("IQ1_S", "1-bit", 19, 256, 50, _iq1_s, (0,)),
    BlockType("IQ4_NL", "4-bit", 20, 32, 18, _iq4_nl, (0,), table=IQ4_NL_TABLE, kept_in=LUT4),
    BlockType("IQ3_S", "3-bit", 21, 256, 110, _iq3_s, (0,)),
    BlockType("IQ2_S", "2-bit", 22, 256, 82, _iq2_s, (0,)),
    BlockType("IQ4_XS", "4-bit", 23, 256, 136, _iq4_xs, (0,), table=IQ4_NL_TABLE, kept_in=LUT4),
    BlockType("IQ1_M", "1-bit", 29, 256, 56, _iq1_m, put=_put_iq1_m),
    BlockType("BF16", "16-bit", 30, 1, 2),
    BlockType("TQ1_0", "ternary", 34, 256, 54, _tq1_0, (52,), zero=1),
    BlockType("TQ2_0", "ternary", 35, 256, 66, _tq2_0, (64,), zero=1),
    BlockType("MXFP4", "4-bit", 39, 32, 17, _mxfp4, table=MXFP4_TABLE, put=_put_mxfp4, kept_in=LUT4),
    BlockType("NVFP4", "4-bit", 40, 64, 36, _nvfp4, put=_put_nvfp4),
    BlockType("Q1_0", "1-bit", 41, 128, 18, _q1_0, (0,), zero=1),
    BlockType("Q2_0", "2-bit", 42, 64, 18, _q2_0, (0,), zero=1),
)

GGML: Mapping[str, BlockType] = {each.name: each for each in TYPES}
"""By ggml's names."""
BLOCK_TYPES: Mapping[int, BlockType] = {each.id: each for each in TYPES}
"""By their numbers in files."""
