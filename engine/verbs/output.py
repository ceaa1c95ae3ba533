"""Output of verbs: one JSON document, or text for the user, and nothing else on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.common.errors import EngineError
from engine.common.plain_text import plain, plain_line, tell


def emit(document: Any, *, as_json: bool, human: str | Callable[[], str]) -> None:
    """Prints a verb's result.

    Args:
        document: JSON-like values, dataclasses and paths.
        as_json: print `document` as one JSON document instead of `human`.
        human: text for a terminal, or a function that returns it.
    """
    if as_json:
        text = json.dumps(document, default=_json_value, ensure_ascii=False, indent=2)
    else:
        text = plain(human() if callable(human) else human)
    write_text(text + "\n")


def report_error(error: EngineError, *, as_json: bool) -> None:
    """One line on stderr, or a dialog without one; with `--json` also `{"error": {"code", "message"}}` on stdout."""
    tell(f"switchyard: {plain_line(error.message)}")
    if as_json:
        emit({"error": {"code": str(error.code), "message": error.message}}, as_json=True, human="")


def note(text: str) -> None:
    """Prints a remark as one line on stderr."""
    print(plain(text), file=sys.stderr, flush=True)  # noqa: T201


def show_progress(text: str) -> None:
    """Shows progress on a terminal's stderr, on a line that the next call replaces."""
    width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be cleared
    sys.stderr.write(f"\r{plain_line(text)[:width]}\x1b[K")
    sys.stderr.flush()


def clear_progress() -> None:
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()


def write_aside(text: str) -> None:
    """Writes what is no part of the result, dimmed, to a terminal's stderr; nothing where nobody watches."""
    if text and sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{plain(text)}\x1b[22m")
        sys.stderr.flush()


def write_text(text: str) -> None:
    """Writes text to stdout unchanged and flushes; for a terminal, control characters are replaced.

    A model's answer is untrusted: an escape sequence in it could rewrite the terminal.
    """
    if sys.stdout.isatty():
        text = plain(text)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside the block, the first Ctrl-C interrupts nothing, and what this yields says so; a second one interrupts."""
    presses = 0

    def on_press(_signal: int, _frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
