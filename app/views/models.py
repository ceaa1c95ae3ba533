"""The Models page, a placeholder until it is built."""

from __future__ import annotations

import html

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.icons import IconMark
from app.widgets.page import Page
from app.widgets.page_header import PageHeader

translate = QCoreApplication.translate

ICON_PX = 40
TEXT_WIDTH_PX = 480


class PlaceholderPage(Page):
    """Title, icon and two or three sentences."""

    def __init__(self, title: str, icon_name: str, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        heading = QLabel(self.tr("{0} is not built yet").format(title), self)
        heading.setProperty("role", "title")
        heading.setAlignment(Qt.AlignmentFlag.AlignCenter)
        words = QLabel(f'<p style="line-height: 145%">{html.escape(text)}</p>', self)
        words.setProperty("role", "lead")
        words.setTextFormat(Qt.TextFormat.RichText)
        words.setWordWrap(True)
        words.setAlignment(Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignTop)
        words.setMaximumWidth(TEXT_WIDTH_PX)
        line = QHBoxLayout()
        line.addStretch(1)
        line.addWidget(words, 1000)
        line.addStretch(1)

        middle = QVBoxLayout()
        middle.setContentsMargins(20, 0, 20, 0)
        middle.setSpacing(12)
        middle.addStretch(2)
        middle.addWidget(IconMark(icon_name, "faint", ICON_PX, self), 0, Qt.AlignmentFlag.AlignHCenter)
        middle.addWidget(heading)
        middle.addLayout(line)
        middle.addStretch(3)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(PageHeader(title, self))
        column.addLayout(middle, 1)
        self.setAccessibleName(title)
        self.setAccessibleDescription(text)


def models_placeholder() -> PlaceholderPage:
    """What the page will do, and what to use until then."""
    text = translate(
        "ModelsPlaceholder",
        "Your model library: what is here, what fits this machine before you download it, and how fast it would run. "
        "Until then, use “switchyard models” on the command line; Tune tells you whether a model fits.",
    )
    return PlaceholderPage(translate("ModelsPlaceholder", "Models"), "models", text)
