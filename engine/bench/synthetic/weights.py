"""Fast random weights: windows into blocks of normal numbers, scaled so that a model of any depth behaves.

"Behaves" means: activations stay finite over long contexts, different tokens select different experts, and some experts
are selected more often than others, as in trained models (otherwise caches could learn nothing).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.bench.synthetic.shapes import Role, TensorSpec
from engine.checkpoint.safetensors_numpy import to_bfloat16

_LARGEST_BLOCK = 2**23
_SPARE = 8
"""One part in so many of a block is spare: so many places a window may begin at, and matrices that share numbers do not
share rows."""
_COMMON_CHANNELS = 16
"""One channel in so many holds the same value for every token: what routers read there is an expert's popularity."""
_SKEW = 0.7
"""Spread of the experts' popularity, over that of what a router makes of the token itself."""
_ROUTER_SPREAD = 1.5
"""Standard deviation of router logits."""
_RESIDUAL_GAIN = 0.1
"""Of what a layer adds to the residual stream, so that tokens stay themselves over many layers."""
_COMMON_VALUE = _SKEW * math.sqrt(_COMMON_CHANNELS - 1)

Bits = NDArray[np.uint16]


class RandomWeights:
    """Fills tensors; the same seed and the same order of calls give the same weights.

    Args:
        largest: elements of the largest tensor; smaller models need smaller blocks.
    """

    def __init__(self, largest: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._blocks: dict[float, Bits] = {}
        self._block = min(_LARGEST_BLOCK, max(largest, 2**12))
        self._spare = self._block // _SPARE

    def fill(self, spec: TensorSpec) -> Bits:
        """bfloat16 bits of the spec's shape; perhaps a view that other tensors share, so not to be changed."""
        if spec.role is Role.ONES:
            return to_bfloat16(np.ones(spec.shape, np.float32))
        if spec.role is Role.ZEROS:
            return np.zeros(spec.shape, np.uint16)
        if spec.role is Role.FINAL_NORM:
            # The head sees no common channels, or a few words would win whatever the token.
            norm = np.ones(spec.shape, np.float32)
            norm[_common(spec.shape[0])] = 0
            return to_bfloat16(norm)
        if spec.role is Role.EMBEDDING:
            table = self._window(1.0, math.prod(spec.shape)).reshape(spec.shape).copy()
            table[:, _common(spec.shape[1])] = to_bfloat16(np.array([_COMMON_VALUE], np.float32))[0]
            return table
        gain = {Role.ROUTER: _ROUTER_SPREAD, Role.RESIDUAL: _RESIDUAL_GAIN}.get(spec.role, 1.0)
        return self._window(gain / math.sqrt(spec.fan_in), math.prod(spec.shape)).reshape(spec.shape)

    def _window(self, deviation: float, count: int) -> Bits:
        """`count` normal numbers of this deviation, from some place of a block on; tensors beyond it repeat it."""
        block = self._blocks.get(deviation)
        if block is None:
            numbers: NDArray[Any] = self._random.standard_normal(self._block + self._spare, dtype=np.float32)
            block = self._blocks[deviation] = to_bfloat16(numbers * np.float32(deviation))
        begin = int(self._random.integers(self._spare // 2)) * 2 + 1
        if count <= self._block - 1:
            return block[begin : begin + count]
        # An odd length: no two rows of a matrix of even width begin at the same place before all places are used.
        return np.resize(block[begin : begin + (self._block - 1 | 1)], count)


def _common(hidden: int) -> slice:
    return slice(0, max(1, hidden // _COMMON_CHANNELS))
