"""A layer of one micro-batch that stops where it needs attention and where it needs its experts.

The library's layer runs on its own stack: the schedule decides what happens meanwhile, then passes in the result that
the layer waits for.  This way the parts of a layer (MoE-Lightning's pre-attention, attention and post-attention) can
run in any order without code for its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
import torch


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


class LayerRun:
    """Runs `forward` until it makes a call.  For a single thread.

    Attributes:
        call: the call it waits for; `None` once it has ended.
    """

    def __init__(self, forward: Callable[[], torch.Tensor]) -> None:
        self._greenlet = greenlet.greenlet(forward)
        self._result: torch.Tensor | None = None
        self.call: Call | None = None
        self._continue()

    def answer(self, given: torch.Tensor) -> None:
        """Continues with the answer to the current call, until the next call or the end."""
        self._continue(given)

    @property
    def result(self) -> torch.Tensor:
        """The layer's output; only after it has ended."""
        assert self._result is not None
        return self._result

    def abandon(self) -> None:
        """Ends it where it is.  Safe to call after the end."""
        if not self._greenlet.dead:
            self._greenlet.throw()
        self.call = None

    def _continue(self, *given: torch.Tensor) -> None:
        came = self._greenlet.switch(*given)
        if self._greenlet.dead:
            self.call, self._result = None, came
        else:
            self.call = came


def ask(call: Call) -> torch.Tensor:
    """Called inside a layer: suspends the run it belongs to, and returns the answer to the call."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    given = parent.switch(call)
    assert isinstance(given, torch.Tensor)
    return given
