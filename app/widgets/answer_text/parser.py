"""Parses Markdown as it arrives: blocks that can no longer change are parsed once, only the open end is reparsed.

At the start of a top-level block on a line of its own, markdown-it has no state but the link references, so parsing
from there gives the same result as parsing the whole text.  The parser therefore cuts the text before the last block
that has at least one complete line: everything above the cut is final, the rest is the tail.  Code that is not closed
yet is cut after each of its lines, which are read again only to find its end.

Limits make hostile text harmless.  At most `WINDOW` characters are parsed at a time: a longer block is cut at a
position that depends only on the text, so that streaming cannot change the result.  Text with an absurd number of
marks, nested deeper than `MAX_NESTING`, or in a table with more than `MAX_COLUMNS`, is shown verbatim.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from app.widgets.answer_text.blocks import Segment, TextBlock, TextSpan, TokenReader

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token


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


WINDOW = 10_000
MAX_MARKS = 1_000
"""Of a paragraph: each may begin a span of its own, and to lay out thousands of these stops the window."""

_FENCE = re.compile(r" {0,3}(?:```|~~~)")
_MARKS = re.compile(r"[\[\]*_~`<&\\$]")

# Lone surrogates, control characters, and what QTextDocument uses for its own structure.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f\x80-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffc\ufffe\uffff]")
_LINE_SEPARATORS = re.compile("[\u2028\u2029]")


class StreamParser:
    """Turns appended text into segments.

    `finished` only grows, except that `finish` may parse blocks again that used a link reference before it was
    defined.  `tail` is the present state of the rest.
    """

    def __init__(self) -> None:
        self._markdown = markdown()
        self._references: dict[str, Any] = {}
        self._pending = ""
        self._searched = 0  # characters of `_pending` that contain no further cut
        self._held_return = False
        self._prefix = ""  # reopens the block at a cut: a fence, or a table with its header
        self._code = ""  # what was above the cut of a fence
        self._regions: list[tuple[str, str, slice]] = []  # source that may use link references, and its segments
        self._tail: list[Segment] | None = []
        self.is_finished = False
        self.finished: list[Segment] = []
        self.parsed_characters = 0

    def append(self, text: str) -> None:
        """Adds text without parsing it yet; O(len(text)).

        Raises:
            RuntimeError: after `finish`.
        """
        if self.is_finished:
            raise RuntimeError("Nothing can be appended to a finished text.")
        if self._held_return:
            text = "\r" + text
        self._held_return = text.endswith("\r")
        self._pending += _clean(text.removesuffix("\r"))
        if text:
            self._tail = None

    def advance(self) -> bool:
        """Moves text from the tail to `finished`, at most one window; returns whether there may be more to move."""
        if len(self._pending) >= WINDOW:
            self._finish_window()
            return True
        newline = self._pending.rfind("\n") + 1
        if newline > self._searched:
            cut = self._last_block_start(self._pending[:newline])
            if cut:
                self._searched = newline - cut
                self._move(cut)
            else:
                self._searched = 0 if self._took_code(newline) else newline
        return False

    def finish(self) -> None:
        """Marks the text as complete, and parses again what a late link definition changed."""
        if self.is_finished:
            return
        if self._held_return:
            self._held_return = False
            self._pending += "\n"
        while self.advance():
            pass
        if self._pending or self._code:
            self._move(len(self._pending))
        self.is_finished = True
        if self._references:
            self._resolve_late_references()

    def tail(self) -> list[Segment]:
        """The text after the finished blocks, as if nothing followed."""
        if self._tail is None:
            # The tail may contain link definitions, but they may still grow, so they are not kept.
            is_any = self._pending or self._code
            source = self._prefix + self._pending
            self._tail = self._read(source, dict(self._references), self._code) if is_any else []
        return self._tail

    def _move(self, cut: int) -> None:
        source, self._pending = self._prefix + self._pending[:cut], self._pending[cut:]
        code, self._prefix, self._code = self._code, "", ""
        self._tail = None
        start = len(self.finished)
        self.finished += self._read(source, self._references, code)
        if "[" in source:
            self._regions.append((source, code, slice(start, len(self.finished))))

    def _took_code(self, cut: int) -> bool:
        """Moves lines of code out of the tail, if all of it up to `cut` is code that is not closed there."""
        if not self._prefix and not _FENCE.match(self._pending):
            return False
        source = self._prefix + self._pending[:cut]
        tokens = self._block_tokens(source, {})
        first, *lines = source.split("\n")
        if len(tokens) != 1 or tokens[0].type != "fence" or not any(lines):
            return False
        closing = re.compile(rf" {{0,3}}{re.escape(tokens[0].markup[0])}{{{len(tokens[0].markup)},}}[ \t]*")
        if any(closing.fullmatch(line) for line in lines):
            return False
        self._code += tokens[0].content
        self._prefix, self._pending = first + "\n", self._pending[cut:]
        self._tail = None
        return True

    def _last_block_start(self, text: str) -> int:
        """Offset of the last top-level block of `text`, whose lines are all complete; 0 if it must not be cut there."""
        blocks = _top_level(self._block_tokens(self._prefix + text, dict(self._references)))
        lines = (self._prefix + text).split("\n")
        for index in range(len(blocks) - 1, 0, -1):
            start, previous_end = blocks[index][0], blocks[index - 1][1]
            between = "".join(lines[previous_end:start])
            # A link definition just above could still take this block's first line as its title.
            if not between.strip() or not lines[start - 1].strip():
                return sum(len(line) + 1 for line in lines[:start]) - len(self._prefix)
        return 0

    def _finish_window(self) -> None:
        window = self._pending[:WINDOW]
        newline = window.rfind("\n") + 1
        cut = self._last_block_start(window[:newline])
        prefix = ""
        self._searched = 0
        if not cut:
            cut = newline if newline > WINDOW // 2 else WINDOW
            if self._took_code(cut):
                return
            cut, prefix = self._forced_cut(window, cut, is_line=cut == newline)
        self._move(cut)
        self._prefix = prefix

    def _forced_cut(self, window: str, cut: int, *, is_line: bool) -> tuple[int, str]:
        """Where to cut a block that fills the whole window, and the prefix that reopens it below the cut."""
        tokens = self._block_tokens(self._prefix + window[:cut], dict(self._references))
        first = tokens[0] if tokens else None
        if first is None:
            return cut, ""
        if first.type == "table_open" and is_line:
            header = (self._prefix + window).split("\n")[:2]
            return cut, "\n".join(header) + "\n"
        if first.type in ("bullet_list_open", "ordered_list_open"):
            starts = [
                token.map[0] for token in tokens if token.type == "list_item_open" and token.level == 1 and token.map
            ]
            lines = (self._prefix + window).split("\n")
            offset = sum(len(line) + 1 for line in lines[: starts[-1]]) - len(self._prefix)
            if len(starts) > 1 and 0 < offset < cut:
                return offset, ""
        return cut, ""

    def _resolve_late_references(self) -> None:
        finished = list(self.finished)
        for source, code, place in self._regions:
            finished[place] = self._read(source, self._references, code)
        self.finished = finished

    def _block_tokens(self, source: str, references: dict[str, Any]) -> list[Token]:
        self.parsed_characters += len(source)
        tokens: list[Token] = []
        self._markdown.block.parse(source, self._markdown, _env(references), tokens)
        return tokens

    def _read(self, source: str, references: dict[str, Any], code: str = "") -> list[Segment]:
        """Segments of `source`, whose first block continues `code`; adds its link definitions to `references`."""
        tokens = self._block_tokens(source, references)
        if code:
            tokens[0].content = code + tokens[0].content
        env = _env(references)

        def parse_inline(content: str) -> Sequence[Token] | None:
            if len(content) > MAX_MARKS and len(_MARKS.findall(content)) > MAX_MARKS:
                return None
            children: list[Token] = []
            self._markdown.inline.parse(content, self._markdown, env, children)
            return children

        segments: list[Segment] = []
        lines: list[str] | None = None
        for start, end, first, last in _top_level(tokens):
            block = tokens[first:last]
            if max(token.level for token in block) >= MAX_NESTING - 2:
                # markdown-it drops what is nested deeper than its limit; show it verbatim instead.
                lines = lines or source.split("\n")
                segments.append(TextBlock((TextSpan("\n".join(lines[start:end])),)))
            else:
                segments += TokenReader(parse_inline).read(block)
        return segments


def import_parser() -> None:
    markdown()


def _env(references: dict[str, Any]) -> MutableMapping[str, Any]:
    return {"references": references}


def _top_level(tokens: Sequence[Token]) -> list[tuple[int, int, int, int]]:
    """(first line, line after the last, first token, token after the last) of every top-level block."""
    blocks = []
    first = 0
    for index, token in enumerate(tokens):
        if token.level == 0 and token.nesting != 1:
            start, end = tokens[first].map or (0, 0)
            blocks.append((start, end, first, index + 1))
            first = index + 1
        elif token.level == 0:
            first = index
    return blocks


def _clean(text: str) -> str:
    """Normalises line breaks to `\\n`, and replaces what cannot be shown by the replacement character."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _UNSHOWABLE.sub("\ufffd", _LINE_SEPARATORS.sub("\n", text))
