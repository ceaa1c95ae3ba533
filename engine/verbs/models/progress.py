"""Progress of long actions on stderr, and their interruption."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

from engine.common.sizes import about
from engine.verbs.output import clear_progress, note, show_progress

_REDRAW_S = 0.1
_LINE_S = 5.0
_RATE_S = 5.0
"""Rates are of so many last seconds."""
_LEAST_BAR, _WIDEST_BAR = 8, 24


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
    """Progress on stderr: a bar on a terminal, in one line that is updated, otherwise occasional lines.

    Args:
        label: what is being done.
        in_bytes: whether what is counted are bytes, which are then told with their rate and the time left.
    """

    def __init__(self, label: str, *, in_bytes: bool = False) -> None:
        self._label, self._in_bytes = label, in_bytes
        self._is_terminal = sys.stderr.isatty()
        self._shown = (-1, "")
        self._drawn_at = 0.0
        self._seen: deque[tuple[float, int]] = deque()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown[0] >= 0:
            clear_progress()

    def update(self, done: int, total: int, words: str = "", label: str = "") -> None:
        """Shows how far it is; `words` follow the percentage and may change without it.

        Args:
            label: instead of the line's own.
        """
        percent = 100 * done // max(total, 1)
        now = time.monotonic()
        if self._in_bytes:
            self._seen.append((now, done))
            while now - self._seen[0][0] > _RATE_S:
                self._seen.popleft()
        interval = _REDRAW_S if self._is_terminal else _LINE_S
        if (percent, words) == self._shown and not self._in_bytes:
            return
        if now - self._drawn_at < interval and (percent < 100 or self._shown[0] == percent):
            return
        words = words or (self._amount(done, total) if self._in_bytes else "")
        label = label or self._label
        if self._is_terminal:
            show_progress(drawn(label, done / max(total, 1), words, shutil.get_terminal_size().columns - 1))
        else:
            note(f"{label}: {percent} %" + (f", {words}" if words else ""))
        self._shown, self._drawn_at = (percent, words), now

    def _amount(self, done: int, total: int) -> str:
        (since, before), (until, _) = self._seen[0], self._seen[-1]
        rate = max(0, done - before) / (until - since) if until > since else 0.0  # it may begin again
        return amount_words(done, total, rate, (total - done) / rate if rate > 0 else None)


def amount_words(done: int, total: int, rate: float, eta_s: float | None) -> str:
    """`7.1 GB of 17.3 GB, 46 MB/s, 3 min left`, with as much of it as is known."""
    words = [f"{about(done)} of {about(total)}"]
    if rate:
        words.append(f"{about(round(rate))}/s")
        words += [f"{duration(eta_s)} left"] if eta_s is not None and done < total else []
    return ", ".join(words)


def duration(seconds: float) -> str:
    """`12 s`, `3 min`, `2 h 05 min`."""
    minutes = round(seconds) // 60
    if not minutes:
        return f"{round(seconds)} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def drawn(label: str, share: float, words: str, width: int) -> str:
    """A line with a bar in what room is left; the label is cut before the figures are."""
    share = min(max(share, 0.0), 1.0)
    figures = f" {int(100 * share):>3} %" + (f" {words}" if words else "")
    room = width - len(figures) - 1
    name = label if len(label) + _LEAST_BAR <= room else f"{label[: max(0, room - _LEAST_BAR - 1)]}…"
    cells = min(_WIDEST_BAR, room - len(name))
    if cells < _LEAST_BAR or len(name) < 2:
        return f"{label}{figures}"[:width]
    full, empty = ("█", "░") if _can_draw() else ("#", "-")
    filled = round(share * cells)
    return f"{name} {full * filled}{empty * (cells - filled)}{figures}"


def _can_draw() -> bool:
    try:
        "█░".encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
