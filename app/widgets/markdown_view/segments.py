"""A Markdown text, flattened: a plain list of segments from top to bottom.

Containers (lists and block quotes) are not nodes but a string that each segment carries, outermost first: `q` for a
block quote, `l` for a list.  A list item's text is a `TextBlock` in an `l` with a marker.  The flat form is what a
column of widgets needs, and two texts look the same exactly when their segments are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

Alignment: TypeAlias = Literal["left", "center", "right"]


class Gap(Enum):
    """The size of the space above a segment."""

    ITEM = "item"  # between the items of a tight list
    LOOSE = "loose"  # between the items of a loose list
    PARAGRAPH = "paragraph"
    HEADING = "heading"


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A run of text in one style.  `href` is empty or an http, https or mailto address; line breaks are `\\n`."""

    text: str
    bold: bool = False
    italic: bool = False
    strike: bool = False
    code: bool = False
    href: str = ""


@dataclass(frozen=True, slots=True)
class Marker:
    """A list item's marker: a bullet, a number, or a checkbox."""

    number: int | None = None
    checked: bool | None = None

    def text(self) -> str:
        if self.checked is not None:
            return "[x]" if self.checked else "[ ]"
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
class RuleBlock:
    """A thematic break."""

    containers: str = ""
    gap: Gap = Gap.PARAGRAPH


Segment: TypeAlias = TextBlock | CodeBlock | TableBlock | RuleBlock


def quote_part(containers: str) -> str:
    """The containers up to the innermost block quote: they decide which column of text a segment is in."""
    return containers[: containers.rfind("q") + 1]
