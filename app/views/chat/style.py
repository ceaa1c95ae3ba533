"""What the chat page adds to the window's style sheet: bubbles, chips, the box one writes in."""

from __future__ import annotations

import string
from dataclasses import asdict

from app.theme import BODY_PX, Theme

COLUMN_PX = 744
"""Widest the transcript and the box below it become, at the standard font size."""

ANSWER_PX = 680
BUBBLE_PX = 540

_SHEET = string.Template("""
#chatTitleBar { background: $surface; border: none; border-bottom: 1px solid $border; }
#chatPanel { background: $background; border: none; border-right: 1px solid $border; }
#chatPanel QListView { background: transparent; }
QFrame[chip="true"] { background: $surface; border: 1px solid $border; border-radius: 14px; }
QFrame[bubble="true"] { background: $bubble; border: none; border-radius: 14px; }
QFrame[note="true"] {
    background: $surface; border: 1px solid $border; border-left: 3px solid $miss; border-radius: 8px;
}
QFrame[note="true"] QPushButton { padding: 4px 12px; }
#chatPanel QLineEdit { font-size: $secondary; }
#greeting { font-size: $greeting; font-weight: 600; }
#composer { background: $surface; border: 1px solid $border; border-radius: 12px; }
#composer[active="true"] { border: 1px solid $accent; }
#toast { background: $raised; border: 1px solid $border; border-radius: 10px; }
#popover { background: $raised; border: 1px solid $border; border-radius: 12px; }
#jumpToLatest { background: $raised; border-radius: 16px; padding: 0; }
QPushButton[compact="true"] { padding: 3px 8px; font-size: $secondary; }
QPushButton[compact="true"]:focus { padding: 2px 7px; }
QPushButton[example="true"] { background: $surface; border-radius: 12px; padding: 12px 16px; text-align: left;
    font-weight: 400; }
QPushButton[example="true"]:hover { background: $hover; }
QPushButton[example="true"]:focus { border: 2px solid $accent; padding: 11px 15px; }
QToolButton[kind="small"] { background: transparent; border: 2px solid transparent; border-radius: 6px; padding: 2px; }
QToolButton[kind="small"]:hover { background: $hover; }
QToolButton[kind="small"]:focus { border-color: $accent; }
""")


def chat_style_sheet(theme: Theme, font_px: int) -> str:
    """The page's own style sheet."""
    points = 72 / 96 * font_px / BODY_PX
    extra = {
        "secondary": f"{12.5 * points:.2f}pt",
        "greeting": f"{22 * points:.2f}pt",
        "bubble": theme.raised if theme.is_dark else theme.accent_background,
    }
    return _SHEET.substitute(asdict(theme) | extra)


def scaled(px: int, font_px: int) -> int:
    """A width that grows with the font."""
    return round(px * font_px / BODY_PX)
