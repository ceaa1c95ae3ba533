"""A line across the page, of an icon, a sentence and buttons, and a passing one at its foot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QFrame, QPushButton, QScrollArea, QSizePolicy, QWidget

from app.icons import IconMark
from app.services.background import timer
from app.theme import ColourName
from app.widgets.scaffold import WrappedLabel, add_items, hbox, push_button, text_label, vbox

SHOWN_MS = 10_000
MARGIN_PX = 24


class Toast(QWidget):
    """Takes its own strip of the page's layout while shown, so that it covers nothing."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._do: Callable[[], object] = bool
        self._card = card = QFrame(self)
        card.setObjectName("toast")
        self._text = text_label(card)
        self._text.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        self._text.setWordWrap(True)
        self.button = push_button(card, do=self._on_button, kind="quiet")
        hbox((self._text, 1), self.button, into=card, margins=(16, 6, 6, 6), gap=12)
        vbox(card, into=self, margins=(MARGIN_PX, 8, MARGIN_PX, 10), gap=-1)
        self._timer = timer(self, self.hide, SHOWN_MS, once=True)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def set_widest(self, width: int) -> None:
        self.setMaximumWidth(width + 2 * MARGIN_PX)

    def show_text(self, text: str, action: str = "", do: Callable[[], object] = bool) -> None:
        self._do = do
        self._text.setText(text)
        self.setAccessibleName(text)
        self.button.setText(action)
        self.button.setVisible(bool(action))
        self.show()
        self._timer.start()

    def _on_button(self) -> None:
        self.hide()
        self._do()


Kind = Literal["info", "warning", "danger"]
_MARKS: dict[Kind, tuple[str, ColourName]] = {
    "info": ("info", "accent_text"),
    "warning": ("warning", "danger"),
    "danger": ("warning", "danger"),
}
ICON_PX = 20
SPACING_PX = 12
LARGEST_SHARE = 0.36
"""Share of the window's height: more banners than fit scroll, so that the page below stays usable."""


class Banner(QFrame):
    """Hidden until `show_text`; its colour follows the theme, its meaning is in icon and words."""

    def __init__(self, kind: Kind, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("banner", kind)
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        name, colour = _MARKS[kind]
        self._text = WrappedLabel("", self)
        self._mark = IconMark(name, colour, ICON_PX, self)
        self._actions = hbox(gap=SPACING_PX)
        self._body = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._body.setSpacing(SPACING_PX)
        add_items(self._body, (self._text, 1), self._actions)
        self._body.setAlignment(self._actions, Qt.AlignmentFlag.AlignLeft)
        self._row = hbox(self._mark, (self._body, 1), into=self, margins=(16, 10, 16, 10), gap=SPACING_PX)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def add_action(self, label: str, do: Callable[[], None], *, kind: str = "") -> QPushButton:
        button = push_button(self, label, lambda: do(), kind=kind)
        self._actions.addWidget(button)
        return button

    def show_text(self, text: str) -> None:
        self._text.setText(text)
        self.setAccessibleName(text)
        self.show()

    def event(self, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest):
            self._place_actions()
        return super().event(event)

    def _place_actions(self) -> None:
        margins, actions = self._row.contentsMargins(), self._actions.sizeHint()
        room = self.width() - margins.left() - margins.right() - ICON_PX - SPACING_PX
        beside = max(self._text.heightForWidth(max(1, room - SPACING_PX - actions.width())), actions.height())
        below = self._text.heightForWidth(max(1, room)) + SPACING_PX + actions.height()
        is_below = actions.width() > 0 and below < beside
        way = QBoxLayout.Direction.TopToBottom if is_below else QBoxLayout.Direction.LeftToRight
        if way != self._body.direction():
            self._body.setDirection(way)
            self._row.setAlignment(self._mark, Qt.AlignmentFlag.AlignTop if is_below else Qt.AlignmentFlag.AlignVCenter)


class BannerStack(QScrollArea):
    """Banners stacked at their natural height; in a small window they scroll."""

    def __init__(self, banners: Sequence[QWidget], parent: QWidget) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._content = QWidget(self)
        self._banners = tuple(banners)
        vbox(*banners, into=self._content, gap=0)
        self._content.installEventFilter(self)
        self.setWidget(self._content)
        self.setFixedHeight(0)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._content and event.type() == QEvent.Type.LayoutRequest:
            self._fit()
        return super().eventFilter(watched, event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        shown = [banner for banner in self._banners if not banner.isHidden()]
        width = self.viewport().width()
        wanted = sum(max(one.heightForWidth(width), one.minimumSizeHint().height()) for one in shown)
        least = shown[0].heightForWidth(width) if shown else 0  # the first is never cut off
        height = min(wanted, max(least, int(LARGEST_SHARE * self.window().height())))
        if height != self.height():
            self.setFixedHeight(height)
