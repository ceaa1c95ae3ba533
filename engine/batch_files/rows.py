"""One row of an input file: what it holds, what it asks of the model, and what came of it.

Columns of a result are those of all input rows, including ones that first appear in later rows, and added ones.
Constraints on answers are llguidance grammars; schemas are validated here without a model.

Rows of text files: plain lines or whole files, csv and tsv, and jsonl.

Text is decoded by its byte order mark, otherwise as UTF-8, and undecodable bytes are marked. The first line of csv and
tsv names the columns, and fields may hold quotes, separators and newlines; a line of jsonl is an object or a string.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from engine.common.chat import ChatMessage, ToolCall, calls_text
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line, quoted
from engine.common.untrusted import DEEPEST, open_untrusted, parse_json, without_half_pairs


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


class RowSource(ABC):
    """An input that streams its rows: only what the format requires is in memory.

    Attributes:
        path: the file or folder.
        columns: in order.  Rows may lack some; without a header, later rows may have more.
        remark: which columns have other names here than in the file, and which sheets are not read, in sentences.
    """

    columns: tuple[str, ...]
    remark = ""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all_columns(self) -> tuple[str, ...]:
        """The columns of all rows, including later ones; may read all rows."""
        return self.columns

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows from the first; may be called again."""

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Unique names of columns that the file calls so, with a remark about those that were renamed."""
        unique = unique_names(names)
        other = [(old, new) for old, new in zip(names, unique, strict=True) if old and old != new]
        if other:
            told = ", ".join(f"another {quoted(old)} is called {quoted(new)}" for old, new in other[:TOLD])
            more = f" and {len(other) - TOLD:,} more have new names" if len(other) > TOLD else ""
            self.remark = f"Several columns of {plain_line(self.path.name)} have the same name: {told}{more}."
        return unique


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
    """The outcome of a row, or of one try of it.

    Attributes:
        row: its index in the input.
        text: the answer, possibly partial if the row failed.
        finish_reason: as in `Finished`; `failed` if the row could not be answered, `cancelled` if nobody wants it.
        prompt_tokens, generated_tokens: 0 if the model never saw it.
        problem: why it failed, completing a sentence about the row; empty on success.
        reasoning: what the model thought before its answer.
        by: the name of the endpoint that answered; empty for this machine.
        tool_calls: what it asks to run, as JSON in OpenAI's form; empty if it is text.
        is_complete: whether it satisfies the row's constraint; another try may be made if not.
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
    is_complete: bool = True

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


_KEPT_APART = "switchyard.kept-apart"


def _keep_apart(error: UnicodeError) -> tuple[str, int]:
    """Like `surrogateescape`, but also for bytes below 128, which a broken UTF-16 surrogate pair may have."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\udcff" * (error.end - error.start), error.end


codecs.register_error(_KEPT_APART, _keep_apart)

# Longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LOOKED_AT = 4096
WRONG_ENCODING = "is not valid in the file's encoding; name the right one with --encoding, such as cp1252"


def encoding_of(path: Path, asked: str | None) -> str:
    if asked is not None:
        try:
            return codecs.lookup(asked).name
        except LookupError:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"There is no encoding called {asked!r}: use for example utf-8 or cp1252."
            ) from None
    with open_untrusted(path) as file:
        return marked_encoding(file.read(_LOOKED_AT))


def marked_encoding(start: bytes) -> str:
    """The encoding of a text by how it begins; UTF-8 if nothing there says otherwise."""
    return next((name for mark, name in _MARKS if start.startswith(mark)), _unmarked(start))


def _unmarked(start: bytes) -> str:
    """UTF-16 without a mark, if most byte pairs contain a zero; otherwise UTF-8."""
    pairs = len(start) // 2
    high, low = start[0 : 2 * pairs : 2].count(0), start[1 : 2 * pairs : 2].count(0)
    if pairs and max(high, low) > 0.7 * pairs and min(high, low) < 0.1 * pairs:
        return "utf-16-be" if high > low else "utf-16-le"
    return "utf-8"


@contextmanager
def open_text(path: Path, encoding: str) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """The file's text with its newlines, and a function that returns the share that has been read.

    Undecodable bytes become lone surrogates: see `is_text`.
    """
    with open_untrusted(path, buffering=1 << 20) as raw:
        size = max(os.fstat(raw.fileno()).st_size, 1)
        text = io.TextIOWrapper(raw, encoding=encoding, errors=_KEPT_APART, newline="")
        try:
            yield text, lambda: min(1.0, raw.tell() / size)
        finally:
            text.detach()


def sound(value: Any) -> Any:
    """The JSON value with lone surrogates replaced: JSON allows them, files and tokenizers do not."""
    if isinstance(value, str):
        return without_half_pairs(value)
    if isinstance(value, dict):
        return {sound(name): sound(entry) for name, entry in value.items()}
    return [sound(entry) for entry in value] if isinstance(value, list) else value


def is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


MAX_LINE_CHARACTERS = 16 * 2**20
"""Longer than any model's context: such a line is not read completely."""


class TextLines(RowSource):
    """Every non-blank line is a row with one column, `text`."""

    columns = ("text",)

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        super().__init__(path)
        self._encoding = encoding_of(path, encoding)

    def rows(self) -> Iterator[Row]:
        index = 0
        with open_text(self.path, self._encoding) as (file, share):
            for line, whole in _lines(file):
                if not line.strip():
                    continue
                problem = "" if whole else f"has a line of more than {MAX_LINE_CHARACTERS:,} characters"
                if not is_text(line):
                    problem = WRONG_ENCODING
                yield Row(index, {"text": "" if problem else line.rstrip("\r\n")}, problem, share())
                index += 1


class WholeText(RowSource):
    """The whole file is one row, with the columns `file` and `text`."""

    columns = ("file", "text")

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        super().__init__(path)
        self._encoding = encoding_of(path, encoding)

    def rows(self) -> Iterator[Row]:
        with open_text(self.path, self._encoding) as (file, _share):
            text = file.read(MAX_LINE_CHARACTERS + 1).replace("\r\n", "\n")
        problem = ""
        if len(text) > MAX_LINE_CHARACTERS:
            problem = f"has more than {MAX_LINE_CHARACTERS:,} characters"
        elif not is_text(text):
            problem = WRONG_ENCODING
        elif not text.strip():
            problem = "contains no text"
        yield Row(0, {"file": self.path.name, "text": "" if problem else text}, problem, 1.0)


def _lines(file: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Lines, and whether they are complete; only the beginning of one that is too long."""
    read = file.readline  # type: ignore[attr-defined]
    while line := read(MAX_LINE_CHARACTERS):
        whole = len(line) < MAX_LINE_CHARACTERS or line.endswith(("\n", "\r"))
        yield line, whole
        while not whole and (rest := read(MAX_LINE_CHARACTERS)):
            whole = rest.endswith(("\n", "\r")) or len(rest) < MAX_LINE_CHARACTERS


MAX_FIELD_CHARACTERS = 4 * 2**20
"""A longer field means an unclosed quote."""

_SEPARATORS = ",;\t|"
_NO_SEPARATOR = "\x1f"
"""Used for files with one column, where commas are part of the text."""
_HINT = re.compile(r'"?sep=([^\r\n"])"?[\r\n]*', re.IGNORECASE)
_COMPARED = 50
"""First records that tell the separator from a character in the names."""


class DelimitedRows(RowSource):
    """One row per record.  A first line `sep=;`, as spreadsheets write it, names the separator."""

    def __init__(self, path: Path, *, separator: str | None = None, encoding: str | None = None) -> None:
        super().__init__(path)
        self._encoding = encoding_of(path, encoding)
        if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{separator!r} cannot separate columns: give one character, such as ';'."
            )
        with open_text(path, self._encoding) as (file, _share):
            hint = _HINT.fullmatch(file.readline(MAX_FIELD_CHARACTERS))
        self._hinted = hint is not None
        self._separator = separator or (hint[1] if hint else self._guessed())
        try:
            with self._records() as (records, _share):
                names: list[str] = next(records, [])
        except csv.Error as error:
            raise EngineError(
                ErrorCode.INVALID_REQUEST, f"{path} has a header row that is not valid csv ({error})."
            ) from None
        if names in ([], [""]) or not is_text("".join(names)):
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{path} does not begin with a readable line of column names: add one"
                f"{', or name the encoding with --encoding' if any(names) else ''}.",
            )
        self.columns = self._named([name.strip() for name in names])

    def rows(self) -> Iterator[Row]:
        with self._records() as (records, share):
            next(records)
            index = 0
            while True:
                begun = records.line_num + 1 + self._hinted
                try:
                    values = next(records, None)
                except csv.Error as error:
                    # Later records cannot be separated: most likely a quote was not closed.
                    yield Row(index, {}, f"and all later rows cannot be read, from line {begun:,} on ({error})", 1.0)
                    return
                if values is None:
                    return
                if not values:
                    continue
                yield self._row(index, values, share())
                index += 1

    def _row(self, index: int, values: list[str], share: float) -> Row:
        problem = ""
        if any(values[len(self.columns) :]):
            problem = f"has {len(values)} fields, but the header has {len(self.columns)}"
        elif not all(map(is_text, values)):
            values = [value if is_text(value) else value.encode("utf-8", "replace").decode() for value in values]
            problem = WRONG_ENCODING
        return Row(index, dict(zip(self.columns, values, strict=False)), problem, share)

    @contextmanager
    def _records(self, separator: str = "", *, strict: bool = False) -> Iterator[tuple[Any, Callable[[], float]]]:
        """A `csv.reader` of the header and all that follows, and the share read so far."""
        csv.field_size_limit(MAX_FIELD_CHARACTERS)
        with open_text(self.path, self._encoding) as (file, share):
            if self._hinted:
                file.readline()
            yield csv.reader(file, delimiter=separator or self._separator, strict=strict), share

    def _first(self, separator: str, *, strict: bool = True) -> tuple[list[list[str]], bool]:
        """The first records, and whether all of them can be read strictly."""
        found: list[list[str]] = []
        with self._records(separator, strict=strict) as (records, _share), contextlib.suppress(csv.Error):
            found.extend(itertools.islice(filter(None, records), _COMPARED))
            return found, strict
        return self._first(separator, strict=False) if strict else (found, False)

    def _guessed(self) -> str:
        """The separator that splits the first records into equally many fields, and the header into the most."""
        best, choice = (False, 0, 0, 0), _NO_SEPARATOR
        for separator in _SEPARATORS:
            # Names may hold another one: `Name, first;City`, or `"a;b","c"`, where a quote would not end a field.
            found, is_strict = self._first(separator)
            names, others = found[0] if found else [], found[1:]
            if len(names) < 2 or (len(others) > 1 and all(len(record) == 1 for record in others)):
                continue  # it is part of a name: `Really, why?`
            alike = sum(len(record) == len(names) for record in found)
            rank = is_strict, alike, -"".join(names).count('"'), len(names)
            if rank > best:
                best, choice = rank, separator
        return choice


_FIRST_ROWS = 200
"""Number of first rows that determine the columns; further ones in later rows are kept too."""


class JsonLines(RowSource):
    """One row per non-blank line; a string is a row with a single column `text`."""

    def __init__(self, path: Path, *, encoding: str | None = None) -> None:
        super().__init__(path)
        self._lines = TextLines(path, encoding=encoding)
        first = list(itertools.islice(self._rows(), _FIRST_ROWS))
        self.columns = tuple(dict.fromkeys(name for row in first for name in row.fields))
        self._seen = SeenColumns(self.columns)
        if first and not self.columns:
            why = first[0].problem or "has no columns"
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{path} has no usable rows: its first line {why}; write one JSON object per line.",
            )

    def all_columns(self) -> tuple[str, ...]:
        return self._seen.all_of(self.rows())

    def rows(self) -> Iterator[Row]:
        return self._seen.through(self._rows())

    def _rows(self) -> Iterator[Row]:
        for row in self._lines.rows():
            if row.problem:
                yield Row(row.index, {}, row.problem, row.share)
                continue
            fields, problem = _fields(row.fields["text"])
            yield Row(row.index, fields, problem, row.share)


def _fields(line: str) -> tuple[dict[str, Any], str]:
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = found  # the last object to end is the outermost
        return dict(found)

    try:
        value = parse_json(line, deepest=DEEPEST, object_pairs_hook=keep)
    except ValueError as error:
        return {}, f"is not JSON ({str(error)[:80]})"
    is_unsound = "\\ud" in line.lower()
    if isinstance(value, str):
        return {"text": sound(value) if is_unsound else value}, ""
    if isinstance(value, dict):
        if is_unsound:
            pairs = [(sound(name), sound(entry)) for name, entry in pairs]
        fields = dict(pairs)
        if len(fields) < len(pairs):  # the same name twice
            names, values = zip(*pairs, strict=True)
            fields = dict(zip(unique_names(names), values, strict=True))
        return fields, ""
    return {}, f"is {_named(value)}, not an object or a string"


def _named(value: object) -> str:
    names = {list: "a list", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), "something else")
