"""Activations between an expert's two matrices, as far as the native kernels support them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from engine.families import family_at
from engine.families.family import ClampedGate
from engine.families.library import gate_of, gates_as_usual
from engine.formats.tiles import Pairing


class ActivationKind(IntEnum):
    """Numbered as in switchyard_kernels.h."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4
    CLAMPED_SIGMOID = 5


@dataclass(frozen=True)
class Activation:
    """act(gate) * up, or act(x) without a gate.

    Attributes:
        pairing: layout of gate and up in the first matrix; `PLAIN` if there is no gate.
        limit: first clamps the gate to at most this, and up to +-this.
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
    "silu": ActivationKind.SILU,
}


def kind_of(function: object) -> ActivationKind | None:
    """What a module of the library, or a function of torch, that computes an activation is called here."""
    return _FUNCTIONS.get(getattr(function, "__name__", type(function).__name__))


def activation_of(module: Any) -> Activation | None:
    """The activation of an experts module, or `None` if only the module itself can compute it."""
    if not module.has_gate:
        kind = kind_of(getattr(module, "act_fn", None))
        return None if kind is None else Activation(kind, Pairing.PLAIN)
    if gates_as_usual(module):
        kind = kind_of(getattr(module, "act_fn", None))
        return None if kind is None else Activation(kind, Pairing.HALVES)
    own = family_at(str(getattr(gate_of(module), "__module__", ""))).gate
    return None if own is None else _clamped(module, own)


def activation_of_mlp(mlp: Any, attribute: str = "act_fn") -> Activation | None:
    """The same of a dense MLP: gate and up rows are apart or, in a family with a gate of its own, in one matrix.

    Args:
        attribute: what computes it; empty: it is silu.
    """
    own = family_at(type(mlp).__module__).gate
    if not hasattr(mlp, "gate_up_proj"):
        if own is not None and own.pairing == "halves" and hasattr(mlp, own.limit):
            return _clamped(mlp, own)
        kind = kind_of(getattr(mlp, attribute, None)) if attribute else ActivationKind.SILU
        return None if kind is None else Activation(kind, Pairing.HALVES)
    activation = None if own is None else _clamped(mlp, own)
    return activation if activation is not None and activation.pairing is Pairing.HALVES else None


def _clamped(module: Any, gate: ClampedGate) -> Activation | None:
    """The activation of experts with this gate, or `None` if its parameters are unsupported."""
    functions = ("NoneType", "SiLU", "SiLUActivation")
    if not gate.alpha and type(getattr(module, "act_fn", None)).__name__ not in functions:
        return None
    limit, alpha = getattr(module, gate.limit, None), getattr(module, gate.alpha, None) if gate.alpha else 1.0
    if not isinstance(limit, int | float) or not isinstance(alpha, int | float):
        return None
    kind = ActivationKind.CLAMPED_SIGMOID if gate.alpha else ActivationKind.SILU
    pairing = Pairing.ALTERNATING if gate.pairing == "alternating" else Pairing.HALVES
    return Activation(kind, pairing, float(limit), float(alpha))
