"""Numbers as the window writes them."""

from __future__ import annotations

from PySide6.QtCore import QLocale

_GIB = 2**30
_MIB = 2**20


def memory(amount: int) -> str:
    """Bytes of memory, in the powers of 1024 that memory is sold in: `7.1 GB`, `340 MB`."""
    if amount >= _GIB:
        return f"{number(amount / _GIB, 1)} GB"
    return f"{number(amount / _MIB, 0)} MB"


def used_of(used: int, total: int) -> str:
    """`7.1 of 8.0 GB`."""
    return f"{number(used / _GIB, 1)} / {number(total / _GIB, 1)} GB"


def number(value: float, decimals: int) -> str:
    """A number in the user's locale."""
    return QLocale().toString(float(value), "f", decimals)
