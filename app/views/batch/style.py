"""What the batch page adds to the window's style sheet."""

from __future__ import annotations

import string
from dataclasses import asdict

from app.theme import Theme
from app.views.chat.style import chat_style_sheet

_SHEET = string.Template("""
#dropArea { background: transparent; border: 1px dashed $faint; border-radius: 12px; }
#dropArea[over="true"] { background: $accent_background; border: 2px dashed $accent; }
#jobStrip { background: $surface; border: none; border-bottom: 1px solid $border; }
#formFoot { background: $surface; border: none; border-top: 1px solid $border; }
#templateText { background: $sunken; border: 1px solid $border; border-radius: 8px; padding: 8px 10px; }
#percent { font-size: $percent; font-weight: 600; }
QTableView { gridline-color: transparent; }
QTableView::item { padding: 2px 5px; border: none; border-radius: 0; border-bottom: 1px solid $border; }
QTableView::item:selected { background: $accent_background; color: $text; }
QTableView:focus { border: none; }
QHeaderView { background: transparent; }
QHeaderView::section {
    background: transparent; color: $muted; font-size: $secondary; font-weight: 400;
    border: none; border-bottom: 1px solid $border; padding: 4px 8px;
}
""")


def batch_style_sheet(theme: Theme, font_px: int) -> str:
    """The page's own style sheet; popovers, chips and toasts are those of the chat."""
    points = 72 / 96 * font_px / 14
    extra = {"secondary": f"{12.5 * points:.2f}pt", "percent": f"{20 * points:.2f}pt"}
    return chat_style_sheet(theme, font_px) + _SHEET.substitute(asdict(theme) | extra)
