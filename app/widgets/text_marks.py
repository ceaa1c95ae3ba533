"""How places of a text that was looked for are marked."""

from __future__ import annotations

from PySide6.QtGui import QColor, QTextCharFormat

from app.theme import colours

MOST_MATCHES = 500
"""Of one message: nobody looks at more one by one."""


def mark_format(*, is_chosen: bool) -> QTextCharFormat:
    """A match; the chosen one is stronger, and underlined for those who do not see its colour."""
    theme, look = colours(), QTextCharFormat()
    mark, ground = QColor(theme.cpu), QColor(theme.surface)
    share = 1.0 if is_chosen else 0.4 if theme.is_dark else 0.45
    both = ((mark.red(), ground.red()), (mark.green(), ground.green()), (mark.blue(), ground.blue()))
    look.setBackground(QColor(*(round(share * one + (1 - share) * other) for one, other in both)))
    look.setForeground(QColor("#14161A" if is_chosen else theme.text))
    look.setFontUnderline(is_chosen)
    return look
