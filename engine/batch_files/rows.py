"""One row of an input file: what it holds, what it asks of the model, and what came of it.

Columns of a result are those of all input rows, including ones that first appear in later rows, and added ones.
Constraints on answers are llguidance grammars; schemas are validated here without a model.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.common.chat import ChatMessage, ToolCall, calls_text
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.common.untrusted import DEEPEST, parse_json


@dataclass(frozen=True, slots=True)
class Row:
    """A row, which becomes one prompt.

    Attributes:
        index: its position in the input, from 0; stable across reads.
        fields: value by column; values are JSON's types and those of parquet and spreadsheets (dates, decimals, bytes).
        problem: why it cannot be used, completing a sentence; empty if there is no problem.
        share: share of the input read up to this row, 0 to 1.
    """

    index: int
    fields: Mapping[str, Any]
    problem: str = ""
    share: float = 0.0


class RowSource(Protocol):
    """An input that streams its rows: only what the format requires is in memory.

    Attributes:
        path: the file or folder.
        columns: in order.  Rows may lack some; without a header, later rows may have more.
        remark: which columns have other names here than in the file, and which sheets are not read, in sentences.
    """

    @property
    def path(self) -> Path: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def remark(self) -> str: ...

    def all_columns(self) -> tuple[str, ...]:
        """The columns of all rows, including later ones; may read all rows."""
        ...

    def rows(self) -> Iterator[Row]:
        """All rows from the first; may be called again.

        Raises:
            EngineError: `INVALID_REQUEST`, if the content does not match the file type.
        """
        ...


class FileRows(ABC):
    """What the inputs share: their file or folder, and columns that its beginning tells, unless a subclass has more."""

    remark = ""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Unique names of columns that the file calls so, with a remark about those that were renamed."""
        unique = unique_names(names)
        other = [(old, new) for old, new in zip(names, unique, strict=True) if old and old != new]
        if other:
            told = ", ".join(f"another {quoted(old)} is called {quoted(new)}" for old, new in other[:TOLD])
            more = f" and {len(other) - TOLD:,} more have new names" if len(other) > TOLD else ""
            self.remark = f"Several columns of {plain_line(self._path.name)} have the same name: {told}{more}."
        return unique

    @property
    def path(self) -> Path:
        return self._path

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """See `RowSource`."""

    def all_columns(self) -> tuple[str, ...]:
        return self.columns


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Column names from a file, made non-empty and unique: the first of each keeps its name, whatever follows."""
    given = [name or f"column_{place}" for place, name in enumerate(names, start=1)]
    taken = set(given)
    numbers: dict[str, int] = {}  # last number tried per name: there may be thousands of duplicates
    result = []
    for name in given:
        unique, number = name, numbers.get(name, 0)
        while number and unique in taken:
            number += 1
            unique = f"{name}_{number}"
        numbers[name] = number or 1
        taken.add(unique)
        result.append(unique)
    return tuple(result)


TOLD = 3
"""Renamed columns and unread sheets that a remark lists."""
_ADDED = ("answer", "finish_reason", "prompt_tokens", "generated_tokens", "problem")


class SeenColumns:
    """Collects columns while rows are read, to avoid a second pass over the input.

    Args:
        first: known columns, in order.
    """

    def __init__(self, first: Iterable[str]) -> None:
        self._names = dict.fromkeys(first)
        self._are_all = False

    def through(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yields the same rows, first to last, noting their columns."""
        for row in rows:
            for name in row.fields:
                if name not in self._names:
                    self._names[name] = None
            yield row
        self._are_all = True

    def all_of(self, rows: Iterable[Row]) -> tuple[str, ...]:
        """The columns of all rows (from `through`), which are only read if they have not been."""
        if not self._are_all:
            for _row in rows:
                pass
        return tuple(self._names)


@dataclass(frozen=True, slots=True)
class ResultColumns:
    """The column names of a result.

    Attributes:
        own: the input's columns, in order.
        named: their names in the result: columns of later rows are renamed if they clash with added ones.
        added: names for the answer, its finish reason, its tokens, the row's problem, and the extras.
        extras: `reasoning`, if any row has what was thought before the answer; `endpoint`, if it says who answered.
    """

    own: tuple[str, ...]
    named: tuple[str, ...]
    added: tuple[str, ...]
    extras: tuple[str, ...] = ()


def result_columns(first: Sequence[str], later: Sequence[str], extras: Sequence[str] = ()) -> ResultColumns:
    """Chooses the column names of a result.

    Args:
        first: columns at the beginning of the input; added ones are renamed if they clash with these.
        later: further columns of later rows.
        extras: see `ResultColumns`.
    """
    added = tuple(_free(name, first) for name in (*_ADDED, *extras))
    taken = {*first, *later, *added}
    named = list(first)
    for name in later:
        named.append(name if name not in added else _free(f"{name}_input", taken))
        taken.add(named[-1])
    return ResultColumns((*first, *later), tuple(named), added, tuple(extras))


def _free(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an answer: exactly one of the three is set.

    Attributes:
        schema: a JSON schema, as JSON text, that the answer satisfies.
        choices: the texts that the answer must be one of.
        grammar: of the answer, in llguidance's dialect of Lark.
    """

    schema: str = ""
    choices: tuple[str, ...] = ()
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One prompt with its own sampling.

    Attributes:
        row: the row's index in the input.
        messages: the conversation to answer.
        sampling: including its own token limit.
        constraint: constraint on the answer, if any.
        tools: the request's own fields about tools, as JSON: other servers get them as they are.
    """

    row: int
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    constraint: Constraint | None = None
    tools: str = ""

    @property
    def is_for_servers(self) -> bool:
        """Whether it has pictures or tools, which servers are asked for where some answer beside this machine."""
        return bool(self.tools) or any(message.parts for message in self.messages)


CUT_OFF = "length"
"""The finish reason of answers that more tokens would have made longer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The final outcome of a row.

    Attributes:
        row: its index in the input.
        text: the answer, possibly partial if the row failed.
        finish_reason: as in `Finished`; `failed` if the row could not be answered.
        prompt_tokens, generated_tokens: 0 if the model never saw it.
        problem: why it failed, completing a sentence about the row; empty on success.
        reasoning: what the model thought before its answer.
        by: the name of the endpoint that answered; empty for this machine.
        tool_calls: what it asks to run, as JSON in OpenAI's form; empty if it is text.
    """

    row: int
    text: str
    finish_reason: str
    prompt_tokens: int = 0
    generated_tokens: int = 0
    problem: str = ""
    reasoning: str = ""
    by: str = ""
    tool_calls: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.problem)

    @property
    def is_cut_off(self) -> bool:
        """Whether its limit of tokens ended it; it may have failed for that."""
        return self.finish_reason == CUT_OFF

    @property
    def shown(self) -> str:
        """The text, and calls of tools below it, for people to read."""
        calls = json.loads(self.tool_calls) if self.tool_calls else []
        named = [ToolCall(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls]
        return "\n".join(filter(None, (self.text, calls_text(named))))


def failed(row: int, problem: str) -> Answer:
    """The outcome of a row that cannot be sent to the model."""
    return Answer(row, "", "failed", problem=problem)


_MOST_CHARACTERS, _MOST_ENTRIES = 2**18, 3_000
"""Limits of a constraint: much bigger ones compile for minutes, uninterruptibly."""
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Of texts, that llguidance enforces; any other is an annotation, which JSON Schema leaves to who reads it."""


def grammar_of(constraint: Constraint, *, any_space: bool = False) -> str:
    """The constraint as a llguidance grammar.

    Args:
        any_space: JSON may have spaces and line breaks between its parts.

    Raises:
        EngineError: `INVALID_REQUEST`, if the constraint is unsupported.
    """
    from llguidance import LLMatcher

    what = "schema" if constraint.schema else "grammar" if constraint.grammar else "choice"
    characters = len(constraint.schema) + len(constraint.grammar) + sum(map(len, constraint.choices))
    if characters > _MOST_CHARACTERS or constraint.schema.count(":") + len(constraint.choices) > _MOST_ENTRIES:
        raise unfit(f"it has more than {_MOST_CHARACTERS:,} characters or {_MOST_ENTRIES:,} entries", what)
    if constraint.schema:
        try:
            schema = _without_annotations(parse_json(constraint.schema, deepest=DEEPEST))
            # Compact JSON only: models that start to indent or pad may never end.
            grammar = str(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": any_space}))
        except (ValueError, TypeError) as error:
            raise unfit(str(error)) from None
    else:
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
        grammar = str(LLMatcher.grammar_from_lark(constraint.grammar or f"start: {alternatives}"))
    refusal = LLMatcher.validate_grammar(grammar)
    if refusal:
        raise unfit(refusal, what)
    return grammar


def _without_annotations(schema: Any) -> Any:
    """A schema without the `format`s that nothing enforces; what only looks like one (a property's name) stays."""
    if isinstance(schema, list):
        return [_without_annotations(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("const", "enum", "default", "examples"):
            kept[key] = value
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            kept[key] = {name: _without_annotations(entry) for name, entry in value.items()}
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[key] = _without_annotations(value)
    return kept


def unfit(why: str, what: str = "schema") -> EngineError:
    """The error for a schema, or what else constrains an answer, that is unsupported."""
    first = " ".join(why.split())[:160]
    return EngineError(ErrorCode.INVALID_REQUEST, f"The {what} cannot be used ({first}): simplify or correct it.")
