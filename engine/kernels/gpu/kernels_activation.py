"""Activations inside Triton kernels; `engine.kernels.activation` defines them."""

# mypy: ignore-errors
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, KIND: tl.constexpr, IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, limit, alpha):
    """act(gate) * up in fp32, or act(gate) without a gate; KIND is an `ActivationKind`."""
    if HAS_LIMIT:
        # Comparisons instead of minimum, which would turn a NaN into the limit.
        gate = tl.where(gate > limit, limit, gate)
        if IS_GATED:
            up = tl.where(up > limit, limit, up)
            up = tl.where(up < -limit, -limit, up)
    if KIND == 0:
        out = gate * tl.sigmoid(gate)
    elif KIND == 1:
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == 2:
        # tanh(y) = 2 sigmoid(2 y) - 1
        y = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out = gate * tl.sigmoid(2.0 * y)
    elif KIND == 3:
        out = tl.where(gate < 0.0, 0.0, gate)
    elif KIND == 4:
        positive = tl.where(gate < 0.0, 0.0, gate)
        out = positive * positive
    else:
        out = gate * tl.sigmoid(alpha * gate)
        if IS_GATED:
            up += 1.0
    if IS_GATED:
        out *= up
    return out
