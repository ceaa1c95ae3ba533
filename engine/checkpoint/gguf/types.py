"""The number formats of GGUF files: how many bytes a block of each takes, and which numbers it stands for.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp. Every quantised type is the same idea: groups of codes, each with
a scale and perhaps an offset. What differs is how the bits are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.formats.ggml import GGML
from engine.formats.lut4 import IQ4_NL_TABLE, MXFP4_TABLE

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


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


@dataclass(frozen=True, slots=True)
class BlockType:
    """A number format of ggml.

    Attributes:
        name: as in ggml, and as the `dtype` of a `TensorEntry`.
        id: its number in files.
        elements, nbytes: of one block.
        split: blocks, uint8 [blocks, bytes of a block], taken apart; `None` for plain numbers.
        zero: what is subtracted from each code.
        table: what codes are positions in, if they are.
        halves: where a block has its fp16 scale, and that of its offsets.
    """

    name: str
    id: int
    elements: int
    nbytes: int
    split: Callable[[Bytes], Groups] | None = None
    zero: int = 0
    table: tuple[int, ...] | None = None
    halves: tuple[int, ...] = ()

    def dequantise(self, raw: Bytes) -> Floats:
        """Rows of blocks, uint8 [..., bytes of a row] -> float32 [..., elements of a row].

        The same numbers as ggml's own reference, in single precision and in the same order.
        """
        shape = (*raw.shape[:-1], raw.shape[-1] // self.nbytes * self.elements)
        if self.split is None:
            return _PLAIN[self.name](np.ascontiguousarray(raw)).reshape(shape)
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
        assert self.split is not None
        with np.errstate(all="ignore"):  # a broken file may hold infinities
            return self.split(np.ascontiguousarray(raw).reshape(-1, self.nbytes))


def _half(two_bytes: Bytes) -> Floats:
    halves: NDArray[np.float16] = np.ascontiguousarray(two_bytes).view("<f2")
    return halves.astype(np.float32)


def _shifted(packed: Bytes, *shifts: int) -> Bytes:
    """[..., n] bytes -> [..., shifts, n]: what lies above each of these bits."""
    return packed[..., None, :] >> np.array(shifts, np.uint8)[:, None]


def _nibbles(pairs: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2, n] codes: all low halves come before all high ones."""
    return _shifted(pairs, 0, 4) & np.uint8(15)


def _bits(mask: Bytes) -> Bytes:
    """[blocks, n] bytes -> [blocks, 8 * n], the lowest bit of a byte first."""
    return np.unpackbits(np.ascontiguousarray(mask), axis=-1, bitorder="little")


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
    return Groups(np.ascontiguousarray(blocks[:, 2:]).view(np.int8)[:, None], _half(blocks[:, :2]))


def _q2_k(blocks: Bytes) -> Groups:
    steps, scale, lowest = blocks[:, :16], _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    codes = _shifted(blocks[:, 16:80].reshape(-1, 2, 32), 0, 2, 4, 6) & 3
    return Groups(codes.reshape(-1, 16, 16), scale * (steps & 15), lowest * (steps >> 4))


def _q3_k(blocks: Bytes) -> Groups:
    low = _nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = _shifted(blocks[:, 104:108], 0, 2, 4, 6).reshape(-1, 16) & 3
    steps = (low | high << 4).astype(np.float32) - np.float32(32)
    codes = _shifted(blocks[:, 32:96].reshape(-1, 2, 32), 0, 2, 4, 6) & 3
    third = _shifted(blocks[:, :32], *range(8)).reshape(-1, 2, 4, 32) & 1
    return Groups((codes | third << 2).reshape(-1, 16, 16), _half(blocks[:, 108:110]) * steps)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the 8 groups of a Q4_K or Q5_K block: 6 bits of each, packed in 12 bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    steps = np.concatenate((first & 63, (third & 15) | (first >> 2 & 48)), -1)
    lowest = np.concatenate((second & 63, (third >> 4) | (second >> 2 & 48)), -1)
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
    steps = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Groups((low | high << 4).reshape(-1, 16, 16), _half(blocks[:, 208:210]) * steps)


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).reshape(-1, 1, 32), _half(blocks[:, :2]))


def _iq4_xs(blocks: Bytes) -> Groups:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).reshape(-1, 8)
    steps = (low | high << 4).astype(np.float32) - np.float32(32)
    return Groups(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32), _half(blocks[:, :2]) * steps)


def _mxfp4(blocks: Bytes) -> Groups:
    exponents = blocks[:, :1].astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)  # the halves of the two smallest are subnormal
    bits = np.where(exponents < 2, small, (np.maximum(exponents, 1) - 1) << 23).astype(np.uint32)
    return Groups(_nibbles(blocks[:, 1:]).reshape(-1, 1, 32), bits.view(np.float32))


_PLAIN: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda raw: raw.view("<f4").astype(np.float32),
    "F16": _half,
    "BF16": lambda raw: (raw.view("<u2").astype(np.uint32) << 16).view(np.float32),
}


def _type(
    name: str,
    split: Callable[[Bytes], Groups] | None = None,
    halves: tuple[int, ...] = (),
    zero: int = 0,
    table: tuple[int, ...] | None = None,
) -> BlockType:
    known = GGML[name]
    return BlockType(name, known.number, known.elements, known.nbytes, split, zero, table, halves)


_ALL = (
    _type("F32"),
    _type("F16"),
    _type("Q4_0", _q4_0, (0,), zero=8),
    _type("Q4_1", _q4_1, (0, 2)),
    _type("Q5_0", _q5_0, (0,), zero=16),
    _type("Q5_1", _q5_1, (0, 2)),
    _type("Q8_0", _q8_0, (0,)),
    _type("Q2_K", _q2_k, (80, 82)),
    _type("Q3_K", _q3_k, (108,), zero=4),
    _type("Q4_K", _q4_k, (0, 2)),
    _type("Q5_K", _q5_k, (0, 2)),
    _type("Q6_K", _q6_k, (208,), zero=32),
    _type("IQ4_NL", _iq4_nl, (0,), table=IQ4_NL_TABLE),
    _type("IQ4_XS", _iq4_xs, (0,), table=IQ4_NL_TABLE),
    _type("BF16"),
    _type("MXFP4", _mxfp4, table=MXFP4_TABLE),
)

BLOCK_TYPES = {each.id: each for each in _ALL}
"""By their number in files."""
BY_NAME = {each.name: each for each in _ALL}
"""By name."""
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
    42: "Q2_0",
}  # fmt: skip
_DROPPED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip
_IK_LLAMA_CPP = {
    133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K",
    144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS", 153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT",
    156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
_IK_LLAMA_CPP_FROM = 137


def unread_type(number: int) -> str:
    """What a type is, in words, that is not among `BLOCK_TYPES`: ggml's, one of a program beside it, or a newer one."""
    if number in _UNREAD:
        return _UNREAD[number]
    if number in _DROPPED:
        return f"{_DROPPED[number]} (which llama.cpp no longer has)"
    if number in _IK_LLAMA_CPP or number >= _IK_LLAMA_CPP_FROM:
        return f"{_IK_LLAMA_CPP.get(number, f'type {number}')} (ik_llama.cpp's own)"
    return f"type {number} (a new one, or another program's own)"
