"""Takes out of a text what is nobody's business: names, tokens, the user's own paths, and what was written to models.

For files that people attach to a report in public. What is left out is shown as such; rather too much than too little.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_REMOVED = "<removed>"
_PATH = "<a path>"
_TOKENS = re.compile(
    r"""
    (?:bearer|basic)\s+[A-Za-z0-9._~+/=-]+                                        # as in headers
    | \b(?:hf|ms|sk|gh[pousr]|glpat|xox[abp])[-_][A-Za-z0-9_-]{6,}                # as services name theirs
    | (?:token|secret|passw(?:or)?d|api.?key|authorization)["']?\s*[=:]\s*(?:bearer\s+|basic\s+)?\S+
    | \b[A-Za-z0-9_-]{40,}\b                                                       # too long for a word
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(\bhttps?://[^\s?#\"'<>]+)[?#][^\s\"'<>]*")
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ADDRESS = re.compile(
    r"\b(?!127\.)(?:\d{1,3}\.){3}\d{1,3}\b(?!\.\d)|\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE
)
_ABSOLUTE = re.compile(r"(?<![\w.:/~>\\-])(?:/(?=[^\s/])|[A-Za-z]:[\\/]|\\\\)[^\n]*|~[^\n]*")
_SAFE_PATH = re.compile(r"[\w.+@ -]+(?:[\\/][\w.+@-]+)*")
_LOGGED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,?\d* (?:\d+ )?[A-Z]+) ([\w.]+): .*")
_OUR_LOGGERS = ("switchyard", "engine", "app")
_FRAME = re.compile(r'\s*File "[^"\n]*", line \d+(?: in \S+|, in \S+)?')
_OF_CRASH = re.compile(
    r"(Traceback|Fatal Python error|Windows fatal exception|(Current )?[Tt]hread 0x|Extension modules)"
)
_ERROR = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning))(?::.*)?")


def without_names(text: str) -> str:
    """The text without names of people and computers, tokens, addresses, and paths but those of programs."""
    for pattern, instead in ((_QUERY, r"\1?" + _REMOVED), (_LOGIN, _REMOVED + "@"), (_TOKENS, _REMOVED)):
        text = pattern.sub(instead, text)
    text = _MAIL.sub(_REMOVED, text)
    text = _ADDRESS.sub(_REMOVED, text)
    text = "\n".join(_ABSOLUTE.sub(_shortened, line) for line in text.split("\n"))
    for name in _names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", _REMOVED, text, flags=re.IGNORECASE)
    return text


def of_log(lines: Iterable[str]) -> list[str]:
    """What a log may show: our own lines, and where an error was, but no error's message, which may quote anything."""
    shown = []
    for line in lines:
        line = line.rstrip("\r\n")
        if logged := _LOGGED.fullmatch(line):
            is_ours = logged[2].partition(".")[0] in _OUR_LOGGERS  # what others log may quote anything
            shown.append(without_names(line) if is_ours else f"{logged[1]} {logged[2]}")
        elif _OF_CRASH.match(line):
            shown.append(without_names(line))
        elif frame := _FRAME.match(line):
            shown.append(without_names(frame[0]))
        elif error := _ERROR.fullmatch(line.strip()):
            shown.append(error[1])
    return shown


def _shortened(found: re.Match[str]) -> str:
    """A path of a program from its folder on; of any other only that there was one, to the end of its line or quote."""
    text = found[0]
    before = found.string[: found.start()]
    quote = before[-1:] if before[-1:] in ("'", '"', "`", "(") else ""
    closing = {"(": ")"}.get(quote, quote)
    end = text.find(closing) if closing else -1
    path, rest = (text[:end], text[end:]) if end > 0 else (text, "")
    for folder, name in _program_folders():
        if path == folder or path.startswith(folder + os.sep):
            inside = _SAFE_PATH.match(path[len(folder) + 1 :])
            kept = inside[0] if inside else ""
            return name + os.sep + kept + _rest_of(path[len(folder) + 1 + len(kept) :], rest)
    return _PATH + (_ABSOLUTE.sub(_shortened, rest) if rest else "")


def _rest_of(between: str, rest: str) -> str:
    return _ABSOLUTE.sub(_shortened, between + rest)


def _program_folders() -> list[tuple[str, str]]:
    folders = {
        str(Path(__file__).resolve().parents[2]): "<switchyard>",
        sysconfig.get_path("purelib"): "<packages>",
        sysconfig.get_path("stdlib"): "<python>",
        sys.base_prefix: "<python>",
    }
    return sorted(((folder, name) for folder, name in folders.items() if len(folder) > 4), key=lambda it: -len(it[0]))


def _names() -> list[str]:
    found = {Path.home().name, platform.node(), platform.node().partition(".")[0]}
    with contextlib.suppress(OSError, KeyError, ImportError):  # no such user
        found.add(getpass.getuser())
    return sorted(
        (name for name in found if len(name) > 2 and name not in ("root", "localhost")), key=len, reverse=True
    )
