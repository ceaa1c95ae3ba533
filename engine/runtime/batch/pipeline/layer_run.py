"""A layer of one micro-batch that stops where it needs attention and where it needs its experts.

An exception leaves the library's layer there, and the schedule decides what happens meanwhile.  With the result the
layer is called again, and every module in it that has matrices and had returned returns the same once more: only norms,
rotations and sums are computed twice.  This way the parts of a layer (MoE-Lightning's pre-attention, attention and
post-attention) can run in any order without code for its family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.experts.dispatch import interrupted_by_experts
from engine.families.library import replaced
from engine.runtime.batch.packed_attention import PagedStates


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer needs attention: states [1, heads, T, dim] on its device; the answer is [1, T, heads, value_dim]."""

    module: Any
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """A layer needs its experts: see `engine.experts.dispatch.experts_forward`; the answer is [T, H]."""

    module: Any
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


Call = AttentionCall | ExpertsCall


class _Stopped(Exception):  # noqa: N818 - not an error: the layer goes on with the answer
    def __init__(self, call: Call) -> None:
        self.call = call


class LayerRun:
    """Runs `forward` until it makes a call.  For a single thread.

    Args:
        modules: those `with_matrices` of the layer, which may not change what one of them returned.
        states: where the layer's attention asks for what computes it.

    Attributes:
        call: the call it waits for; `None` once it has ended.
    """

    def __init__(self, forward: Callable[[], torch.Tensor], modules: Sequence[Any], states: PagedStates) -> None:
        self._forward, self._modules, self._states = forward, modules, states
        self._returned: list[tuple[Any, Any]] = []
        """What modules (`None`: the schedule) have returned, in order, but for what is within a module that has."""
        self._result: torch.Tensor | None = None
        self.call: Call | None = None
        self._call_again()

    def answer(self, given: torch.Tensor) -> None:
        """Continues with the answer to the current call, until the next call or the end."""
        self._returned.append((None, given))
        self._call_again()

    @property
    def result(self) -> torch.Tensor:
        """The layer's output; only after it has ended."""
        assert self._result is not None
        return self._result

    def _call_again(self) -> None:
        self.call, self._place = None, 0
        before, self._states.elsewhere = self._states.elsewhere, lambda *call: self._ask(AttentionCall(*call))
        try:
            with (
                replaced((module, partial(self._through, module, module.forward)) for module in self._modules),
                interrupted_by_experts(lambda *call: self._ask(ExpertsCall(*call))),
            ):
                self._result = self._forward()
        except _Stopped as stopped:
            self.call = stopped.call
        else:
            self._returned = []
        finally:
            self._states.elsewhere = before

    def _ask(self, call: Call) -> torch.Tensor:
        if self._place == len(self._returned):
            raise _Stopped(call)
        self._place += 1
        given: torch.Tensor = self._returned[self._place - 1][1]
        return given

    def _through(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module's `forward` while the layer runs."""
        begin = self._place
        if begin == len(self._returned) or self._returned[begin][0] is not module:
            found = forward(*args, **kwargs)
            self._returned[begin:] = [(module, found)]
        self._place = begin + 1
        return self._returned[begin][1]


def with_matrices(layer: Any) -> list[Any]:
    """The modules within a layer but norms and the like: keeping what these return takes memory, and little else."""
    return [module for module in list(layer.modules())[1:] if any(map(_has_matrix, module.modules()))]


def _has_matrix(module: Any) -> bool:
    # Weights that kernels multiply by may be no parameters.
    return isinstance(module, torch.nn.Linear) or any(part.dim() > 1 for part in module.parameters(recurse=False))
