"""Blocks of GGUF files made up: any bytes are codes, only the scales of a block have to be sensible."""

import numpy as np
import torch

from engine.formats.ggml import BlockType
from engine.kernels.repack import Blocks

STRANGE = (0.0, float("inf"), float("-inf"), float("nan"), 6e-8, 65504.0, -65504.0)
"""Scales that a broken or an odd file may hold."""


def made_up_blocks(kind: BlockType, rows: int, blocks: int, seed: int, strange: float = 0.0) -> Blocks:
    """`rows` of so many blocks; a share `strange` of all scales is one of `STRANGE`."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * blocks, kind.nbytes), np.uint8)
    if not kind.is_blocks:
        values = rng.standard_normal((rows * blocks, 1)).astype(np.float32)
        if kind.name == "BF16":
            raw = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        else:
            raw = values.astype("<f2" if kind.name == "F16" else "<f4").view(np.uint8)
    count = rows * blocks
    scale = rng.uniform(0.001, 0.1, count) * rng.choice([-1, 1] if kind.name == "Q4_0" else [1], count)
    for place, at in enumerate(kind.halves):
        if place:  # the lowest value is as far below zero as codes reach above it, about
            scale *= rng.uniform(-14, -2, count) if kind.name.endswith("_1") else rng.uniform(2, 7.5, count)
        odd = np.where(rng.random(count) < strange, rng.choice(STRANGE, count), scale)
        raw[:, at : at + 2] = odd.astype("<f2")[:, None].view(np.uint8)
    if kind.name in ("Q4_K", "Q5_K") and not strange:
        raw[:, 4:8] |= 0xA0  # steps of the scale are 32 at least
    if kind.put is not None and not strange:
        kind.put(raw, rng.uniform(0.001, 0.1, count).astype(np.float32))
    if kind.name == "Q8_0" and not strange:
        raw[:, 2:][raw[:, 2:] == 128] = 129  # ggml makes no -128
    return Blocks(kind, torch.from_numpy(raw.reshape(rows, -1)))
