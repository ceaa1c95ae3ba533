"""What a batch is asked, row by row, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from engine.common.chat import ChatMessage, FinishReason
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.runtime.generation import Constraint


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One row.

    Attributes:
        row: its index in the input.
        messages: the conversation to answer; empty if `ids` are given.
        ids: the prompt as tokens.
        sampling: its own; the same seed gives the same answer whatever the batch.
        constraint: what the answer must satisfy, if anything.
        end_ids: tokens that end the answer; `None` is the model's own.
    """

    row: int
    messages: tuple[ChatMessage, ...] = ()
    ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    end_ids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What came of one row.

    Attributes:
        text: the answer, without stop string and special tokens; of a failed row what there was of it.
        finish_reason: why it ended.
        prompt_tokens, generated_tokens: lengths; `token_ids` are the generated ones, an end token among them.
        shared_tokens: of the prompt, taken over from other rows that begin alike.
        error: why the row could not be answered; `None` if it was.
    """

    row: int
    text: str
    finish_reason: FinishReason | Literal["failed"]
    prompt_tokens: int = 0
    generated_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    shared_tokens: int = 0
    error: EngineError | None = None


class Outcome(Enum):
    """Why `BatchExecutor.run` came back.

    `YIELDED`: somebody else had priority; the rows under way are kept, and the next `run` goes on with them.
    """

    FINISHED = "finished"
    YIELDED = "yielded"
    CANCELLED = "cancelled"


AnswerCallback = Callable[[BatchAnswer], None]
Check = Callable[[], bool]


def never() -> bool:
    """For callers that let it run."""
    return False
