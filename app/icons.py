"""Our own line icons, drawn with a colour of the theme and sharp at every device pixel ratio."""

from __future__ import annotations

from functools import lru_cache

from PySide6.QtCore import QByteArray, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QIcon, QIconEngine, QPainter, QPixmap
from PySide6.QtSvg import QSvgRenderer

from app.theme import Theme
from engine.common.paths import resources_dir


def icon(name: str, theme: Theme, colour: str | None = None, checked: str | None = None) -> QIcon:
    """The icon `resources/icons/NAME.svg`.

    Args:
        colour: drawn instead of the theme's text colour.
        checked: drawn while the button is checked (`QIcon.State.On`).

    Raises:
        FileNotFoundError: there is no such icon.
    """
    normal = colour or theme.text
    return QIcon(_LineIconEngine(name, normal, checked or normal, theme.faint))


def logo(theme: Theme) -> QIcon:
    """The mark: a track that forks, in the colours of GPU, CPU and PCIe."""
    return QIcon(_LineIconEngine("logo" if not theme.is_dark else "logo-dark", theme.text, theme.text, theme.faint))


def pixmap(name: str, colour: str, size: int, device_pixel_ratio: float = 1.0) -> QPixmap:
    """The icon as a picture of `size` x `size` device-independent pixels."""
    result = QPixmap(round(size * device_pixel_ratio), round(size * device_pixel_ratio))
    result.setDevicePixelRatio(device_pixel_ratio)
    result.fill(Qt.GlobalColor.transparent)
    painter = QPainter(result)
    _renderer(name, colour).render(painter, QRectF(0, 0, size, size))
    painter.end()
    return result


@lru_cache(maxsize=256)
def _renderer(name: str, colour: str) -> QSvgRenderer:
    source = (resources_dir() / "icons" / f"{name}.svg").read_text(encoding="utf-8")
    return QSvgRenderer(QByteArray(source.replace("currentColor", colour).encode()))


class _LineIconEngine(QIconEngine):
    def __init__(self, name: str, normal: str, checked: str, disabled: str) -> None:
        super().__init__()
        self._name = name
        self._colours = (normal, checked, disabled)
        _renderer(name, normal)  # so that a missing icon is told here, not while painting

    def _colour(self, mode: QIcon.Mode, state: QIcon.State) -> str:
        normal, checked, disabled = self._colours
        if mode == QIcon.Mode.Disabled:
            return disabled
        return checked if state == QIcon.State.On else normal

    def paint(self, painter: QPainter, rect: QRect, mode: QIcon.Mode, state: QIcon.State) -> None:
        side = min(rect.width(), rect.height())
        square = QRectF(0, 0, side, side)
        square.moveCenter(QRectF(rect).center())
        _renderer(self._name, self._colour(mode, state)).render(painter, square)

    def pixmap(self, size: QSize, mode: QIcon.Mode, state: QIcon.State) -> QPixmap:
        return self.scaledPixmap(size, mode, state, 1.0)

    def scaledPixmap(self, size: QSize, mode: QIcon.Mode, state: QIcon.State, scale: float) -> QPixmap:
        # `size` is in device-independent pixels, of which each is `scale` of the screen's.
        result = QPixmap(size * scale)
        result.setDevicePixelRatio(scale)
        result.fill(Qt.GlobalColor.transparent)
        painter = QPainter(result)
        self.paint(painter, QRect(0, 0, size.width(), size.height()), mode, state)
        painter.end()
        return result

    def clone(self) -> QIconEngine:
        return _LineIconEngine(self._name, *self._colours)
