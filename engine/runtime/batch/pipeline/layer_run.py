"""A layer of one micro-batch, stopped where it attends and where it wants its experts.

The library's layer runs on a stack of its own: a schedule decides what is done meanwhile, and hands back what the layer
asked for.  So the parts of a layer (MoE-Lightning's pre-attention, attention and post-attention) can be put in any
order without code for its family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import greenlet
import torch


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A layer wants to attend: states [1, heads, T, dim] on its device; the answer is [1, T, heads, value_dim]."""

    module: Any
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """A layer wants its experts: see `engine.experts.dispatch.experts_forward`; to be answered with [T, H]."""

    module: Any
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor


Call = AttentionCall | ExpertsCall


class LayerRun:
    """Runs `forward` until it asks for something.  All by one thread.

    Attributes:
        call: what it waits for; `None` once it has ended.
    """

    def __init__(self, forward: Callable[[], torch.Tensor]) -> None:
        self._greenlet = greenlet.greenlet(forward)
        self._result: torch.Tensor | None = None
        self.call: Call | None = None
        self._go_on()

    def answer(self, given: torch.Tensor) -> None:
        """Goes on with what was asked for, until the next call or the end."""
        self._go_on(given)

    @property
    def result(self) -> torch.Tensor:
        """What the layer has made; it has ended."""
        assert self._result is not None
        return self._result

    def abandon(self) -> None:
        """Lets it end where it is.  Harmless if it has."""
        if not self._greenlet.dead:
            self._greenlet.throw()
        self.call = None

    def _go_on(self, *given: torch.Tensor) -> None:
        came = self._greenlet.switch(*given)
        if self._greenlet.dead:
            self.call, self._result = None, came
        else:
            self.call = came


def ask(call: Call) -> torch.Tensor:
    """For what a layer calls: stops the run that it is part of, and returns what that is answered."""
    parent = greenlet.getcurrent().parent
    assert parent is not None
    given = parent.switch(call)
    assert isinstance(given, torch.Tensor)
    return given
