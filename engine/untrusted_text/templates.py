"""Renders chat templates like transformers, which is not imported here: that takes seconds, and torch.

A test compares the two.

Texts know which of their characters the template itself wrote: only those may become control tokens.  A plain `str` is
untrusted, and so is what an operation makes that keeps no account of it: a lost trace leads to text, never to control.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from string import Formatter
from typing import Any, SupportsIndex

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

Spans = Sequence[Sequence[int]]
"""Begin and end of each part of a text that its template wrote, in order."""

_OWN = b"\1"
_FIELD = re.compile(r"%(?:\((?P<key>[^()]*)\))?[-#0 +]*\d*(?:\.\d+)?[hlL]?(?P<kind>[%a-zA-Z])")


class Traced(str):
    """A text with a byte for each character: 1 where the template wrote it, 0 where it is untrusted.

    It is equal to the same text without them, and can do all that a `str` can.
    """

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: str = "", own: bytes = b"") -> Traced:
        self = super().__new__(cls, text)
        self._own = own if len(own) == len(self) else bytes(len(self))
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return joined((self, other)) if type(other) in (str, Traced) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return joined((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return Traced(str.__mul__(self, times), self._own * times) if isinstance(times, int) else NotImplemented

    __rmul__ = __mul__

    def __getitem__(self, place: SupportsIndex | slice[Any, Any, Any]) -> Traced:
        text, own = str.__getitem__(self, place), self._own[place]
        return Traced(text, bytes((own,)) if isinstance(own, int) else own)

    def __iter__(self) -> Iterator[Traced]:
        return (self[place] for place in range(len(self)))

    def __mod__(self, values: Any) -> Traced:
        given = iter(values if isinstance(values, tuple) else (values,))
        text = str.__mod__(self, values)
        pieces: list[str] = []
        at = 0
        for field in _FIELD.finditer(self):
            pieces.append(self[at : field.start()])
            at, key = field.end(), field["key"]
            if field["kind"] == "%":
                pieces.append(self[at - 1 : at])
                continue
            value: Any = next(given, None) if key is None else values[key]
            is_plain = field[0] in ("%s", f"%({key})s") and isinstance(value, str)
            pieces.append(value if is_plain else str.__mod__(field[0], (value,) if key is None else values))
        return agreed(text, [*pieces, self[at:]])

    def join(self, parts: Iterable[str]) -> Traced:
        parts = list(parts)
        return Traced(str.join(self, parts), self._own.join(map(_own_of, parts)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._cut(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._cut(str.rsplit(self, sep, maxsplit), sep)

    def partition(self, sep: str, /) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._cut(str.partition(self, sep), ""))

    def rpartition(self, sep: str, /) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._cut(str.rpartition(self, sep), ""))

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        lines = self._cut(str.splitlines(self, keepends=True), "")
        return [line[: len(kept)] for line, kept in zip(lines, str.splitlines(self, keepends), strict=True)]

    def strip(self, chars: str | None = None, /) -> Traced:
        return self._cut([str.strip(self, chars)], None)[0]

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: len(str.removesuffix(self, suffix))]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        """What takes the place of untrusted text is untrusted, since that decides where it stands."""
        text = str.replace(self, old, new, count)
        if not old:
            return Traced(text)
        first, *rest = self.split(old, count)
        pieces, at = [first], len(first)
        for piece in rest:
            is_own = 0 not in self._own[at : at + len(old)]
            pieces += [Traced(new, _own_of(new) if is_own else b""), piece]
            at += len(old) + len(piece)
        return agreed(text, pieces)

    def upper(self) -> Traced:
        return self._recased(str.upper(self))

    def lower(self) -> Traced:
        return self._recased(str.lower(self))

    def capitalize(self) -> Traced:
        return self._recased(str.capitalize(self))

    def title(self) -> Traced:
        return self._recased(str.title(self))

    def swapcase(self) -> Traced:
        return self._recased(str.swapcase(self))

    def casefold(self) -> Traced:
        return self._recased(str.casefold(self))

    def _recased(self, text: str) -> Traced:
        """No character becomes less than one: in a text as long as before, each is where it was."""
        return Traced(text, self._own)

    def _cut(self, pieces: Iterable[str], sep: str | None) -> list[Traced]:
        """The same pieces of this text, in its order and with `sep` between them; None for what is in none of them."""
        found, at = [], 0
        for piece in pieces:
            begin = self.index(piece, at) if sep is None else at
            end = begin + len(piece)
            found.append(self[begin:end])
            at = end + len(sep or "")
        return found


def own(value: Any) -> Any:
    """A value of which every text is the template's."""
    if isinstance(value, str):
        return Traced(value, _OWN * len(value))
    if isinstance(value, list | tuple):
        return type(value)(map(own, value))
    if isinstance(value, dict):
        return {own(key): own(entry) for key, entry in value.items()}
    return value


def joined(parts: Iterable[str]) -> Traced:
    """Texts one after the other."""
    return Traced().join(parts)


def formatted(
    text: str, pattern: Traced, formatter: Formatter, args: Sequence[Any], named: Mapping[str, Any]
) -> Traced:
    """`text`, which `pattern.format` has made of these values."""
    if 0 in pattern._own:
        return Traced(text)
    pieces, numbers = [], itertools.count()
    for literal, field, form, conversion in formatter.parse(pattern):
        pieces.append(own(literal))
        if field is None:
            continue
        if "{" in (form or ""):
            return Traced(text)
        name = f"{next(numbers)}{field}" if not field or field[0] in ".[" else field
        value, _ = formatter.get_field(name, args, named)
        if form or conversion or not isinstance(value, str):
            value = formatter.format_field(formatter.convert_field(value, conversion or None), form or "")
        pieces.append(value)
    return agreed(text, pieces)


def agreed(text: str, pieces: Iterable[str]) -> Traced:
    """The pieces as one text if they make up `text`, which otherwise is untrusted."""
    whole = joined(pieces)
    return whole if whole == text else Traced(text)


def recased(text: str, before: object) -> Traced:
    """`before` in other cases."""
    return before._recased(text) if isinstance(before, Traced) else Traced(text)


def spans_of(text: str) -> list[tuple[int, int]]:
    """What the template wrote of a text."""
    return [part.span() for part in re.finditer(rb"\x01+", _own_of(text))]


def own_bytes(length: int, written: Spans) -> bytearray:
    """A byte for each character of a text, as `Traced` has it."""
    own_ones = bytearray(length)
    for begin, end in written:
        own_ones[begin:end] = _OWN * (end - begin)
    return own_ones


def is_control(content: str, *, special: bool) -> bool:
    """Whether an added token is a mark, not mere writing: some vocabularies add runs of spaces and single letters."""
    return special or (len(content) > 1 and not content.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").isspace())


def _own_of(text: str) -> bytes:
    return text._own if isinstance(text, Traced) else bytes(len(text))


MOST_CHARACTERS = 2**25
"""Longest output of a template: millions of tokens more than any model's context."""
_MOST_BITS = 2**16
"""Of a power."""


class TemplateRefusedError(Exception):
    """The template cannot be rendered with these messages; the argument briefly says why."""


def render(template: str, values: Mapping[str, Any]) -> Traced:
    """The template's output; what it wrote itself is marked as its own, and so is what of the values was its own.

    Raises:
        TemplateRefusedError: it is broken, rejects these values, or writes too much.
    """
    parts, length = [], 0
    try:
        for part in _compiled(template).generate(**values):
            parts.append(part)
            length += len(part)
            if length > MOST_CHARACTERS:
                break
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: any exception is its fault
        raise TemplateRefusedError((str(error).strip().splitlines() or [type(error).__name__])[0][:200]) from None
    if length > MOST_CHARACTERS:
        raise TemplateRefusedError(f"it writes more than {MOST_CHARACTERS:,} characters")
    return joined(parts)


@lru_cache(4)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training: ignored here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without class attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without attributes that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_eval_context
def _join(context: jinja2.nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return jinja2.filters.sync_do_join(context, value, Traced(d) if type(d) is str else d, attribute)


def _title(value: Any) -> str:
    return recased(jinja2.filters.do_title(value), value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Marks every text in a template as its own, and keeps the marks where texts are put together."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str | list | tuple | dict):
            self.write(f"environment.own({value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.own(")
        super().visit_TemplateData(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({super()._output_const_repr(group)})"


class _Environment(ImmutableSandboxedEnvironment):
    """Without powers of so many digits that they take hours in which nothing interrupts them."""

    intercepted_binops = frozenset({"**"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(joined)
    own = staticmethod(own)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        plain, pattern = super().wrap_str_format(value), getattr(value, "__self__", None)
        if plain is None or not isinstance(pattern, Traced):
            return plain
        formatter, is_map = SandboxedFormatter(self), value.__name__ == "format_map"

        def traced(*args: Any, **kwargs: Any) -> str:
            text = plain(*args, **kwargs)
            return formatted(text, pattern, formatter, () if is_map else args, args[0] if is_map else kwargs)

        return traced

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS:
            raise OverflowError("it raises a number to a power of thousands of digits")
        return super().call_binop(context, operator, left, right)


@lru_cache(1)
def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters.update(tojson=_to_json, join=_join, title=_title)
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment
