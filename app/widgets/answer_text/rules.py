"""What markdown-it reads besides CommonMark, tables and strike-through: mathematics and bare addresses.

Between the delimiters of mathematics `*`, `_` and `\\` are not Markdown, and lines are neither lists nor rules.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline

MAX_NESTING = 40
MAX_COLUMNS = 100

_CLOSERS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
_MAX_LENGTH = 2_000
# As in Pandoc: no space inside the dollars and no digit after them, so that two prices are not a formula.
# Nor is what begins before code and ends in it.
_DOLLARS = re.compile(r"\$(?![\s$])[^$\n`]{0,500}?(?<![\s\\])\$(?!\d)")
_SCHEME = re.compile(r"(?<![a-z0-9+.-])https?$", re.IGNORECASE)
_ADDRESS = re.compile(r"://[^\s<>\"`\x00-\x20\\^{|}]{1,2000}")
_AFTER_ADDRESS = ".,;:!?'*_~"
_PUNCTUATION = re.compile(r"[.,;:!]?\s*")


@cache
def markdown() -> MarkdownIt:
    """The parser, which holds no state of a text; imported with the first text, not at start-up."""
    from markdown_it import MarkdownIt

    result = MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_NESTING})
    result.enable(["table", "strikethrough"])
    result.block.ruler.at("table", _narrow_table, {"alt": ["paragraph", "reference"]})
    result.block.ruler.before("fence", "maths", _maths_block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    result.inline.ruler.before("escape", "maths", _maths)
    result.inline.ruler.before("maths", "address", _bare_address)
    return result


def _maths(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    if source[start] not in "\\$":
        return False
    opener = source[start : start + 2]
    closer = _CLOSERS.get(opener)
    if closer is not None:
        end = source.find(closer, start + 2, min(state.posMax, start + _MAX_LENGTH))
        if end < 0:
            return False
        tex = source[start + 2 : end]
        end += 2
    else:
        match = _DOLLARS.match(source, start, state.posMax)
        if match is None or (start and source[start - 1].isalnum()):
            return False
        tex, end = source[start + 1 : match.end() - 1], match.end()
    if not silent:
        # One token, line breaks included, that no other rule parses.
        token = state.push("maths", "", 0)
        token.content, token.info = source[start:end], tex
    state.pos = end
    return True


def _maths_block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A displayed formula on lines of its own: up to its closer, or to the next empty line if it has none."""

    def line_of(number: int) -> str:
        return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]

    closer = _CLOSERS.get(line_of(start)[:2])
    if closer is None or closer == "\\)" or state.is_code_block(start):
        return False
    last, tex = start, ""
    for number in range(start, end):
        if state.isEmpty(number) or (number > start and state.sCount[number] < state.blkIndent):
            break
        line, last = line_of(number), number
        found = line.find(closer, 2) if number == start else line.rfind(closer)
        if found >= 0 and _PUNCTUATION.fullmatch(line, found + 2):
            whole = state.getLines(start, number + 1, state.blkIndent, False).strip()
            tex = (whole[2 : whole.rindex(closer)].strip() + line[found + 2 :].strip()) or " "
            break
        if found >= 0 and number == start:
            # Part of a sentence. Of the first line alone: what later ones hold may not have arrived yet.
            return False
    if silent:
        return True
    state.line = last + 1
    token = state.push("maths_block", "", 0)
    token.content = state.getLines(start, last + 1, state.blkIndent, False).strip()
    token.info = tex
    token.map = [start, state.line]
    return True


def _bare_address(state: StateInline, silent: bool) -> bool:
    """An http or https address that stands in the text, without what belongs to the sentence around it."""
    if silent or state.src[state.pos] != ":" or state.linkLevel > 0:
        return False
    scheme = _SCHEME.search(state.pending[-10:])
    match = _ADDRESS.match(state.src, state.pos, state.posMax) if scheme is not None else None
    if scheme is None or match is None:
        return False
    rest = match.group().rstrip(_AFTER_ADDRESS)
    for closing, opening in (")(", "]["):
        while rest.endswith(closing) and rest.count(closing) > rest.count(opening):
            rest = rest[:-1].rstrip(_AFTER_ADDRESS)
    if len(rest) <= len("://"):
        return False
    state.pending = state.pending[: -len(scheme.group())]
    state.push("link_open", "a", 1).attrSet("href", scheme.group() + rest)
    state.push("text", "", 0).content = scheme.group() + rest
    state.push("link_close", "a", -1)
    state.pos += len(rest)
    return True


def _narrow_table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Takes no line of thousands of cells for a table: to read and to lay out one would take seconds."""
    from markdown_it.rules_block import table

    header = state.src[state.bMarks[start] : state.eMarks[start]]
    return header.count("|") <= MAX_COLUMNS + 1 and table(state, start, end, silent)
