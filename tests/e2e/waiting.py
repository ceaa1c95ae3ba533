"""Waiting for another process: until something holds, never for a fixed time."""

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

PATIENCE_S = 60.0  # how long a busy machine may take; nothing is asserted about it


def eventually(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true thing that `look` returns; fails the test, saying `what` did not happen, if none comes."""
    deadline = time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        if seen := look():
            return seen
        now = time.monotonic()
        if now > deadline:
            pytest.fail(f"waited {patience_s:.0f} s in vain until {what}")
        # To look keeps the other process from what is waited for: it has twice as long for that.
        time.sleep(max(0.05, min(2.0, 2 * (now - began))))
