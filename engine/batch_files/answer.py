"""What came of one row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A row's ending, which it has once.

    Attributes:
        row: its index in the input.
        text: the answer; of a failed row what there was of it.
        finish_reason: as in `Finished`; `failed` if the row could not be answered.
        prompt_tokens, generated_tokens: 0 if the model never saw it.
        problem: why it failed, as the end of a sentence about the row; empty if it did not.
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
    """The ending of a row that cannot be asked."""
    return Answer(row, "", "failed", problem=problem)
