"""Whether an answer from elsewhere is what was asked for: servers promise to keep to a schema, and some do not."""

from __future__ import annotations

import re
from typing import Any

from engine.batch_files.rows import Constraint, grammar_of

_FENCED = re.compile(r"```[a-z]*\n(.*)\n```", re.DOTALL)


class AnswerCheck:
    """Checks many answers; each constraint is compiled once."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._grammars: dict[Constraint, str] = {}

    def kept(self, constraint: Constraint, text: str) -> tuple[str, bool]:
        """The answer alone, and whether it satisfies its constraint."""
        text = text.strip()
        if constraint.choices:
            return text, text in constraint.choices
        fenced = _FENCED.fullmatch(text)
        for each in (text, fenced[1].strip()) if fenced else (text,):
            if self._satisfies(constraint, each):
                return each, True
        return text, False

    def _satisfies(self, constraint: Constraint, text: str) -> bool:
        from llguidance import LLMatcher, LLTokenizer

        if constraint not in self._grammars:
            self._grammars[constraint] = grammar_of(constraint, any_space=True)
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer("byte")  # the grammar is of text, whatever a server's tokens are
        matcher = LLMatcher(self._tokenizer, self._grammars[constraint], log_level=0)
        return bool(matcher.consume_tokens(list(text.encode("utf-8", "replace")))) and bool(matcher.is_accepting())
