"""Turns rows into prompts, or into the reason why that is impossible.

A template is a prompt with placeholders for a row's columns: `Summarise: {{text}}`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.batch_files.openai_format import openai_request
from engine.batch_files.openai_requests import MOST_PICTURES, BadRequestError, in_words
from engine.batch_files.rows import Answer, Constraint, Row, RowRequest, failed
from engine.common.chat import ChatMessage, Picture, picture_part
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.pictures import local_path, picture_at, picture_in_file, picture_of

_PLACE = re.compile(r"\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_USUAL_COLUMNS = ("prompt", "text", "question", "input", "instruction", "message", "content")


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
            BadRequestError: the row lacks a column of the template.
        """
        for name in self.instead:
            if self.columns[0] not in row.fields and name in row.fields:
                return Template(f"{{{{{name}}}}}", (name,)).fill(row)
        for name in self.columns:
            if as_text(row.fields.get(name)).strip() == "":
                raise _nothing_in(name, row)
        return _PLACE.sub(lambda match: as_text(row.fields[match[1]]), self.text)


def parse_template(text: str, columns: Sequence[str], image_column: str = "") -> Template:
    """A template for an input with these columns.

    Args:
        image_column: one of them, whose pictures make each row another even if the template names none.
    """
    named = tuple(dict.fromkeys(_PLACE.findall(text)))
    have = ", ".join(columns)
    if not named and not image_column:
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


def template_of(columns: Sequence[str], image_column: str = "") -> Template:
    """The default template: the only column, or one with a typical name; beside pictures only such a one."""
    candidates = [name for name in columns if name not in ("file", "pages", image_column)]
    by_name = {name.lower(): name for name in candidates}
    usual = [by_name[name] for name in _USUAL_COLUMNS if name in by_name]
    found = usual[0] if usual else None
    if found is None and len(candidates) == 1 and not image_column:
        found = candidates[0]
    if found is None:
        example = f"'Summarise: {{{{{candidates[0] if candidates else 'text'}}}}}'"
        example = "'Describe the picture.'" if image_column else example
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


def _nothing_in(name: str, row: Row) -> BadRequestError:
    return BadRequestError(f"has nothing in {name!r}" if name in row.fields else f"lacks the column {name!r}")


@dataclass(frozen=True, slots=True)
class PictureColumn:
    """The column whose cells are pictures; relative paths begin in `folder`."""

    name: str
    folder: Path

    def of(self, row: Row) -> list[Picture]:
        """The pictures of one row.

        Raises:
            BadRequestError: it has none, or one cannot be read.
        """
        cell = row.fields.get(self.name)
        several = list(cell) if isinstance(cell, list | tuple) else [cell]
        given = [each for each in several if each is not None and (not isinstance(each, str) or each.strip())]
        if not given:
            raise _nothing_in(self.name, row)
        if len(given) > MOST_PICTURES:
            raise BadRequestError(f"has {len(given):,} pictures in {self.name!r}; at most {MOST_PICTURES} are taken")
        return [in_words(lambda each=each: self._picture(each)) for each in given]  # type: ignore[misc]

    def _picture(self, given: Any) -> Picture:
        where = f"has a picture in {self.name!r} that"
        if isinstance(given, Mapping):  # as data sets in Parquet hold them
            given = given.get("bytes") or given.get("path")
        if isinstance(given, bytes | bytearray | memoryview):
            return picture_of(bytes(given), where)
        if not isinstance(given, str):
            raise BadRequestError(f"has {as_text(given)[:40]!r} in {self.name!r}, where a path of a picture belongs")
        given = given.strip()
        if given[:5].lower() == "data:":
            return picture_at(given, where)
        return picture_in_file(local_path(given, self.folder, where), f"has a picture {given[-80:]!r} that")


@dataclass(frozen=True, slots=True)
class TemplatePrompts:
    """The same template for every row.

    Attributes:
        template: the user's message.
        pictures: what goes with it: where the template names the column, or before the text.
        system: of every conversation; none if empty.
        sampling, constraint: of every answer.
    """

    template: Template
    system: str
    sampling: SamplingParams
    constraint: Constraint | None = None
    pictures: PictureColumn | None = None

    def __call__(self, row: Row) -> RowRequest | Answer:
        """The row's request, or its outcome if there is none."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            question = self._question(row, self.pictures)
        except BadRequestError as error:
            return failed(row.index, str(error))
        before = (ChatMessage("system", self.system),) if self.system else ()
        return RowRequest(row.index, (*before, question), self.sampling, self.constraint)

    def _question(self, row: Row, column: PictureColumn | None) -> ChatMessage:
        if column is None:
            return ChatMessage("user", self.template.fill(row))
        place = next((found for found in _PLACE.finditer(self.template.text) if found[1] == column.name), None)
        before, after = (place.start(), place.end()) if place is not None else (0, 0)
        texts = (self.template.text[:before], self.template.text[after:])
        filled = [self._filled(text, row, column.name) for text in texts]
        parts: list[Any] = [{"type": "text", "text": filled[0]}] if filled[0] else []
        parts += map(picture_part, column.of(row))
        parts += [{"type": "text", "text": filled[1]}] if filled[1] else []
        return ChatMessage("user", "".join(filled), parts=json.dumps(parts, ensure_ascii=False))

    def _filled(self, text: str, row: Row, image_column: str) -> str:
        named = tuple(name for name in dict.fromkeys(_PLACE.findall(text)) if name != image_column)
        own = {**row.fields, image_column: ""}
        filled = _PLACE.sub(lambda found: "" if found[1] == image_column else found[0], text)
        return Template(filled, named, self.template.instead).fill(replace(row, fields=own)) if named else filled


@dataclass(frozen=True, slots=True)
class OpenAiPrompts:
    """Every row has its own conversation and sampling.

    Attributes:
        defaults: for whatever a request omits.
        elsewhere: other servers alone answer, which may read more than text.
        folder: in which paths of pictures begin.
    """

    defaults: SamplingParams
    elsewhere: bool = False
    folder: Path | None = None

    def __call__(self, row: Row) -> RowRequest | Answer:
        """The row's request, or its outcome if it is invalid."""
        if row.problem:
            return failed(row.index, row.problem)
        try:
            return openai_request(row, self.defaults, elsewhere=self.elsewhere, folder=self.folder)
        except BadRequestError as error:
            return failed(row.index, str(error))


Prompts = TemplatePrompts | OpenAiPrompts
