"""Paints a model in the picker: its name and speed, and below them what there is to know before it is loaded."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPointF, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QFont, QFontMetrics, QPainter, QPainterPath
from PySide6.QtWidgets import QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.models.library import ROW_ROLE, ModelRow
from app.theme import BODY_PX, ColourName, scaled, tabular, themed
from app.views.chat.phrases import about_text, speed_text, title_text

RADIUS = 8
INSET = 10
GAP = 12
ABOVE = 8
DOT_PX = 8


class ModelDelegate(QStyledItemDelegate):
    """Two lines on the left, elided; the speed on the right."""

    def sizeHint(self, _option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        lines = QFontMetrics(self._font(BODY_PX)).lineSpacing() + QFontMetrics(self._font(12.5)).lineSpacing()
        return QSize(0, lines + 2 * ABOVE + 2 + self._heading_height(index.data(ROW_ROLE)))

    def _heading_height(self, row: ModelRow) -> int:
        return QFontMetrics(self._font(12.5)).lineSpacing() + 2 * ABOVE if row.heading else 0

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        row: ModelRow = index.data(ROW_ROLE)
        whole: QRect = option.rect
        rect = whole.adjusted(0, self._heading_height(row), 0, 0)
        state: QStyle.StateFlag = option.state
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if row.heading:
            above = whole.adjusted(INSET, ABOVE, -INSET, 0)
            above.setHeight(QFontMetrics(self._font(12.5)).lineSpacing())
            self._line(painter, above, self._font(12.5, QFont.Weight.DemiBold), row.heading, "", "muted")
        pill = QPainterPath()
        pill.addRoundedRect(QRectF(rect).adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        if state & QStyle.StateFlag.State_Selected:
            painter.fillPath(pill, themed("accent_background"))
        elif state & QStyle.StateFlag.State_MouseOver:
            painter.fillPath(pill, themed("hover"))
        if state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(themed("accent"))
            painter.drawPath(pill)
        title, small = self._font(BODY_PX, QFont.Weight.Medium), self._font(12.5)
        inside = rect.adjusted(INSET, ABOVE, -INSET, -ABOVE)
        upper = QRect(inside.topLeft(), QSize(inside.width(), QFontMetrics(title).lineSpacing()))
        lower = QRect(upper.bottomLeft(), QSize(inside.width(), QFontMetrics(small).lineSpacing()))
        lower.translate(0, 2)
        problem = row.entry.problem
        speed, source = ("", "") if problem else speed_text(row)
        self._line(painter, upper, title, title_text(row), speed, "muted" if problem else "text", row.is_loaded)
        self._line(painter, lower, small, problem or about_text(row), source, "danger" if problem else "muted")
        painter.restore()

    def _line(
        self,
        painter: QPainter,
        room: QRect,
        font: QFont,
        text: str,
        beside: str,
        colour: ColourName,
        has_dot: bool = False,
    ) -> None:
        """A text from the left, elided, and a short one at the right edge."""
        metrics = QFontMetrics(font)
        middle = Qt.AlignmentFlag.AlignVCenter
        painter.setFont(font)
        painter.setPen(themed(colour))
        left = room.adjusted(0, 0, -(metrics.horizontalAdvance(beside) + GAP) if beside else 0, 0)
        if beside:
            right = QRect(room)
            right.setLeft(left.right() + GAP)
            painter.drawText(right, Qt.AlignmentFlag.AlignRight | middle, beside)
        if has_dot:
            painter.save()
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(themed("pcie"))
            painter.drawEllipse(QPointF(left.left() + DOT_PX / 2, left.center().y() + 1), DOT_PX / 2, DOT_PX / 2)
            painter.restore()
            left.adjust(DOT_PX + 7, 0, 0, 0)
        elided = metrics.elidedText(text, Qt.TextElideMode.ElideRight, left.width())
        painter.drawText(left, Qt.AlignmentFlag.AlignLeft | middle, elided)

    def _font(self, px: float, weight: QFont.Weight = QFont.Weight.Normal) -> QFont:
        view = self.parent()
        font = tabular(view.font()) if isinstance(view, QWidget) else QFont()
        font.setPixelSize(max(8, scaled(px)))
        font.setWeight(weight)
        return font
