"""Turns rows into prompts, or into the reason why that is impossible.

A template is a prompt with placeholders for a row's columns: `Summarise: {{text}}`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.batch_files.openai_format import openai_request
from engine.batch_files.openai_requests import BadRequestError
from engine.batch_files.rows import Answer, Constraint, Row, RowRequest, failed
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode

_PLACE = re.compile(r"\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_USUAL_COLUMNS = ("prompt", "text", "question", "input", "instruction", "message", "content")


class EmptyFieldError(ValueError):
    """A row is empty in a column that the prompt needs; the message completes a sentence about the row."""


@dataclass(frozen=True, slots=True)
class Template:
    """Text with `{{column}}` placeholders.

    Attributes:
        text: as written.
        columns: its columns, without duplicates.
        instead: for a default template: alternative columns, of which the first one present is used if a row lacks the
            template's column, as in a folder with different file types.
    """

    text: str
    columns: tuple[str, ...]
    instead: tuple[str, ...] = ()

    def fill(self, row: Row) -> str:
        """The prompt of one row.

        Raises:
            EmptyFieldError: the row lacks a column of the template.
        """
        for name in self.instead:
            if self.columns[0] not in row.fields and name in row.fields:
                return Template(f"{{{{{name}}}}}", (name,)).fill(row)
        for name in self.columns:
            if as_text(row.fields.get(name)).strip() == "":
                raise EmptyFieldError(
                    f"has nothing in {name!r}" if name in row.fields else f"lacks the column {name!r}"
                )
        return _PLACE.sub(lambda match: as_text(row.fields[match[1]]), self.text)


def parse_template(text: str, columns: Sequence[str]) -> Template:
    """A template for an input with these columns.

    Raises:
        EngineError: `INVALID_REQUEST`: it names an unknown column, or none.
    """
    named = tuple(dict.fromkeys(_PLACE.findall(text)))
    have = ", ".join(columns)
    if not named:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The template names no column, so every row would get the same answer: insert one of {have}, for example "
            f"{{{{{columns[0] if columns else 'text'}}}}}.",
        )
    for name in named:
        if name not in columns:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The template names {{{{{name}}}}}, but the input's columns are {have}."
            )
    return Template(text, named)


def template_of(columns: Sequence[str]) -> Template:
    """The default template: the only column, or one with a typical name.

    Raises:
        EngineError: `INVALID_REQUEST`, if that is ambiguous.
    """
    candidates = [name for name in columns if name not in ("file", "pages")]
    by_name = {name.lower(): name for name in candidates}
    usual = [by_name[name] for name in _USUAL_COLUMNS if name in by_name]
    found = usual[0] if usual else None
    if found is None and len(candidates) == 1:
        found = candidates[0]
    if found is None:
        example = f"'Summarise: {{{{{candidates[0] if candidates else 'text'}}}}}'"
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The prompt of a row is ambiguous: give a template with columns, such as {example}; "
            f"the columns are {', '.join(columns)}.",
        )
    return Template(f"{{{{{found}}}}}", (found,), tuple(usual[1:]))


def as_text(value: Any) -> str:
    """A field's value for a prompt or a csv: text unchanged, empty for None, JSON for nested values."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=json_value)
    return str(json_value(value))


def json_value(value: Any) -> Any:
    """JSON forms of other types: bytes as base64, dates in ISO 8601, anything else as text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode("ascii")
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class TemplatePrompts:
    """The same template for every row.

    Attributes:
        template: the user's message.
        system: of every conversation; none if empty.
        sampling, constraint: of every answer.
    """

    template: Template
    system: str
    sampling: SamplingParams
    constraint: Constraint | None = None

    def __call__(self, row: Row) -> RowRequest | Answer:
        """The row's request, or its outcome if there is none."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            question = ChatMessage("user", self.template.fill(row))
        except EmptyFieldError as error:
            return failed(row.index, str(error))
        before = (ChatMessage("system", self.system),) if self.system else ()
        return RowRequest(row.index, (*before, question), self.sampling, self.constraint)


@dataclass(frozen=True, slots=True)
class OpenAiPrompts:
    """Every row has its own conversation and sampling.

    Attributes:
        defaults: for whatever a request omits.
        elsewhere: other servers alone answer, which may read more than text.
    """

    defaults: SamplingParams
    elsewhere: bool = False

    def __call__(self, row: Row) -> RowRequest | Answer:
        """The row's request, or its outcome if it is invalid."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            return openai_request(row, self.defaults, elsewhere=self.elsewhere)
        except BadRequestError as error:
            return failed(row.index, str(error))


Prompts = TemplatePrompts | OpenAiPrompts
