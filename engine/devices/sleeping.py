"""Sleeping until a moment, to within some tens of microseconds."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_TIMERSLACK = 29
_LONGEST_S = 0.005
"""Interval at which a sleep checks for interruption."""
_SPIN_S = 20e-6
"""Sleeps overshoot, so the last stretch yields the CPU in a loop instead."""


_sharpened = threading.local()


def sharpen_timers() -> None:
    """Makes sleeps of the calling thread precise: Linux delays them by 50 microseconds to save power."""
    if getattr(_sharpened, "done", False):
        return
    _sharpened.done = True
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        except (OSError, AttributeError):
            return


def sleep_until(moment_s: float, interrupted: Callable[[], bool]) -> bool:
    """Sleeps until `time.perf_counter()` has reached `moment_s`; False as soon as `interrupted()`."""
    while True:
        if interrupted():
            return False
        left_s = moment_s - time.perf_counter()
        if left_s <= 0:
            return True
        time.sleep(0 if left_s <= _SPIN_S else min(left_s - _SPIN_S, _LONGEST_S))
