"""Text of others on its way to a terminal or a log, without what would be obeyed there instead of shown.

A file's name, a template's error or a model's answer can hold escape sequences that recolour or rewrite the terminal,
set its title or fill its clipboard, and marks that reverse the order in which what follows is read.
"""

from __future__ import annotations

import re

INSTEAD = "\ufffd"

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tabulator and line break; carriage return overwrites a line
    "\u202a-\u202e\u2066-\u2069"  # direction overrides: what is read is then not what is there
    "\u2028\u2029"  # line breaks that nobody expects within a line
    "\ud800-\udfff"  # half surrogate pairs: names of files that are no text, which no stream takes
    "]"
)


def plain(text: str) -> str:
    """`text` with everything that a terminal would obey replaced; tabulators and line breaks stay.

    Letters of every script, joined emoji and spaces of every width are left as they are.
    """
    return _OBEYED.sub(INSTEAD, text)


def plain_line(text: str) -> str:
    """The same in one line: white space of every kind becomes a space."""
    return plain(" ".join(text.split()))
