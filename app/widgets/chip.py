"""Short texts: in pills with a dot or a warning sign, of which one can be pressed, and painted in small fonts."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QLabel, QPushButton, QSizePolicy, QWidget

from app.icons import IconMark
from app.theme import BODY_PX, ColourName, tabular, themed
from app.widgets.scaffold import hbox, set_words
from engine.common.plain_text import few_marks


def small_font(font: QFont, px: float) -> QFont:
    result = tabular(font)
    share = px / BODY_PX
    if font.pointSizeF() > 0:
        result.setPointSizeF(font.pointSizeF() * share)
    else:  # no style sheet has set points yet
        result.setPixelSize(max(1, round(font.pixelSize() * share)))
    return result


def draw_elided(
    painter: QPainter,
    area: QRectF,
    text: str,
    font: QFont,
    colour: ColourName,
    mode: Qt.TextElideMode = Qt.TextElideMode.ElideRight,
) -> None:
    """Paints one line at the left of `area`, in the middle of its height; what does not fit is elided."""
    painter.setFont(font)
    painter.setPen(themed(colour))
    shown = QFontMetricsF(font).elidedText(text, mode, area.width())
    painter.drawText(area, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, shown)


def pills_width(texts: Sequence[str], font: QFont) -> float:
    metrics = QFontMetricsF(font)
    return sum(metrics.horizontalAdvance(text) + 14 + 6 for text in texts)


def draw_pills(
    painter: QPainter, left: float, middle: float, texts: Sequence[str], font: QFont, first_edge: ColourName = "border"
) -> None:
    """Paints short labels in a row; the first one's edge may have a colour of its own."""
    metrics = QFontMetricsF(font)
    high = metrics.height() + 4
    painter.setFont(font)
    painter.setBrush(themed("surface"))
    for at, text in enumerate(texts):
        pill = QRectF(left, middle - high / 2, metrics.horizontalAdvance(text) + 14, high)
        painter.setPen(themed("border" if at else first_edge))
        painter.drawRoundedRect(pill, high / 2, high / 2)
        painter.setPen(themed("muted"))
        painter.drawText(pill, Qt.AlignmentFlag.AlignCenter, text)
        left += pill.width() + 6


SIGN_PX = 14
WIDEST_PX = 340


class Dot(QWidget):
    """A filled circle; its meaning is always in words beside it."""

    def __init__(self, parent: QWidget, colour: ColourName = "idle") -> None:
        super().__init__(parent)
        self._colour = colour
        self.setFixedSize(8, 8)

    def set_colour(self, colour: ColourName) -> None:
        self._colour = colour
        self.update()

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(themed(self._colour))
        painter.drawEllipse(self.rect())


class ElidedLabel(QLabel):
    def __init__(self, parent: QWidget | None = None, *, role: str = "", tone: str = "") -> None:
        super().__init__(parent)
        set_words(self, role, tone)
        self.full_text = ""
        self._tip = ""
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)

    def set_full_text(self, text: str) -> None:
        self.full_text = few_marks(" ".join(line.strip() for line in text.splitlines()))
        self.setAccessibleName(self.full_text)
        self._fit()
        self.updateGeometry()

    def set_tip(self, tip: str) -> None:
        self._tip = tip
        self._fit()

    def sizeHint(self) -> QSize:
        width = self.fontMetrics().horizontalAdvance(self.full_text) + 2
        return QSize(width, super().sizeHint().height())

    def minimumSizeHint(self) -> QSize:
        return QSize(
            min(self.sizeHint().width(), self.fontMetrics().averageCharWidth() * 6), super().sizeHint().height()
        )

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        text = self.fontMetrics().elidedText(self.full_text, Qt.TextElideMode.ElideRight, self.width())
        if text != self.text():
            self.setText(text)
        self.setToolTip("\n".join(filter(None, ("" if text == self.full_text else self.full_text, self._tip))))


class Chip(QFrame):
    """A text in a pill, with a dot if `dot` names a colour and a warning sign if `warns`."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("chip", True)
        self._dot = Dot(self)
        self._sign = IconMark("warning", "danger", SIGN_PX, self)
        self._label = ElidedLabel(self, role="secondary")
        hbox(self._dot, self._sign, self._label, into=self, margins=(12, 5, 12, 5), gap=7)
        self._dot.hide()
        self._sign.hide()
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.setMaximumWidth(WIDEST_PX)

    @property
    def text(self) -> str:
        return self._label.full_text

    def show_text(self, text: str, *, dot: ColourName | None = None, warns: bool = False, tip: str = "") -> None:
        self._label.set_full_text(text)
        self._dot.setVisible(dot is not None)
        if dot is not None:
            self._dot.set_colour(dot)
        self._sign.setVisible(warns)
        self.setToolTip(tip)
        self.setAccessibleName(f"{text}. {tip}" if tip else text)


class ChipButton(QPushButton):
    """The same as a button that opens something: a dot, a text, a chevron.  `spoken` is its name around that text."""

    def __init__(self, spoken: str, parent: QWidget) -> None:
        super().__init__(parent)
        self._spoken = spoken
        self.setProperty("kind", "chip")
        self._dot = Dot(self)
        self._label = ElidedLabel(self, role="secondary")
        self._row = row = hbox(into=self, margins=(12, 0, 10, 0), gap=7)
        for widget in (self._dot, self._label, IconMark("chevron-down", "muted", SIGN_PX, self)):
            widget.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
            row.addWidget(widget)
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        self.setMaximumWidth(WIDEST_PX)

    @property
    def words(self) -> str:
        return self._label.full_text

    def show_text(self, text: str, *, dot: ColourName, tip: str = "") -> None:
        self._label.set_full_text(text)
        self._dot.set_colour(dot)
        self.setToolTip("\n".join(filter(None, (text, tip))))
        self.setAccessibleName(self._spoken.format(text))
        self.setAccessibleDescription(tip)
        self.updateGeometry()

    def sizeHint(self) -> QSize:
        return self._with_own_height(self._row.sizeHint())

    def minimumSizeHint(self) -> QSize:
        return self._with_own_height(self._row.minimumSize())

    def _with_own_height(self, inside: QSize) -> QSize:
        return QSize(inside.width(), max(super().sizeHint().height(), inside.height() + 8))
