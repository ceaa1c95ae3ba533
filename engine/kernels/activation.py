"""What lies between an expert's two matrices, where it is something that the native kernels know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.kernels.quantised.tiles import Pairing


class ActivationKind(IntEnum):
    """As switchyard_kernels.h numbers them."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4
    CLAMPED_SIGMOID = 5


@dataclass(frozen=True)
class Activation:
    """act(gate) * up, or act(x) where there is no gate.

    Attributes:
        pairing: where gate and up lie in the first matrix; `PLAIN` if there is no gate.
        limit: the gate is clamped to at most this and up to +-this first.
        alpha: of `CLAMPED_SIGMOID`: (up + 1) * gate * sigmoid(alpha * gate).
    """

    kind: ActivationKind
    pairing: Pairing
    limit: float = math.inf
    alpha: float = 1.0


_FUNCTIONS = {
    "SiLU": ActivationKind.SILU,
    "SiLUActivation": ActivationKind.SILU,
    "GELUActivation": ActivationKind.GELU,
    "GELUTanh": ActivationKind.GELU_TANH,
    "ReLU": ActivationKind.RELU,
    "ReLUSquaredActivation": ActivationKind.RELU_SQUARED,
}

# Families with a gate of their own: the module that defines it -> what it computes, names of limit and alpha.
_CLAMPED = {
    "modeling_gpt_oss": (ActivationKind.CLAMPED_SIGMOID, Pairing.ALTERNATING, "limit", "alpha"),
    "modeling_openai_privacy_filter": (ActivationKind.CLAMPED_SIGMOID, Pairing.HALVES, "limit", "alpha"),
    "modeling_minimax_m3_vl": (ActivationKind.CLAMPED_SIGMOID, Pairing.HALVES, "swiglu_limit", "swiglu_alpha"),
    "modeling_deepseek_v4": (ActivationKind.SILU, Pairing.HALVES, "limit", None),
    "modeling_glm5_next": (ActivationKind.SILU, Pairing.HALVES, "swiglu_limit", None),
    "modeling_hy_v4": (ActivationKind.SILU, Pairing.HALVES, "swiglu_limit", None),
}


def activation_of(module: Any) -> Activation | None:
    """The activation of an experts module, or `None` if it is one that only the module itself can compute."""
    if not module.has_gate:
        kind = _FUNCTIONS.get(type(getattr(module, "act_fn", None)).__name__)
        return None if kind is None else Activation(kind, Pairing.PLAIN)
    gate = getattr(type(module), "_apply_gate", None)
    if getattr(gate, "__name__", "") == "_default_apply_gate":
        kind = _FUNCTIONS.get(type(getattr(module, "act_fn", None)).__name__)
        return None if kind is None else Activation(kind, Pairing.HALVES)
    known = _CLAMPED.get(str(getattr(gate, "__module__", "")).rpartition(".")[2])
    if known is None:
        return None
    kind, pairing, limit, alpha = known
    if kind is ActivationKind.SILU and type(getattr(module, "act_fn", None)).__name__ not in (
        "NoneType",
        "SiLU",
        "SiLUActivation",
    ):
        return None
    bound, steepness = getattr(module, limit, None), getattr(module, alpha, None) if alpha else 1.0
    if not isinstance(bound, int | float) or not isinstance(steepness, int | float):
        return None
    return Activation(kind, pairing, float(bound), float(steepness))
