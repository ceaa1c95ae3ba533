"""Keeps mathematics verbatim: between its delimiters, `*`, `_` and `\\` are not Markdown."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

_OPENERS = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}
_MAX_LENGTH = 2_000
# As in Pandoc: no space inside the dollars and no digit after them, so that two prices are not a formula.
_DOLLARS = re.compile(r"\$(?![\s$])[^$\n]{0,500}?(?<![\s\\])\$(?!\d)")


def _maths(state: StateInline, silent: bool) -> bool:
    source, start = state.src, state.pos
    if source[start] not in "\\$":
        return False
    closer = _OPENERS.get(source[start : start + 2])
    if closer is not None:
        end = source.find(closer, start + 2, min(state.posMax, start + _MAX_LENGTH))
        if end < 0:
            return False
        end += 2
    else:
        match = _DOLLARS.match(source, start, state.posMax)
        if match is None:
            return False
        end = match.end()
    if not silent:
        # One token, line breaks included, that no other rule parses.
        state.push("maths", "", 0).content = source[start:end]
    state.pos = end
    return True


def leave_maths_alone(markdown: MarkdownIt) -> None:
    """Makes mathematics an inline token of type `maths` whose content is the source with its delimiters."""
    markdown.inline.ruler.before("escape", "maths", _maths)
