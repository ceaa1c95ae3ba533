"""bfloat16 in numpy, which has no such type: the upper half of a float32, kept as uint16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
BFloat16Bits = NDArray[np.uint16]


def to_bfloat16(values: Float32) -> BFloat16Bits:
    """Round to nearest, ties to even, as torch does.  Any shape; finite values only (weights)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: BFloat16Bits) -> Float32:
    """Exact.  Any shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
