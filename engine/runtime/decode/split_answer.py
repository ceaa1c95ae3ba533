"""Reasoning and answer apart: what the prompt of a model has begun, and which of its marks must be seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.common.config import Thinking
from engine.families.replies.reader import form_of
from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.decode.generation import TokenConstraint
from engine.runtime.decode.prompt import encode
from engine.runtime.load.tokenizer import token_id
from engine.runtime.pictures import FIRST

if TYPE_CHECKING:
    import torch

_TAIL_TOKENS = 12
"""Enough for every mark with what may follow it in a prompt."""
_TAIL_CHARACTERS = 120
"""Enough for the end of every reasoning."""
_MOST_BETWEEN = 2
"""Line breaks between a thought and its answer: tokens."""


class Replies:
    """How a model's answers are to be read.

    Args:
        tokenizer: transformers' tokenizer of the model.
        family: its `model_type`.
    """

    def __init__(self, tokenizer: Any, family: str) -> None:
        self._tokenizer, self.form = tokenizer, form_of(family)
        self._opens = tuple(opens.rstrip() for opens, _closes in self.form.thoughts)
        self._shown: dict[bool, tuple[int, ...]] = {}

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends by opening the model's reasoning."""
        tail = str(self._tokenizer.decode([token for token in prompt[-_TAIL_TOKENS:] if token < FIRST])).rstrip()
        return tail.endswith(self._opens)

    def shown(self, *, calls: bool) -> tuple[int, ...]:
        """The control tokens that a reader of its answers must see; `calls` if tools may be called."""
        if calls not in self._shown:
            marks = self.form.marks if calls else self.form.marks_of_thoughts
            added = self._tokenizer.added_tokens_decoder.items()
            seen = (index for index, token in added if token.special and any(token.content in mark for mark in marks))
            self._shown[calls] = tuple(seen)
        return self._shown[calls]

    def free_before(self, constraint: TokenConstraint, prompt: Sequence[int], thinking: Thinking) -> TokenConstraint:
        """A constraint that holds for the answer alone, where the model thinks before it.

        That is where the prompt has opened the reasoning, where the model cannot do without, or where it was asked for.
        """
        opened = self.thinks(prompt)
        wanted = self.form.has_channels or thinking not in ("auto", "off")
        opens = () if opened or not wanted else self._ids(self.form.begins_thought)
        if not (opened or opens):
            return constraint
        written = [encode(self._tokenizer, text, special=False) for text in ("\n", "\n\n")]
        breaks = [] if self.form.has_channels else [ids[0] for ids in written if len(ids) == 1]
        shown = self.shown(calls=False)
        return AfterThought(constraint, self.form.ends_thought, breaks, opens, self._tokenizer, shown)

    def _ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        found = (token_id(self._tokenizer, text) for text in texts)
        return tuple(index for index in found if index is not None)


class AfterThought:
    """A constraint that leaves the reasoning before an answer free.

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
