"""A Markdown text, flattened: a plain list of segments from top to bottom, read from markdown-it's tokens.

Containers (lists and block quotes) are not nodes but a string that each segment carries, outermost first: `q` for a
block quote, `l` for a list.  A list item's text is a `TextBlock` in an `l` with a marker.  The flat form is what a
document is written from, and two texts look the same exactly when their segments are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from markdown_it.token import Token

Alignment: TypeAlias = Literal["left", "center", "right"]


class Gap(Enum):
    ITEM = "item"  # between the items of a tight list
    LOOSE = "loose"  # between the items of a loose list
    PARAGRAPH = "paragraph"
    HEADING = "heading"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A run of text in one style.

    `href` is empty or an http, https or mailto address; line breaks are `\\n`.  With `tex` it is a formula: the text is
    its source with its delimiters.
    """

    text: str
    bold: bool = False
    italic: bool = False
    strike: bool = False
    code: bool = False
    href: str = ""
    tex: str = ""

    def looks_like(self, other: TextSpan) -> bool:
        """Whether the two could be one."""
        if self.tex or other.tex:
            return False
        return (self.bold, self.italic, self.strike, self.code, self.href) == (
            other.bold, other.italic, other.strike, other.code, other.href,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Marker:
    number: int | None = None
    checked: bool | None = None

    def text(self) -> str:
        """As in Markdown."""
        if self.checked is not None:
            return "- [x]" if self.checked else "- [ ]"
        return "-" if self.number is None else f"{self.number}."


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A paragraph, a heading (level 1 to 6) or the text of a list item."""

    spans: tuple[TextSpan, ...]
    containers: str = ""
    gap: Gap = Gap.PARAGRAPH
    heading: int = 0
    marker: Marker | None = None


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced or indented code block; `code` has no final line break."""

    code: str
    language: str = ""
    containers: str = ""
    gap: Gap = Gap.PARAGRAPH


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table; the first row is its header, and every row has as many cells as there are alignments."""

    alignments: tuple[Alignment, ...]
    rows: tuple[tuple[tuple[TextSpan, ...], ...], ...]
    containers: str = ""
    gap: Gap = Gap.PARAGRAPH


@dataclass(frozen=True, slots=True)
class MathsBlock:
    tex: str
    source: str
    containers: str = ""
    gap: Gap = Gap.PARAGRAPH


@dataclass(frozen=True, slots=True)
class RuleBlock:
    containers: str = ""
    gap: Gap = Gap.PARAGRAPH


Segment: TypeAlias = TextBlock | CodeBlock | TableBlock | MathsBlock | RuleBlock


def spans_text(spans: Iterable[TextSpan]) -> str:
    return "".join(span.text for span in spans)


InlineParser = Callable[[str], "Sequence[Token] | None"]
"""Inline Markdown to its tokens, or None if the text is to be shown verbatim."""

_ALLOWED_LINK = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_MOST_CELLS = 500
"""Of one table, so that its layout stays fast: the rest follows in another with the same header."""
_TASK = re.compile(r"\[([ xX])\](?:[ \t]+|$)")


@dataclass(slots=True)
class _List:
    next_number: int | None  # None: bullets
    is_nested: bool
    items: int = 0


def allowed_link(href: str) -> str:
    return href if _ALLOWED_LINK.match(href) else ""


class TokenReader:
    """Reads the block tokens of whole top-level blocks; use one reader per token list."""

    def __init__(self, parse_inline: InlineParser) -> None:
        self._parse_inline = parse_inline
        self._segments: list[Segment] = []
        self._containers = ""
        self._lists: list[_List] = []
        self._marker: Marker | None = None
        self._gap = Gap.PARAGRAPH
        self._heading = 0
        self._alignments: list[Alignment] = []
        self._rows: list[list[tuple[TextSpan, ...]]] = []
        self._in_table = False

    def read(self, tokens: Sequence[Token]) -> list[Segment]:
        for token in tokens:
            handler = getattr(self, f"_on_{token.type}", None)
            if handler is not None:
                handler(token)
        return self._segments

    # Containers

    def _on_blockquote_open(self, _token: Token) -> None:
        self._flush_marker()
        self._containers += "q"

    def _on_blockquote_close(self, _token: Token) -> None:
        self._containers = self._containers[:-1]
        self._gap = Gap.PARAGRAPH

    def _on_bullet_list_open(self, _token: Token) -> None:
        self._flush_marker()
        self._lists.append(_List(None, is_nested=bool(self._lists)))

    def _on_ordered_list_open(self, token: Token) -> None:
        self._flush_marker()
        start = token.attrGet("start")
        self._lists.append(_List(1 if start is None else int(start), is_nested=bool(self._lists)))

    def _on_bullet_list_close(self, _token: Token) -> None:
        self._lists.pop()
        self._gap = Gap.PARAGRAPH

    _on_ordered_list_close = _on_bullet_list_close

    def _on_list_item_open(self, _token: Token) -> None:
        current = self._lists[-1]
        self._containers += "l"
        self._marker = Marker(current.next_number)
        self._gap = Gap.ITEM if current.items or current.is_nested else Gap.PARAGRAPH
        current.items += 1
        if current.next_number is not None:
            current.next_number += 1

    def _on_list_item_close(self, _token: Token) -> None:
        self._flush_marker()
        self._containers = self._containers[:-1]

    def _flush_marker(self) -> None:
        if self._marker is not None:
            self._add_text(())

    # Leaves

    def _on_paragraph_open(self, token: Token) -> None:
        self._heading = 0
        if self._gap is Gap.ITEM and not token.hidden:
            self._gap = Gap.LOOSE

    def _on_paragraph_close(self, token: Token) -> None:
        if token.hidden:
            self._gap = Gap.ITEM

    def _on_heading_open(self, token: Token) -> None:
        self._heading = int(token.tag[1:])
        if self._marker is None:
            self._gap = Gap.HEADING

    def _on_inline(self, token: Token) -> None:
        content = token.content
        if self._in_table:
            self._rows[-1].append(self._spans(content))
            return
        if self._marker is not None and (task := _TASK.match(content)):
            self._marker = Marker(self._marker.number, checked=task.group(1) != " ")
            content = content[task.end() :]
        self._add_text(self._spans(content))

    def _add_text(self, spans: tuple[TextSpan, ...]) -> None:
        self._segments.append(TextBlock(spans, self._containers, self._gap, self._heading, self._marker))
        self._marker = None
        self._heading = 0
        self._gap = Gap.LOOSE if self._lists else Gap.PARAGRAPH

    def _on_fence(self, token: Token) -> None:
        words = token.info.split()
        code = token.content.removesuffix("\n")
        self._add(CodeBlock(code, words[0] if words else "", self._containers))

    _on_code_block = _on_fence

    def _on_hr(self, _token: Token) -> None:
        self._add(RuleBlock(self._containers))

    def _on_maths_block(self, token: Token) -> None:
        if token.info:
            self._add(MathsBlock(token.info, token.content, self._containers))
        else:  # not closed, or not yet
            self._add(TextBlock((TextSpan(token.content),), self._containers))

    def _add(self, segment: Segment) -> None:
        self._flush_marker()
        self._segments.append(segment)
        self._gap = Gap.PARAGRAPH

    # Tables

    def _on_table_open(self, _token: Token) -> None:
        self._flush_marker()
        self._in_table = True
        self._alignments, self._rows = [], []

    def _on_tr_open(self, _token: Token) -> None:
        self._rows.append([])

    def _on_th_open(self, token: Token) -> None:
        style = str(token.attrGet("style") or "")
        for name in ("center", "right"):
            if style.endswith(name):
                self._alignments.append(name)
                return
        self._alignments.append("left")

    def _on_table_close(self, _token: Token) -> None:
        self._in_table = False
        header, *rows = (tuple(row) for row in self._rows)
        at_once = max(1, _MOST_CELLS // len(header))
        for begin in range(0, max(1, len(rows)), at_once):
            part = (header, *rows[begin : begin + at_once])
            self._add(TableBlock(tuple(self._alignments), part, self._containers))

    # Inline text

    def _spans(self, content: str) -> tuple[TextSpan, ...]:
        tokens = self._parse_inline(content)
        return (TextSpan(content),) if tokens is None else read_spans(tokens)


def read_spans(tokens: Sequence[Token]) -> tuple[TextSpan, ...]:
    """Inline tokens as spans; neighbours in the same style are merged."""
    style = {"strong": 0, "em": 0, "s": 0}
    hrefs: list[str] = []
    spans: list[TextSpan] = []

    def add(text: str, code: bool = False, href: str = "", tex: str = "") -> None:
        href = href or (hrefs[-1] if hrefs else "")
        span = TextSpan(text, style["strong"] > 0, style["em"] > 0, style["s"] > 0, code, href, tex)
        if spans and spans[-1].looks_like(span):
            span = TextSpan(spans[-1].text + text, span.bold, span.italic, span.strike, span.code, span.href)
            spans.pop()
        if text:
            spans.append(span)

    for token in tokens:
        kind = token.type
        if kind == "text":
            add(token.content)
        elif kind == "text_special":
            # Models write \\( and \\[ for mathematics far more often than to escape a bracket.
            add(token.markup if token.content in tuple("()[]") else token.content)
        elif kind in ("softbreak", "hardbreak"):
            # A model means its line breaks, as in verse and addresses, so soft breaks are shown too.
            add("\n")
        elif kind == "code_inline":
            add(token.content, code=True)
        elif kind == "maths":
            add(token.content, tex=token.info)
        elif kind == "link_open":
            hrefs.append(allowed_link(str(token.attrGet("href") or "")))
        elif kind == "link_close":
            hrefs.pop()
        elif kind == "image":
            add(f"[image: {_image_text(token)}]", href=allowed_link(str(token.attrGet("src") or "")))
        elif kind.endswith(("_open", "_close")):
            style[token.tag] += 1 if kind.endswith("_open") else -1
        else:
            add(token.content)
    return tuple(spans)


def _image_text(token: Token) -> str:
    children = token.children
    return spans_text(read_spans(children)) if children else token.content
