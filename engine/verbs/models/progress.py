"""Progress of long actions on stderr, and their interruption."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator

from engine.verbs.output import clear_progress, note, show_progress

_REDRAW_S = 0.1
_LINE_S = 1.0


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into KeyboardInterrupt, so that staging folders and pip are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressLine:
    """Progress on stderr: one updated line on a terminal, otherwise occasional lines."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_terminal = sys.stderr.isatty()
        self._shown = (-1, "")
        self._drawn_at = 0.0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown[0] >= 0:
            clear_progress()

    def update(self, done: int, total: int, words: str = "") -> None:
        """Shows how far it is; `words` follow the percentage and may change without it."""
        percent = 100 * done // max(total, 1)
        now = time.monotonic()
        interval = _REDRAW_S if self._is_terminal else _LINE_S
        if (percent, words) == self._shown or (percent < 100 and now - self._drawn_at < interval):
            return
        text = f"{self._label}: {percent} %" + (f", {words}" if words else "")
        if self._is_terminal:
            show_progress(text)
        else:
            note(text)
        self._shown, self._drawn_at = (percent, words), now
