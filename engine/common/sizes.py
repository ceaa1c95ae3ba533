"""Formats sizes for display: `12.3 GB`, `85 MB`, in decimal units.

Where a sentence compares two sizes, the required one is rounded up and the available one down, so the message never
says that 5.0 GB do not fit into 5.0 GB, and allowing what is said to be needed is enough.
"""

from __future__ import annotations

from collections.abc import Callable

_STEPS = ((10**9, 10**8, "GB"), (10**7, 10**6, "MB"), (10**6, 10**5, "MB"), (10**3, 10**3, "kB"))
"""(from this many bytes, rounding step in bytes, unit)."""
_UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3}


def about(nbytes: int) -> str:
    """Rounded to the nearest figure."""
    return _in_words(nbytes, lambda step: (2 * nbytes + step) // (2 * step))


def rounded_up(nbytes: int) -> str:
    return _in_words(nbytes, lambda step: -(-nbytes // step))


def rounded_down(nbytes: int) -> str:
    return _in_words(nbytes, lambda step: nbytes // step)


def _in_words(nbytes: int, steps_of: Callable[[int], int]) -> str:
    for least, step, unit in _STEPS if nbytes >= 1000 else ():
        shown = steps_of(step) * step
        if shown >= least:
            return f"{shown / _UNITS[unit]:,.{1 if step < _UNITS[unit] else 0}f} {unit}"
    return f"{nbytes} bytes"
