"""Rates and times of day, formatted for display."""

from __future__ import annotations

from datetime import datetime

from PySide6.QtCore import QCoreApplication, QDate, QLocale, QTime

from app.widgets.quantities import count, number

translate = QCoreApplication.translate


def rate_figure(tokens_per_s: float) -> str:
    """With a decimal only where it is significant."""
    return number(tokens_per_s, 1) if tokens_per_s < 10 else count(round(tokens_per_s))


def clock_text(moment_s: float, now: datetime | None = None) -> str:
    """A time of day; with the date if it is not today.

    Args:
        moment_s: seconds since 1970.
    """
    now = now or datetime.now()
    moment = datetime.fromtimestamp(moment_s)
    locale = QLocale()
    time = locale.toString(QTime(moment.hour, moment.minute), QLocale.FormatType.ShortFormat)
    days = (moment.date() - now.date()).days
    if days <= 0:
        return time
    if days == 1:
        return translate("Batch", "tomorrow {0}").format(time)
    if days < 7:
        return f"{locale.dayName(moment.isoweekday())} {time}"
    wanted = translate("Batch", "d MMM") if moment.year == now.year else translate("Batch", "d MMM yyyy")
    return locale.toString(QDate(moment.year, moment.month, moment.day), wanted)
