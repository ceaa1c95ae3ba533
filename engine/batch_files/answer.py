"""The outcome of one row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """The final outcome of a row.

    Attributes:
        row: its index in the input.
        text: the answer, possibly partial if the row failed.
        finish_reason: as in `Finished`; `failed` if the row could not be answered.
        prompt_tokens, generated_tokens: 0 if the model never saw it.
        problem: why it failed, completing a sentence about the row; empty on success.
    """

    row: int
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    problem: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problem)


def failed(row: int, problem: str) -> Answer:
    """The outcome of a row that cannot be sent to the model."""
    return Answer(row, "", "failed", problem=problem)
