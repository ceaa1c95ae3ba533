"""The codes of GGUF types that a record keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.formats.coded import CodedMatrix
from engine.formats.int4 import INT4
from engine.formats.int8 import INT8
from engine.formats.lut4 import LUT4
from engine.formats.weight_format import TiledFormat

if TYPE_CHECKING:
    from engine.formats.ggml import Bytes, Floats

KEPT_IN: dict[str, TiledFormat] = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), INT4),
    **dict.fromkeys(("Q5_0", "Q8_0"), INT8),
    **dict.fromkeys(("MXFP4", "IQ4_NL", "IQ4_XS"), LUT4),
}
"""Name of a type -> the format that keeps its codes. native/src/ggml_blocks.h has the same."""
_FLAT = np.float32(2**20)
"""A group whose offset is this many times its scale is as good as constant."""


def format_for(type_name: str) -> TiledFormat | None:
    """The format that loses least: that which keeps the codes, else int8; `None` for plain numbers."""
    if BY_NAME[type_name].split is None:
        return None
    return KEPT_IN.get(type_name, INT8)


def codes_of(kind: BlockType, raw: Bytes) -> CodedMatrix | None:
    target = KEPT_IN.get(kind.name)
    if target is None:
        return None
    groups = kind.apart(raw)
    rows = len(raw)
    codes, scales, zeros = groups.codes, groups.scales, None
    if target.code_bits == 8:
        codes = codes.astype(np.int8) - np.int8(kind.zero)
    elif groups.offsets is not None:
        codes, scales, zeros = _with_zeros(codes, scales, groups.offsets)
    elif target.has_zeros:
        zeros = np.full_like(scales, kind.zero)
    by_row = None if zeros is None else zeros.reshape(rows, -1)
    return CodedMatrix(target, codes.reshape(rows, -1), scales.reshape(rows, -1), by_row, kind.table)


def _with_zeros(codes: Bytes, scales: Floats, offsets: Floats) -> tuple[Bytes, Floats, Floats]:
    """Codes [..., 32], scales and zeros of w = scale * code - offset.

    A constant group, whose scale is next to nothing, becomes 0 - 8 or 0 + 8 times an eighth of it.
    """
    with np.errstate(all="ignore"):
        flat = (scales == 0) | (np.abs(offsets) > _FLAT * np.abs(scales))
        zeros = offsets / scales
        eighths = np.abs(offsets) * np.float32(0.125)
    signs = np.where(offsets < 0, np.float32(-8), np.float32(8))
    codes = np.where(flat[..., None], np.uint8(0), codes)
    return codes, np.where(flat, eighths, scales), np.where(flat, signs, zeros)
