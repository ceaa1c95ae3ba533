"""The routers of a model, each to be asked by itself: which experts would these hidden states choose?"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from engine.experts.prediction.predictor import Gate
from engine.experts.sites import ExpertsSite

_NAMES = ("gate", "router")


def find_gates(model: Any, sites: Sequence[ExpertsSite]) -> list[Gate | None]:
    """The router beside each experts module, once the model's weights are loaded.

    Returns:
        For each of them a function as `engine.experts.prediction.predictor.Gate` says, or None where the router wants
        other things than the hidden states that enter the experts, or answers in another way than (logits, weights,
        chosen experts).
    """
    return [_gate_beside(model, site) for site in sites]


def _gate_beside(model: Any, site: ExpertsSite) -> Gate | None:
    width = next((part.shape[0] for part in site.layout.unquantised.parts if part.name == "down_proj"), None)
    parent = model.get_submodule(site.name.rpartition(".")[0])
    for name in _NAMES:
        router = getattr(parent, name, None)
        if isinstance(router, torch.nn.Module) and _wants_hidden_states_only(router):
            matrix = next((weight for weight in router.parameters() if weight.dim() == 2), None)
            if matrix is None or matrix.is_meta or matrix.shape[-1] != width:
                continue
            gate = RouterGate(router, matrix)
            if gate.answers():
                return gate
    return None


def _wants_hidden_states_only(router: torch.nn.Module) -> bool:
    parameters = list(inspect.signature(type(router).forward).parameters.values())[1:]
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters) == 1


class RouterGate:
    """Asks a router of the library, unnoticed by whoever listens to it.

    Args:
        matrix: the parameter that says of which type and on which device its input is, [any, H].
    """

    def __init__(self, router: torch.nn.Module, matrix: torch.Tensor) -> None:
        self._router = router
        # The class's own: no hook is called, no recorder that has been put in its place.
        self._forward = type(router).forward
        self._matrix = matrix

    @torch.no_grad()
    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [T, H] -> (logits [T, E], chosen experts [T, k])."""
        logits, _, index = self._forward(self._router, hidden_states.to(self._matrix))
        return logits, index

    def answers(self) -> bool:
        """Whether it can be asked so."""
        hidden = torch.linspace(-1, 1, self._matrix.shape[-1])[None]
        try:
            logits, index = self(hidden)
            return (
                logits.shape[0] == index.shape[0] == 1
                and logits.dim() == index.dim() == 2
                and logits.is_floating_point()
                and not index.is_floating_point()
                and 0 < index.shape[1] <= logits.shape[1]
            )
        except Exception:  # whatever a router makes of an input that it was not made for
            return False
