"""A job's answers, read from its journal, with their prompts from its input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

from app.services.batch_job import JobEntry
from engine.batch_files.job_list import Ended, read_answers
from engine.batch_files.messages import BatchRow
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, RowRequest
from engine.common.errors import EngineError

PAGE_ROWS = 200
_MOST_CHARACTERS = 400


class JobAnswers:
    """Pages of one job's answers.  Slow: for background threads, one call at a time.

    Prompts come from the input, which is read sequentially from page to page; they are empty if it cannot be read.
    """

    def __init__(self, entry: JobEntry) -> None:
        self._entry = entry
        self._lock = threading.Lock()
        self._asked: Iterator[tuple[int, str]] = iter(())
        self._next = -1

    def page(self, after: int, *, ended: Ended = "any", limit: int = PAGE_ROWS) -> list[BatchRow]:
        """The answers after `row`, with shortened texts."""
        with self._lock:
            answers = read_answers(self._entry.journal, after=after, limit=limit, ended=ended)
            return [_row(answer, self._prompt(answer.row), _MOST_CHARACTERS) for answer in answers]

    def whole(self, row: int) -> BatchRow | None:
        """One answer with its full text; None if it does not exist (any more)."""
        with self._lock:
            answers = read_answers(self._entry.journal, after=row - 1, limit=1)
            if not answers or answers[0].row != row:
                return None
            return _row(answers[0], self._prompt(row))

    def _prompt(self, row: int) -> str:
        if self._next < 0 or self._next > row:
            self._asked, self._next = _prompts(self._entry), 0
        try:
            for index, prompt in self._asked:
                self._next = index + 1
                if index == row:
                    return prompt
        except (EngineError, OSError):
            pass
        self._next = row + 1
        return ""


def _prompts(entry: JobEntry) -> Iterator[tuple[int, str]]:
    prepared = prepare(replace(entry.job, start="resume"))
    for _share, asked in prepared.asked():
        yield asked.row, asked.messages[-1].content if isinstance(asked, RowRequest) else ""


def _row(answer: Answer, prompt: str, most: int | None = None) -> BatchRow:
    asked, text, thought = (each[:most] for each in (prompt, answer.shown, answer.reasoning))
    return BatchRow(answer.row, asked, text, answer.finish_reason, answer.generated_tokens, answer.problem, thought)
