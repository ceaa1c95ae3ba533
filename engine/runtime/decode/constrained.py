"""Answers that must satisfy a JSON schema or be one of given texts: which tokens may come next (llguidance)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.batch_files.rows import Constraint, grammar_of, unfit
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.decode.detokenizer import IncrementalDetokenizer
from engine.runtime.decode.sequence import end_token_ids

if TYPE_CHECKING:
    from engine.runtime.decode.generation import TokenConstraint
    from engine.runtime.loaded_model import LoadedModel


_TAIL_CHARACTERS = 120
"""Enough for the end of every reasoning."""
_MOST_BETWEEN = 2
"""Line breaks between a thought and its answer: tokens."""


class ConstrainedAnswers:
    """Makes the constraints of many answers over one vocabulary.

    Args:
        tokenizer: transformers' tokenizer of the model.
        vocabulary: width of the logits.
        end_ids: tokens that end an answer.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, if the tokenizer is of a kind that cannot be constrained.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: frozenset[int]) -> None:
        import llguidance.hf

        self._vocabulary = vocabulary
        try:
            # The widest of both: some models have more logits than tokens, some tokenizers more tokens than logits.
            width = max(vocabulary, len(tokenizer))
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=width, eos_token=sorted(end_ids))
        except (ValueError, TypeError, AttributeError) as error:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"Answers of this model cannot be limited to a schema or to choices: its kind of tokenizer "
                f"does not allow it ({str(error)[:80]}): leave them out.",
            ) from None
        self._grammars: dict[Constraint, str] = {}

    @classmethod
    def of(cls, loaded: LoadedModel) -> ConstrainedAnswers:
        vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
        return cls(loaded.tokenizer, vocabulary, end_token_ids(loaded.model, loaded.tokenizer))

    def begin(self, constraint: Constraint) -> ConstrainedAnswer:
        """The state of one answer that has no tokens yet.

        Raises:
            EngineError: `INVALID_REQUEST`, if the schema cannot be followed.
        """
        grammar = self._grammars.get(constraint)
        if grammar is None:
            grammar = self._grammars[constraint] = grammar_of(constraint)
        return ConstrainedAnswer(self._tokenizer, grammar, self._vocabulary)


class ConstrainedAnswer:
    """One answer on its way."""

    def __init__(self, tokenizer: Any, grammar: str, vocabulary: int) -> None:
        from llguidance import LLMatcher
        from llguidance.numpy import allocate_token_bitmask

        self._matcher = LLMatcher(tokenizer, grammar)
        if self._matcher.is_error():
            raise unfit(self._matcher.get_error())
        self._bits = allocate_token_bitmask(1, max(tokenizer.vocab_size, vocabulary))
        self._vocabulary = vocabulary

    @property
    def complete(self) -> bool:
        """Whether what has been accepted satisfies the constraint as it stands."""
        return bool(self._matcher.is_accepting())

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [V] with minus infinity for every token that may not come next."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocabulary]
        mask = torch.from_numpy(allowed.view(np.bool_)).to(logits.device)
        return logits.masked_fill(~mask, float("-inf"))

    def accept(self, token_id: int) -> bool:
        """Goes on behind a token that was chosen from restricted logits; whether nothing but an end may follow."""
        self._matcher.consume_token(token_id)
        self._check()
        return bool(self._matcher.is_stopped())

    def takes(self, ids: list[int]) -> bool:
        """Goes on behind these tokens, if all of them may come next and do not complete it."""
        is_fit = bool(self._matcher.try_consume_tokens(ids) == len(ids)) and not self._matcher.is_error()
        return is_fit and not self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise unfit(self._matcher.get_error())

    def reset(self) -> None:
        self._matcher.reset()


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
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._thinks = not self._opens
        self._may_think = bool(self._opens)
        self._tail, self._between = "", 0

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        if self._thinks:
            return logits
        restricted = self._answer.restrict(logits)
        free = self._opens if self._may_think else self._breaks if self._between else []
        restricted[free] = logits[free]
        return restricted

    def accept(self, token_id: int) -> bool:
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
