"""Numbers formatted for display."""

from __future__ import annotations

from PySide6.QtCore import QCoreApplication, QLocale

translate = QCoreApplication.translate

SEPARATOR = "  ·  "
"""Separates figures on one line."""
_GIB = 2**30
_MIB = 2**20


def memory(amount: int) -> str:
    """Bytes of memory, in the powers of 1024 that memory is sold in: `7.1 GB`, `340 MB`."""
    if amount >= _GIB:
        return translate("Fit", "{0} GB").format(number(amount / _GIB, 1))
    return translate("Fit", "{0} MB").format(number(amount / _MIB, 0))


def file_size(amount: int) -> str:
    """Bytes on a disk or a line, in the powers of 1000 that those are sold in: `18.6 GB`, `93 MB`."""
    if amount >= 1e9:
        return translate("Fit", "{0} GB").format(figures(amount / 1e9))
    return translate("Fit", "{0} MB").format(number(amount / 1e6, 0 if amount >= 1e6 else 1))


def used_of(used: int, total: int) -> str:
    return f"{number(used / _GIB, 1)} / {translate('Fit', '{0} GB').format(number(total / _GIB, 1))}"


def rate(bytes_per_s: float) -> str:
    """Bytes per second, in the powers of 1000 of data sheets: `58 GB/s`, `3.2 GB/s`, `0.15 GB/s`."""
    return translate("Fit", "{0} GB/s").format(figures(bytes_per_s / 1e9))


def arithmetic(flops: float) -> str:
    """Floating-point operations per second: `42 TFLOP/s`, `380 GFLOP/s`."""
    return f"{figures(flops / 1e12)} TFLOP/s" if flops >= 1e12 else f"{figures(flops / 1e9)} GFLOP/s"


def figures(value: float) -> str:
    """Three significant digits: `264`, `24.6`, `3.21`, `0.042`."""
    size = abs(value)
    return number(value, 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 or size == 0 else 3)


def rough(value: float) -> str:
    """An estimate, no finer than it is worth: `30`, `240`, `7`, `1.5`, `0.3`."""
    for least, step in ((200, 20), (100, 10), (20, 5), (3, 1), (1, 0.5), (0, 0.1)):
        if value >= least:
            rounded = step * max(1, round(value / step))
            return number(rounded, 0 if rounded == round(rounded) else 1)
    return number(0, 0)


def number(value: float, decimals: int) -> str:
    return QLocale().toString(float(value), "f", decimals)


def count(value: int) -> str:
    locale = QLocale()
    return f"{value:,}" if locale.language() == QLocale.Language.C else locale.toString(value)


def percent(fraction: float) -> str:
    """A fraction of 1 in whole per cent, rounded down."""
    return translate("Fit", "{0}%").format(int(fraction * 100))


def nearest_percent(fraction: float) -> str:
    return translate("Fit", "{0}%").format(number(100 * fraction, 0))


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`, `2 days`."""
    if seconds < 90:
        return translate("Fit", "{0} s").format(number(max(1, seconds), 0))
    minutes = round(seconds / 60)
    if minutes < 90:
        return translate("Fit", "{0} min").format(minutes)
    hours, rest = divmod(minutes, 60)
    if hours < 10 and rest:
        return translate("Fit", "{0} h {1} min").format(hours, rest)
    return (
        translate("Fit", "{0} h").format(hours)
        if hours < 48
        else translate("Fit", "{0} days", "", hours // 24).format(hours // 24)
    )
