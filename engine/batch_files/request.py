"""The request of one row."""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer: exactly one of the two is set.

    Attributes:
        schema: a JSON schema, as JSON text, that the answer satisfies.
        choices: the texts that the answer must be one of.
    """

    schema: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One prompt with its own sampling.

    Attributes:
        row: the row's index in the input.
        messages: the conversation to answer.
        sampling: including its own token limit.
        constraint: constraint on the answer, if any.
    """

    row: int
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None
