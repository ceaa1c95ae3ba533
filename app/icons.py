"""The app's line icons, drawn in a theme colour and sharp at every device pixel ratio, and buttons of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from PySide6.QtCore import QByteArray, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QIcon, QIconEngine, QPainter, QPaintEvent, QPixmap
from PySide6.QtSvg import QSvgRenderer
from PySide6.QtWidgets import QSizePolicy, QToolButton, QWidget

from app.theme import ColourName, colours
from engine.common.paths import resources_dir


def icon(name: str, colour: ColourName = "text", checked: ColourName | None = None) -> QIcon:
    """The icon `resources/icons/NAME.svg`, in the theme's colours."""
    return QIcon(_LineIconEngine(name, colour, checked or colour))


def logo() -> QIcon:
    return icon("logo")


class IconMark(QWidget):
    def __init__(self, name: str, colour: ColourName, px: int, parent: QWidget) -> None:
        super().__init__(parent)
        self._icon, self._px = icon(name, colour), px
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)

    def sizeHint(self) -> QSize:
        return QSize(self._px, self._px)

    def minimumSizeHint(self) -> QSize:
        return self.sizeHint()

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        left, top = (self.width() - self._px) // 2, (self.height() - self._px) // 2
        self._icon.paint(painter, QRect(left, top, self._px, self._px))
        painter.end()


@lru_cache(maxsize=256)
def _renderer(name: str, colour: str) -> QSvgRenderer:
    source = (resources_dir() / "icons" / f"{name}.svg").read_text(encoding="utf-8")
    return QSvgRenderer(QByteArray(source.replace("currentColor", colour).encode()))


class _LineIconEngine(QIconEngine):
    """Looks its colours up while painting, so that icons follow the theme."""

    def __init__(self, name: str, normal: ColourName, checked: ColourName) -> None:
        super().__init__()
        self._name, self._normal, self._checked = name, normal, checked
        self._drawing(QIcon.Mode.Normal, QIcon.State.Off)  # fail early if the icon is missing, not while painting

    def _drawing(self, mode: QIcon.Mode, state: QIcon.State) -> QSvgRenderer:
        name = "logo-dark" if self._name == "logo" and colours().is_dark else self._name
        role = self._checked if state == QIcon.State.On else self._normal
        return _renderer(name, getattr(colours(), "faint" if mode == QIcon.Mode.Disabled else role))

    def paint(self, painter: QPainter, rect: QRect, mode: QIcon.Mode, state: QIcon.State) -> None:
        side = min(rect.width(), rect.height())
        square = QRectF(0, 0, side, side)
        square.moveCenter(QRectF(rect).center())
        self._drawing(mode, state).render(painter, square)

    def pixmap(self, size: QSize, mode: QIcon.Mode, state: QIcon.State) -> QPixmap:
        return self.scaledPixmap(size, mode, state, 1.0)

    def scaledPixmap(self, size: QSize, mode: QIcon.Mode, state: QIcon.State, scale: float) -> QPixmap:
        # `size` is in device-independent pixels, each `scale` screen pixels wide.
        result = QPixmap(size * scale)
        result.setDevicePixelRatio(scale)
        result.fill(Qt.GlobalColor.transparent)
        painter = QPainter(result)
        self.paint(painter, QRect(0, 0, size.width(), size.height()), mode, state)
        painter.end()
        return result

    def clone(self) -> QIconEngine:
        return _LineIconEngine(self._name, self._normal, self._checked)


ICON_PX = 15
SIDE_PX = 25


class IconButton(QToolButton):
    """Drawn in the muted colour; `shy` ones are drawn only while their row is hovered or they have the focus."""

    def __init__(self, name: str, words: str, do: Callable[[], None], parent: QWidget) -> None:
        super().__init__(parent)
        self.is_shy = False
        self.setProperty("kind", "small")
        self.setIconSize(QSize(ICON_PX, ICON_PX))
        self.setFixedSize(SIDE_PX, SIDE_PX)
        self.setAutoRaise(True)
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.clicked.connect(lambda: do())
        self.setIcon(icon(name, "muted"))

    def set_icon(self, name: str, words: str) -> None:
        self.setToolTip(words)
        self.setAccessibleName(words)
        self.setIcon(icon(name, "muted"))

    def paintEvent(self, event: QPaintEvent) -> None:
        row = self.parentWidget()
        if self.is_shy and not self.hasFocus() and row is not None and not row.underMouse():
            return
        super().paintEvent(event)
