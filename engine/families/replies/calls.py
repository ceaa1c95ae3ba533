"""Calls of tools as models write them into an answer, read while its text arrives.

Each reader is a generator that yields where it needs more text.  It raises `NoCall` as soon as what stands there cannot
be a call any more, so that the text goes on as text.  What a model wrote becomes JSON here and nowhere else: JSON,
Python's literals and Gemma's form are one grammar, and parameters without quotes are what the tool's schema says.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from engine.common.chat import Tool
from engine.common.untrusted import DEEPEST, parse_json, without_half_pairs

T = TypeVar("T")
Reading = Generator[None, None, T]
Calls = list[tuple[str, dict[str, Any]]]


class NoCall(Exception):  # noqa: N818 -- an outcome, not an error
    """What stands here is no call."""


class Arriving:
    """Text that arrives in pieces.

    Attributes:
        at: how far it was read.
        is_over: nothing comes any more.
    """

    def __init__(self, text: str = "", *, is_over: bool = False) -> None:
        self.text, self.at, self.is_over = text, 0, is_over

    def peek(self) -> Reading[str]:
        while self.at == len(self.text) and not self.is_over:
            yield
        return self.text[self.at : self.at + 1]

    def passes(self, *marks: str) -> Reading[str]:
        """The longest of the marks that stands here, which is passed; empty if none does."""
        longest = max(map(len, marks), default=0)
        while True:
            here = self.text[self.at : self.at + longest]
            if self.is_over or not any(len(mark) > len(here) and mark.startswith(here) for mark in marks):
                break
            yield
        found = max((mark for mark in marks if here.startswith(mark)), key=len, default="")
        self.at += len(found)
        return found

    def must(self, *marks: str) -> Reading[str]:
        """The same; raises NoCall if none stands here."""
        found = yield from self.passes(*marks)
        if not found:
            raise NoCall
        return found

    def follows(self, *marks: str) -> Reading[bool]:
        """Whether one of them, or the end, comes next but for space."""
        before = self.at
        yield from self.run(_SPACE)
        found = bool((yield from self.passes(*marks))) or (self.is_over and self.at == len(self.text))
        self.at = before
        return found

    def closed(self, *marks: str) -> Reading[bool]:
        """Whether one of them comes next but for space; passes it then."""
        before = self.at
        yield from self.run(_SPACE)
        found = yield from self.passes(*marks)
        self.at = self.at if found else before
        return bool(found)

    def find(self, *marks: str) -> Reading[str]:
        """The first of the marks from here on, which is passed; empty at the end if there is none."""
        pattern, longest, begin = any_of(marks), max(map(len, marks)), self.at
        while (found := pattern.search(self.text, begin)) is None:
            if self.is_over:
                self.at = len(self.text)
                return ""
            begin = max(begin, len(self.text) - longest + 1)
            yield
        self.at = found.end()
        return found[0]

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        begin = self.at
        while True:
            found = characters.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or self.is_over:
                return self.text[begin : self.at]
            yield


@functools.cache
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the marks, the longest where several stand."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


class Tools:
    def __init__(self, tools: tuple[Tool, ...]) -> None:
        self._schemas = {tool.name: json.loads(tool.parameters) for tool in tools}
        self.names = tuple(self._schemas)

    def keys(self, name: str) -> Mapping[str, Any]:
        """The schemas of a tool's arguments, as far as it declares them."""
        root, keys = self._schemas[name], dict[str, Any]()
        for part in _parts(root, root):
            declared = part.get("properties")
            keys = {**declared, **keys} if isinstance(declared, Mapping) else keys
        return keys

    def argument(self, name: str, key: str, said: Any) -> Any:
        """What an argument without quotes is: a text where the schema says so, else what can be read as allowed.

        Args:
            said: a text, or lists and objects of texts.
        """
        root = self._schemas[name]
        return self._typed(self.keys(name).get(key, root.get("additionalProperties")), root, said)

    def _typed(self, schema: Any, root: Any, text: Any) -> Any:
        if isinstance(text, list):
            items = next((part["items"] for part in _parts(schema, root) if "items" in part), None)
            return [self._typed(items, root, each) for each in text]
        if isinstance(text, dict):
            found = [part["properties"] for part in _parts(schema, root) if isinstance(part.get("properties"), Mapping)]
            declared = {key: each for keys in reversed(found) for key, each in keys.items()}
            return {key: self._typed(declared.get(key), root, each) for key, each in text.items()}
        for each in named_values(schema, root) or ():
            if text == each or (not isinstance(each, str) and text.strip() == json.dumps(each)):
                return each  # "1" is no number where only the text is named
        kinds = allowed_kinds(schema, root)
        if kinds == {"string"}:
            return text
        kind, meant = _LAX_WORDS.get(text.strip().lower(), ("", None))
        if kind in kinds and "string" not in kinds:  # some models write these words as Python does
            return meant
        if kinds & {"array", "object"} and "string" not in kinds and not text.strip():
            return [] if "array" in kinds else {}  # which is how MiniMax-M3 writes what is empty
        try:
            if kinds & {"array", "object", "number", "integer"}:
                value = whole(_value, text)
            else:
                value = parse_json(text, deepest=DEEPEST)
                json.dumps(value, allow_nan=False)
        except (NoCall, ValueError):
            return text
        return text if "string" in kinds and not kinds & _kinds_of(value) else value


def whole(read: Callable[[Arriving], Reading[T]], text: str) -> T:
    """What a text is that is all there; raises NoCall if it, or a part of it, is not of this form."""
    source = Arriving(text, is_over=True)
    reading = read(source)
    try:
        next(reading)
    except StopIteration as done:
        if text[source.at :].strip():
            raise NoCall from None
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("text that is over was waited for")


# Values

_SPACE, _BARE = re.compile(r"\s*"), re.compile(r"[\w.+-]*")
_BARE_KEY = re.compile(r"[^\s\"'{}\[\](),:<]*")
_KEYWORD = re.compile(r"\w*")
_DIGITS = re.compile(r"[0-9]*")
_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9]\d*)(\.\d*)?|(\.\d+))([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NO_NUMBER = re.compile(r"[-+]?(?:NaN|nan|Infinity|inf)")
_QUOTES = ('"', "'", '"""', "'''")
_BRACED = '<|"|>'
"""Gemma's quote."""
_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_MEANT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""} | {
    each: each for each in "\"'\\/"
}


def _value(source: Arriving, depth: int = 0) -> Reading[Any]:
    """A value as JSON, Python or Gemma writes it; what JSON cannot say is null, or the largest number."""
    if depth > DEEPEST:
        raise NoCall
    yield from source.run(_SPACE)
    opens = yield from source.peek()
    if opens in ("[", "("):
        return (yield from _list(source, depth))
    if opens == "{":
        return (yield from _object(source, depth))
    if opens in ('"', "'", "<"):
        return (yield from _string(source))
    word = yield from source.run(_BARE)
    if word in _WORDS:
        return _WORDS[word]
    if _NO_NUMBER.fullmatch(word):
        return None
    if (number := _NUMBER.fullmatch(word)) is None:
        raise NoCall
    try:
        value = float(word) if any(number.groups()) else int(word)
    except ValueError:  # thousands of digits
        raise NoCall from None
    return value if isinstance(value, int) or math.isfinite(value) else math.copysign(sys.float_info.max, value)


def _list(source: Arriving, depth: int) -> Reading[list[Any]]:
    closes = {"[": "]", "(": ")"}[(yield from source.must("[", "("))]
    entries: list[Any] = []
    while not (yield from _is_end(source, closes, is_first=not entries)):
        entries.append((yield from _value(source, depth + 1)))
    return entries


def _object(
    source: Arriving, depth: int, check: Callable[[str, dict[str, Any]], None] = lambda _key, _before: None
) -> Reading[dict[str, Any]]:
    """An object; `check` may refuse each key, by NoCall, after those before it."""
    yield from source.must("{")
    pairs: dict[str, Any] = {}
    while not (yield from _is_end(source, "}", is_first=not pairs)):
        quoted = (yield from source.peek()) in ('"', "'", "<")
        key = yield from (_string(source) if quoted else source.run(_BARE_KEY))
        if not quoted and not key:
            raise NoCall
        yield from source.run(_SPACE)
        yield from source.must(":")
        check(key, pairs)
        pairs[key] = yield from _value(source, depth + 1)
    return pairs


def _is_end(source: Arriving, closes: str, *, is_first: bool) -> Reading[bool]:
    """Whether no further entry comes; passes what stands between."""
    yield from source.run(_SPACE)
    if (yield from source.passes(closes)):
        return True
    if is_first:
        return False
    yield from source.must(",")
    yield from source.run(_SPACE)
    return bool((yield from source.passes(closes)))


def _string(source: Arriving) -> Reading[str]:
    quote = yield from source.must(*_QUOTES, _BRACED)
    begin = source.at
    while found := (yield from (source.find(quote) if quote == _BRACED else source.find(quote, "\\"))):
        if found == "\\":
            yield from source.peek()
            source.at += 1
        elif quote != _BRACED or (yield from source.follows(",", ":", "}", "]", ")")):
            text = source.text[begin : source.at - len(quote)]
            return without_half_pairs(text if quote == _BRACED else _ESCAPED.sub(_unescaped, text))
    raise NoCall


def _unescaped(found: re.Match[str]) -> str:
    said = found[1]
    if len(said) == 1:
        return _MEANT.get(said, found[0])
    code = int(said[1:], 16)
    return chr(code) if code <= 0x10FFFF else "\ufffd"


# Schemas

_LAX_WORDS: dict[str, tuple[str, bool | None]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
_MOST_SCHEMAS = 200
"""That are looked at for one argument; they may refer to each other without end."""


def _kinds_of(value: Any) -> set[str]:
    named: dict[type, set[str]] = {
        str: {"string"},
        bool: {"boolean"},
        int: {"integer", "number"},
        float: {"number"},
        list: {"array"},
        dict: {"object"},
    }
    return named.get(type(value), {"null"})


def _parts(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """A schema, what it refers to, and those of which it says that all or some of them hold."""
    found: list[Mapping[str, Any]] = []
    waiting = [schema]
    while waiting and len(found) < _MOST_SCHEMAS:
        part = waiting.pop(0)
        if not isinstance(part, Mapping):
            continue
        found.append(part)
        waiting.append(referred(part, root))
        for kind in ("allOf", "anyOf", "oneOf"):
            waiting += part[kind] if isinstance(part.get(kind), list) else []
    return found


def referred(schema: Mapping[str, Any], root: Any) -> Any:
    """What a schema's `$ref` names within the same document; None without one."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    place = root
    for step in unquote(reference).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and step.isdecimal() and len(step) < 10 and int(step) < len(place):
            place = place[int(step)]
        else:
            place = place.get(step) if isinstance(place, Mapping) else None
    return place


def named_values(schema: Any, root: Any) -> list[Any] | None:
    """All values that a schema allows, if it names them; `None` where there may be others."""
    return _named(schema, root, {})


def _named(schema: Any, root: Any, known: dict[int, list[Any] | None]) -> list[Any] | None:
    """The same; `known` are those that were asked for before."""
    if not isinstance(schema, Mapping) or len(known) > _MOST_SCHEMAS:
        return None
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = None  # what it says of itself says nothing more
    kind = schema.get("type")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(choices, list):
        choices = [None] if kind == "null" else [True, False] if kind == "boolean" else None
    said = [choices, _named(referred(schema, root), root, known)]
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        parts = [_named(part, root, known) for part in several] if isinstance(several, list) else [None]
        said.append([each for part in parts for each in part or ()] if None not in parts else None)
    every = schema.get("allOf")
    said += [_named(part, root, known) for part in (every if isinstance(every, list) else ())]
    lists = [[json.dumps(each) for each in values] for values in said if values]
    kinds = allowed_kinds(schema, root)
    values = (
        [json.loads(each) for each in dict.fromkeys(lists[0]) if all(each in one for one in lists)] if lists else []
    )
    known[id(schema)] = [each for each in values if not kinds or kinds & _kinds_of(each)] or None
    return known[id(schema)]


def allowed_kinds(schema: Any, root: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    return _kinds(schema, root, {})


def _kinds(schema: Any, root: Any, known: dict[int, set[str]]) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say.  `known` are those that were asked for before."""
    if not isinstance(schema, Mapping) or len(known) > _MOST_SCHEMAS:
        return set()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = set()  # which is what it says of itself
    said: list[set[str]] = []
    if (named := schema.get("type")) is not None:
        said.append({str(kind) for kind in (named if isinstance(named, list) else [named])})
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        said.append(set[str]().union(*map(_kinds_of, choices)))
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        kinds = [_kinds(part, root, known) for part in several] if isinstance(several, list) else []
        said.append(set[str]().union(*kinds) if all(kinds) else set())
    every = schema.get("allOf")
    said += [_kinds(part, root, known) for part in (every if isinstance(every, list) else [])]
    said.append(_kinds(referred(schema, root), root, known))
    said = [{*kinds, "integer"} if "number" in kinds else kinds for kinds in said if kinds]
    allowed = set[str].intersection(*said) if said else set[str]()
    known[id(schema)] = {*allowed, "null"} if allowed and schema.get("nullable") is True else allowed
    return known[id(schema)]


# Forms

_CALL_KEYS = {"name", "arguments", "parameters", "type", "function", "id", "call_id", "index"}
_CALL_KEYS |= {"tool_name", "tool_call_id"}
"""One of which an object begins with that is a call."""


def arguments_of(value: Any) -> dict[str, Any]:
    """The arguments of a call: an object, the same as a text, or nothing; raises NoCall."""
    if isinstance(value, str):
        value = whole(_value, value) if value.strip() else {}
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NoCall
    return value


def _several(source: Arriving, one: Callable[[], Reading[T]], *between: str) -> Reading[list[T]]:
    """One, and those that come behind it with a mark between them; what turns out to be none is left."""
    found = [(yield from one())]
    while True:
        end = source.at
        try:
            yield from source.run(_SPACE)
            if between:
                yield from source.must(*between)
            found.append((yield from one()))
        except NoCall:
            source.at = end
            return found


def _entries(source: Arriving, tools: Tools) -> Reading[list[dict[str, Any]]]:
    """Objects that name a tool: one, several behind each other, or a list."""

    def check(key: str, before: dict[str, Any]) -> None:
        if before["name"] not in tools.names if "name" in before else key not in _CALL_KEYS:
            raise NoCall

    def entry() -> Reading[dict[str, Any]]:
        yield from source.run(_SPACE)
        said = yield from _object(source, 0, check)
        said = said["function"] if isinstance(said.get("function"), dict) else said
        said["name"] = said.get("name", said.get("tool_name"))
        if said["name"] not in tools.names:
            raise NoCall
        return said

    yield from source.run(_SPACE)
    entries: list[dict[str, Any]] = []
    if (yield from source.passes("[")):
        while not (yield from _is_end(source, "]", is_first=not entries)):
            entries.append((yield from entry()))
        if not entries:
            raise NoCall
        return entries

    def another() -> Reading[dict[str, Any]]:
        yield from source.closed(",", ";")
        return (yield from entry())

    return (yield from _several(source, another))


def json_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`{"name": ..., "arguments": {...}}`, several of these, or a list: Hermes, Qwen, Granite, Mistral and many others.

    Llama writes `parameters`, Cohere that and `tool_name`.
    """
    entries = yield from _entries(source, tools)
    return [(each["name"], arguments_of(each.get("arguments", each.get("parameters")))) for each in entries]


def fenced_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """The same in a fence, where answers hold other JSON too: a call must have an object of arguments."""
    yield from source.passes("json", "tool_call")
    yield from source.must("\n")
    entries = yield from _entries(source, tools)
    is_closed = yield from source.follows("```")
    if not is_closed or not all(isinstance(each.get("arguments"), dict) for each in entries):
        raise NoCall
    return [(each["name"], each["arguments"]) for each in entries]


@dataclass(frozen=True, slots=True)
class Tagged:
    """How a family writes a call as tags around a name, keys and values.

    Attributes:
        opens, named: before and after the tool's name.
        key_opens, key_closes: before and after a key; some say with it that the value is a text.
        value_opens, value_closes: before and after a value.
        closes: after the arguments.
        around: what closes what stands around several of these.
        is_apart: whether values stand between newlines.
    """

    opens: str
    named: str
    key_opens: str
    key_closes: tuple[str, ...]
    value_opens: str
    value_closes: str
    closes: str
    around: tuple[str, ...]
    is_apart: bool = False

    @property
    def read(self) -> Callable[[Arriving, Tools], Reading[Calls]]:
        return behind(self.opens, self.read_opened)

    def read_opened(self, source: Arriving, tools: Tools) -> Reading[Calls]:
        """The same behind the mark that opens the first one."""

        def one() -> Reading[tuple[str, dict[str, Any]]]:
            yield from source.run(_SPACE)
            name = yield from source.must(*tools.names)
            if self.named:
                yield from source.run(_SPACE)
                yield from source.must(self.named)
            return name, (yield from self._arguments(source, tools, name))

        return (yield from _several(source, one, self.opens)) if self.around else [(yield from one())]

    def _arguments(self, source: Arriving, tools: Tools, name: str) -> Reading[dict[str, Any]]:
        arguments: dict[str, Any] = {}
        while True:
            yield from source.run(_SPACE)
            before = source.at
            mark = yield from source.must(self.key_opens, self.closes, self.opens, *self.around)
            if mark != self.key_opens:
                source.at = source.at if mark == self.closes else before  # the mark may be missing
                return arguments
            key, key_closes = yield from self._key(source)
            text = yield from self._text(source, tools.keys(name), {*arguments, key})
            arguments[key] = text if key_closes == _IS_TEXT else tools.argument(name, key, text)

    def _key(self, source: Arriving) -> Reading[tuple[str, str]]:
        """A key and the mark behind it, which are passed with what opens the value."""
        begin = source.at
        mark = yield from source.find(*self.key_closes, "\n")
        key = source.text[begin : source.at - len(mark)].strip()
        if mark not in self.key_closes or not key:
            raise NoCall
        if self.value_opens:
            yield from source.run(_SPACE)
            yield from source.must(self.value_opens)
        return key, mark

    def _text(self, source: Arriving, keys: Mapping[str, Any], given: set[str]) -> Reading[str]:
        """A value's text, up to its closing mark or, where that is missing, up to what cannot belong to it.

        A mark means something only where the call goes on behind it as it must: texts may hold any of them, and whole
        calls too, whose marks are counted.  If that leads nowhere, the value ends where it is least doubtful.
        """
        begin, depth = source.at, 0
        ends: list[tuple[int, int, int]] = []
        """How doubtful, where, and where to go on."""
        marks = (self.opens, self.key_opens, self.value_closes, self.closes, *self.around)
        while mark := (yield from source.find(*marks)):
            at, after = source.at - len(mark), source.at
            is_end, end = False, (2, at, at)
            if mark == self.value_closes:
                if not (yield from source.follows(self.key_opens, self.closes, self.opens, *self.around)):
                    continue
                is_end, end = True, (1, at, after)
            elif mark == self.opens:
                depth += 1
                continue
            elif mark == self.key_opens:
                is_end = depth == 0 and (yield from self._is_next_key(source, at, keys, given))
                source.at = after
                if not is_end:
                    continue
            elif mark in self.around:  # it may be followed by the next call
                reopened = yield from source.follows(*(each.replace("</", "<") for each in self.around))
                end = (1 if reopened else 2, at, at)
            elif depth:
                depth -= 1
                continue
            else:
                is_end = yield from source.follows(self.opens, *self.around)
            if is_end and not depth:
                ends = [end]
                break
            ends.append(end)
        if not ends:
            raise NoCall
        _doubt, at, source.at = min(ends)
        text = source.text[begin:at]
        is_closed = source.at > at
        text = text.removeprefix("\n") if self.is_apart else text
        return text.removesuffix("\n") if self.is_apart or not is_closed else text

    def _is_next_key(self, source: Arriving, at: int, keys: Mapping[str, Any], given: set[str]) -> Reading[bool]:
        """Whether another argument begins here, though the one before it was not closed."""
        try:
            key, _mark = yield from self._key(source)
        except NoCall:
            return False
        stands_alone = bool(self.value_opens) or source.text[at - 1] == "\n"
        if self.is_apart:
            stands_alone &= (yield from source.peek()) == "\n"
        return stands_alone and key not in given and (not keys or key in keys)


_IS_TEXT = '" string="true">'


def _invokes(mark: str, *around: str) -> Tagged:
    """MiniMax's tags, and DeepSeek's, with a mark in each, which say whether the value is a text."""
    key_closes = ('">', _IS_TEXT, '" string="false">')
    key, close = f'<{mark}parameter name="', f"</{mark}parameter>"
    return Tagged(f'<{mark}invoke name="', '">', key, key_closes, "", close, f"</{mark}invoke>", around)


QWEN_TAGS = Tagged("<function=", ">", "<parameter=", (">",), "", "</parameter>", "</function>", ("</tool_call>",), True)
"""Qwen3-Coder and Qwen3.5."""
GLM_TAGS = Tagged("<tool_call>", "", "<arg_key>", ("</arg_key>",), "<arg_value>", "</arg_value>", "</tool_call>", ())
"""GLM-4.5 and later."""
MINIMAX_TAGS = _invokes("", "</minimax:tool_call>")
DSML = _invokes("｜DSML｜", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
"""DeepSeek-V3.2 and V4."""


NEST = "]<]minimax[>["
"""What stands before each tag of MiniMax-M3."""


def nested_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`<invoke name="tool"><key>value</key></invoke>`, `NEST` before each tag; values may be such tags: MiniMax-M3."""

    def one() -> Reading[tuple[str, dict[str, Any]]]:
        yield from source.run(_SPACE)
        yield from source.must(f'{NEST}<invoke name="')
        name = yield from source.must(*tools.names)
        yield from source.must('">')
        said = yield from _nested(source, "invoke", 0)
        said = {} if isinstance(said, str) and not said.strip() else said
        if not isinstance(said, dict):
            raise NoCall
        return name, {key: tools.argument(name, key, each) for key, each in said.items()}

    return (yield from _several(source, one))


def _nested(source: Arriving, tag: str, depth: int) -> Reading[Any]:
    """What stands in a tag, which is passed with what closes it: a text, an object, or a list of what is in `item`s."""
    if depth > DEEPEST:
        raise NoCall
    begin, within = source.at, list[tuple[str, Any]]()
    if not (yield from source.find(NEST)):
        raise NoCall
    text = source.text[begin : source.at - len(NEST)]
    while not (yield from source.passes(f"</{tag}>")):
        yield from source.must("<")
        begin = source.at
        if not (yield from source.find(">")):
            raise NoCall
        key = source.text[begin : source.at - 1]
        within.append((key, (yield from _nested(source, key, depth + 1))))
        yield from source.run(_SPACE)
        yield from source.must(NEST)
    if within and depth and all(key == "item" for key, _ in within):
        return [each for _, each in within]
    return dict(within) if within else text


def tool_call(source: Arriving, tools: Tools) -> Reading[Calls]:
    """What stands behind `<tool_call>` in any of the families that use it."""
    yield from source.run(_SPACE)
    begins = yield from source.peek()
    if begins in ("{", "["):
        return (yield from json_calls(source, tools))
    return (yield from (QWEN_TAGS.read if begins == "<" else GLM_TAGS.read_opened)(source, tools))


def separated_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`name<｜tool▁sep｜>{...}` (DeepSeek-V3.1), or `function<｜tool▁sep｜>name` and a fenced block (V3, R1)."""

    def one() -> Reading[tuple[str, dict[str, Any]]]:
        yield from source.run(_SPACE)
        name = yield from source.must(*tools.names, "function<｜tool▁sep｜>")
        if name in tools.names:
            yield from source.must("<｜tool▁sep｜>")
        else:
            name = yield from source.must(*tools.names)
            yield from source.closed("```json")
        yield from source.run(_SPACE)
        arguments = yield from _object(source, 0)
        yield from source.closed("```")
        yield from source.closed("<｜tool▁call▁end｜>")
        return name, arguments

    return (yield from _several(source, one, "<｜tool▁call▁begin｜>"))


def behind(mark: str, read: Callable[[Arriving, Tools], Reading[Calls]]) -> Callable[[Arriving, Tools], Reading[Calls]]:
    """Calls the first of which stands behind a mark."""

    def reading(source: Arriving, tools: Tools) -> Reading[Calls]:
        yield from source.run(_SPACE)
        yield from source.must(mark)
        return (yield from read(source, tools))

    return reading


def kimi_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`functions.name:0<|tool_call_argument_begin|>{...}` (Kimi K2)."""

    def one() -> Reading[tuple[str, dict[str, Any]]]:
        yield from source.run(_SPACE)
        yield from source.passes("functions.")
        name = yield from source.must(*tools.names)
        yield from source.passes(":")
        yield from source.run(_DIGITS)
        yield from source.run(_SPACE)
        yield from source.must("<|tool_call_argument_begin|>")
        yield from source.run(_SPACE)
        arguments = yield from _object(source, 0)
        yield from source.closed("<|tool_call_end|>")
        return name, arguments

    return (yield from _several(source, one, "<|tool_call_begin|>"))


def mistral_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """A JSON list, or `name[ARGS]{...}`, with `[CALL_ID]id` after the name in some versions."""
    yield from source.run(_SPACE)
    if (yield from source.peek()) in ("[", "{"):
        return (yield from json_calls(source, tools))
    name = yield from source.must(*tools.names)
    if (yield from source.passes("[CALL_ID]")):
        yield from source.run(_BARE)
    yield from source.passes("[ARGS]")
    yield from source.run(_SPACE)
    return [(name, (yield from _object(source, 0)))]


def python_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`[name(key="value"), ...]`, as Python would write it: Llama 4 and LFM; or as `json_calls`."""

    def call() -> Reading[tuple[str, dict[str, Any]]]:
        name = yield from source.must(*tools.names)
        yield from source.must("(")
        arguments: dict[str, Any] = {}
        while not (yield from _is_end(source, ")", is_first=not arguments)):
            key = yield from source.run(_KEYWORD)
            yield from source.run(_SPACE)
            yield from source.must("=")
            arguments[key] = yield from _value(source)
        return name, arguments

    yield from source.run(_SPACE)
    begin, calls = source.at, Calls()
    is_list = bool((yield from source.passes("[")))
    yield from source.run(_SPACE)
    if (yield from source.peek()) == "{":
        source.at = begin
        return (yield from json_calls(source, tools))
    if not is_list:
        return [(yield from call())]
    while not (yield from _is_end(source, "]", is_first=not calls)):
        calls.append((yield from call()))
    if not calls:
        raise NoCall
    return calls


def braced_calls(source: Arriving, tools: Tools) -> Reading[Calls]:
    """`call:name{key:<|"|>text<|"|>,other:3}`: Gemma 4."""
    yield from source.run(_SPACE)
    yield from source.must("call:")
    name = yield from source.must(*tools.names)
    return [(name, (yield from _object(source, 0)))]


def message_call(source: Arriving, name: str, ends: tuple[str, ...]) -> Reading[Calls]:
    """A message that is nothing but the arguments of a call, up to one of the marks or the end: gpt-oss."""
    is_empty = yield from source.follows(*ends)
    yield from source.run(_SPACE)
    arguments = {} if is_empty else (yield from _object(source, 0))
    if not (yield from source.follows(*ends)):
        raise NoCall
    yield from source.run(_SPACE)
    return [(name, arguments)]
