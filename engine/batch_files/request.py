"""What one row asks of the model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be: exactly one of the two is set.

    Attributes:
        schema: a JSON schema, as JSON text, that the answer satisfies.
        choices: texts of which the answer is one.
    """

    schema: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One prompt with its own sampling.

    Attributes:
        row: the row's index in the input.
        messages: the conversation to answer.
        sampling: with its own limit of tokens.
        constraint: what the answer must be, if anything.
    """

    row: int
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None
