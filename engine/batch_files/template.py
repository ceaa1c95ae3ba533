"""A prompt with places for a row's columns: `Summarise: {{text}}`."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.batch_files.row import Row
from engine.common.errors import EngineError, ErrorCode

_PLACE = re.compile(r"\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_USUAL_COLUMNS = ("prompt", "text", "question", "input", "instruction", "message", "content")


class EmptyFieldError(ValueError):
    """A row has nothing in a column that the prompt needs; the message is the end of a sentence about the row."""


@dataclass(frozen=True, slots=True)
class Template:
    """Text with `{{column}}` in it.

    Attributes:
        text: as written.
        columns: that it names, each once.
        instead: where nobody wrote a template: columns of which the first that a row has is asked if it lacks the one
            that is named, as in a folder of files of different kinds.
    """

    text: str
    columns: tuple[str, ...]
    instead: tuple[str, ...] = ()

    def fill(self, row: Row) -> str:
        """The prompt of one row.

        Raises:
            EmptyFieldError: the row lacks something that is named.
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
        EngineError: `INVALID_REQUEST`: it names a column that there is not, or none at all.
    """
    named = tuple(dict.fromkeys(_PLACE.findall(text)))
    have = ", ".join(columns)
    if not named:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The template names no column, so every row would get the same answer: put in one of {have} as "
            f"{{{{{columns[0] if columns else 'text'}}}}}.",
        )
    for name in named:
        if name not in columns:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"The template names {{{{{name}}}}}, but the input's columns are {have}."
            )
    return Template(text, named)


def template_of(columns: Sequence[str]) -> Template:
    """What to ask where nobody said: the only column, or one that is called as prompts are.

    Raises:
        EngineError: `INVALID_REQUEST`, if that is not clear.
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
            f"It is not clear what to ask of each row: give a template with columns in it, such as {example}; "
            f"there are {', '.join(columns)}.",
        )
    return Template(f"{{{{{found}}}}}", (found,), tuple(usual[1:]))


def as_text(value: Any) -> str:
    """A field's value as it is put into a prompt or a csv: text as it is, nothing for None, JSON for what is nested."""
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
    """What JSON has no word for: bytes as base64, dates in ISO 8601, anything else as its text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode("ascii")
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value if isinstance(value, int | float) else str(value)
