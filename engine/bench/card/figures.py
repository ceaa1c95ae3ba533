"""What the parts of `switchyard bench card` give, and how they time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

Figures = dict[str, Any]
"""Texts, and numbers with their unit at the end of the name."""

REPEATS = 30


def number_of(device: str) -> int:
    """Of the card that is meant; the first if none is named."""
    _, _, number = device.partition(":")
    return int(number) if number.isdecimal() else 0


def median_seconds(work: Callable[[], object]) -> float:
    """Of several calls."""
    spans = []
    for _ in range(REPEATS):
        begun_s = time.perf_counter()
        work()
        spans.append(time.perf_counter() - begun_s)
    return statistics.median(spans)
