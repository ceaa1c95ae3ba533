"""Q4_K and Q6_K as a test needs them, plainly rounded: the `gguf` package reads these types only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantise_k(values: Floats, kind: str) -> Bytes:
    """[..., columns] -> blocks of this type, uint8 [..., bytes of a row]."""
    blocks = (_q4_k if kind == "Q4_K" else _q6_k)(np.ascontiguousarray(values, np.float32).reshape(-1, 256))
    return blocks.reshape(*values.shape[:-1], -1)


def _half(values: NDArray[Any]) -> Bytes:
    return values.astype("<f2").view(np.uint8)


def _q4_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(-1), 0)
    steps = np.maximum(groups.max(-1) + lowest, 1e-8) / 15
    d, d_lowest = (each.max(-1, keepdims=True) / 63 for each in (steps, np.maximum(lowest, 1e-8)))
    sc, m = (np.rint(each).astype(np.uint8) for each in (steps / d, lowest / d_lowest))
    codes = np.rint((groups + (d_lowest * m)[..., None]) / np.maximum(d * sc, 1e-12)[..., None])
    codes = codes.clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    first = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    pairs = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate((_half(d), _half(d_lowest), first, second, third, pairs), -1)


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    steps = np.maximum(np.abs(groups).max(-1), 1e-8) / 31
    d = steps.max(-1, keepdims=True) / 127
    sc = np.maximum(np.rint(steps / d), 1).astype(np.int8)
    codes = np.rint(groups / (d * sc)[..., None]).clip(-32, 31).astype(np.int8) + np.int8(32)
    parts = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack(
        (parts[:, :, 0] & 15 | (parts[:, :, 2] & 15) << 4, parts[:, :, 1] & 15 | (parts[:, :, 3] & 15) << 4), 2
    )
    high = (parts >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8)
    return np.concatenate((low.reshape(-1, 128), high.reshape(-1, 64), sc.view(np.uint8), _half(d)), -1)
