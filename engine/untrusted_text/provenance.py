"""Texts that know which of their characters a chat template itself wrote: only those may become control tokens.

A plain `str` is untrusted, and so is what an operation makes that keeps no account of it: a lost trace leads to text,
never to control.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, SupportsIndex

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
