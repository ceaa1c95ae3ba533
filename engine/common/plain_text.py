"""Makes untrusted text safe to print to a terminal or a log.

A file's name, a template's error or a model's answer can contain escape sequences that recolour or rewrite the
terminal, set its title or fill its clipboard, and marks that reverse the order of the text after them.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import unicodedata
from functools import cache

INSTEAD = "\ufffd"
_LONGEST_QUOTE = 100
_MOST_MARKS = 30
"""As in Unicode's stream-safe text format (UAX 15)."""

_OBEYED = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed; carriage return overwrites a line
    "\u202a-\u202e\u2066-\u2069"  # direction overrides: displayed text would differ from the actual text
    "\u2028\u2029"  # unexpected line breaks within a line
    "\ud800-\udfff"  # lone surrogates: undecodable file names, which no stream can encode
    "]"
)


def plain(text: str) -> str:
    """`text` with everything that a terminal would interpret replaced; tabs and line breaks stay.

    Letters of every script, joined emoji and spaces of every width are left unchanged.
    """
    return _OBEYED.sub(INSTEAD, text)


def plain_line(text: str) -> str:
    """The same on one line: every kind of white space becomes a space."""
    return plain(" ".join(text.split()))


@cache
def _many_marks() -> re.Pattern[str]:
    planes = itertools.chain(range(0x300, 0x1F000), range(0xE0100, 0xE01F0))
    letters = (letter if unicodedata.category(letter)[0] == "M" else " " for letter in map(chr, planes))
    marks = "".join(f"{run[0]}-{run[-1]}" for run in "".join(letters).split())  # single ones are found much slower
    return re.compile(f"([{marks}]{{{_MOST_MARKS}}})[{marks}]+")


def few_marks(text: str) -> str:
    """`text` with no more combining marks on a letter than writing has: to lay out thousands takes seconds."""
    return text if text.isascii() else _many_marks().sub(r"\1", text)


def quoted(text: str) -> str:
    """The beginning of a name in somebody's file, for a message: in quotation marks, on one line."""
    return repr(plain_line(text[:_LONGEST_QUOTE]))


def fill_streams() -> None:
    """Gives this process the streams that it was started without: nothing is read, and what is written goes nowhere.

    Libraries write to `sys.stderr` without looking whether there is one.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Open as long as the process is, like the streams that it stands for.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def has_console() -> bool:
    """Whether somebody may read what is written to stderr."""
    return sys.stderr is not None and getattr(sys.stderr, "name", "") != os.devnull


def tell(sentence: str) -> None:
    """Says a sentence on stderr, or in a dialog where nobody would read it there."""
    if not has_console() and sys.platform == "win32":
        import ctypes

        ctypes.windll.user32.MessageBoxW(None, sentence, "Switchyard", 0x10)
    elif sys.stderr is not None:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
