"""A constraint that leaves the reasoning before an answer free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.decode.generation import TokenConstraint

if TYPE_CHECKING:
    import torch

_MOST_BETWEEN = 2
"""Line breaks between a thought and its answer: tokens."""
_TAIL_CHARACTERS = 120
"""Enough for the end of every reasoning."""


class AfterThought:
    """Holds an answer to a constraint from the end of its reasoning on.

    Args:
        answer: the constraint.
        ends: matches a text that ends with the end of the reasoning.
        breaks: tokens of line breaks, which may stand between both.
        opens: tokens with which reasoning may begin instead of the answer; none if the prompt has opened it.
        tokenizer, shown: see `IncrementalDetokenizer`; `shown` are the marks that `ends` looks for.
    """

    def __init__(
        self,
        answer: TokenConstraint,
        ends: re.Pattern[str],
        breaks: Sequence[int],
        opens: Sequence[int],
        tokenizer: Any,
        shown: Sequence[int],
    ) -> None:
        self._answer, self._ends, self._breaks, self._opens = answer, ends, list(breaks), list(opens)
        self._tokenizer, self._shown = tokenizer, shown
        self._begin()

    def _begin(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self._tokenizer, self._shown)
        self._thinks = not self._opens
        self._may_think = bool(self._opens)
        self._tail, self._between = "", 0

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """See `TokenConstraint`."""
        if self._thinks:
            return logits
        restricted = self._answer.restrict(logits)
        free = self._opens if self._may_think else self._breaks if self._between else []
        restricted[free] = logits[free]
        return restricted

    def accept(self, token_id: int) -> bool:
        """See `TokenConstraint`."""
        if self._may_think:
            self._may_think, self._thinks = False, token_id in self._opens
        if not self._thinks:
            if self._between and token_id in self._breaks:
                self._between -= 1
                return False
            self._between = 0
            return self._answer.accept(token_id)
        self._tail = (self._tail + self._detokenizer.feed(token_id))[-_TAIL_CHARACTERS:]
        if self._ends.search(self._tail) is not None:
            self._thinks, self._between = False, _MOST_BETWEEN
        return False

    def reset(self) -> None:
        """See `TokenConstraint`."""
        self._answer.reset()
        self._begin()
