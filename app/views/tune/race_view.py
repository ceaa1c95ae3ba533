"""The table of timed plans: two lines for a plan, a bar for its timing, a bracket for its prediction."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QModelIndex, QPersistentModelIndex, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QFont, QFontMetricsF, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QHeaderView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app.models.plan_table import BAR, NAME, PREDICTED, TIMED, PlanRow, PlanTable
from app.theme import tabular, themed
from app.widgets.small_font import small_font
from app.widgets.text_table import show_whole_rows

_PAD = 8.0
_BAR_PX = 12.0


class RaceView(QTableView):
    """As high as its rows; it does not scroll."""

    def __init__(self, table: PlanTable, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._table = table
        self.name_width = 200
        self.setModel(table)
        self.setItemDelegate(RaceDelegate(table, self))
        show_whole_rows(self, self.tr("Plans, predicted and measured"))
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        head = self.horizontalHeader()
        head.setSectionsClickable(False)
        head.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        head.setSectionResizeMode(NAME, QHeaderView.ResizeMode.Stretch)
        table.modelReset.connect(self._fit)
        table.dataChanged.connect(lambda *_: self._fit())
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        metrics = QFontMetricsF(self.font())
        number = round(metrics.horizontalAdvance("Predicted") + 2 * _PAD)
        self.setColumnWidth(PREDICTED, number)
        self.setColumnWidth(TIMED, number)
        self.setColumnWidth(BAR, max(110, round(0.3 * self.viewport().width())))
        self.name_width = self.viewport().width() - sum(self.columnWidth(at) for at in (PREDICTED, TIMED, BAR))
        self.resizeRowsToContents()
        rows = sum(self.rowHeight(at) for at in range(self._table.rowCount()))
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + rows + 4)


class RaceDelegate(QStyledItemDelegate):
    """Paints every cell of the table."""

    def __init__(self, table: PlanTable, view: RaceView) -> None:
        super().__init__(view)
        self._table, self._view = table, view

    def sizeHint(self, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex) -> QSize:
        row: PlanRow = index.data(PlanTable.ROW)
        width = self._view.name_width - 2 * _PAD
        high = self._heights(option.font, row, width)
        return QSize(40, round(high[0] + high[1] + 16))

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        row: PlanRow = index.data(PlanTable.ROW)
        area = QRectF(option.rect)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        selected = bool(option.state & QStyle.StateFlag.State_Selected) and self._view.hasFocus()
        if selected or row.is_winner:
            painter.fillRect(option.rect, themed("accent_background" if row.is_winner else "hover"))
        painter.setPen(QPen(themed("border"), 1))
        painter.drawLine(area.bottomLeft() + QPointF(0, -0.5), area.bottomRight() + QPointF(0, -0.5))
        if index.column() == NAME:
            self._paint_name(painter, option.font, row, area)
        elif index.column() == BAR:
            self._paint_bar(painter, row, area.adjusted(_PAD, 0, -_PAD, 0), float(index.data(PlanTable.MOST)))
        else:
            font = tabular(option.font)
            if index.column() == TIMED:
                font.setWeight(QFont.Weight.DemiBold)
            painter.setFont(font)
            painter.setPen(themed("text" if index.column() == TIMED and not row.problem else "muted"))
            flags = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
            painter.drawText(area.adjusted(_PAD, 0, -_PAD, 0), flags, index.data())
        painter.restore()

    # --- the plan ---------------------------------------------------------------------------------

    def _second_line(self, row: PlanRow) -> str:
        said = self._table.marks(row)
        if row.problem:
            said.append(row.problem)
        elif row.doing:
            said.append(row.doing)
        elif row.timed is None:
            said.append(self.tr("waits"))
        return " · ".join(said)

    def _heights(self, font: QFont, row: PlanRow, width: float) -> tuple[float, float]:
        small = small_font(font, 12)
        metrics, smaller = QFontMetricsF(_name_font(font, row)), QFontMetricsF(small)
        room = QRectF(0, 0, max(width, 60), 400)
        flags = int(Qt.TextFlag.TextWordWrap)
        first = metrics.boundingRect(room, flags, row.contestant.name).height()
        second = self._second_line(row)
        return first, smaller.boundingRect(room, flags, second).height() if second else 0.0

    def _paint_name(self, painter: QPainter, font: QFont, row: PlanRow, area: QRectF) -> None:
        inner = area.adjusted(_PAD, 0, -_PAD, 0)
        first, second = self._heights(font, row, inner.width())
        top = area.center().y() - (first + second) / 2
        flags = int(Qt.TextFlag.TextWordWrap)
        painter.setFont(_name_font(font, row))
        painter.setPen(themed("text"))
        painter.drawText(QRectF(inner.left(), top, inner.width(), first), flags, row.contestant.name)
        painter.setFont(small_font(font, 12))
        painter.setPen(themed("danger" if row.problem else "accent_text" if row.is_winner else "muted"))
        painter.drawText(QRectF(inner.left(), top + first, inner.width(), second), flags, self._second_line(row))

    # --- the bar ----------------------------------------------------------------------------------

    def _paint_bar(self, painter: QPainter, row: PlanRow, area: QRectF, most: float) -> None:
        one = row.contestant
        bar = QRectF(area.left(), area.center().y() - _BAR_PX / 2, area.width(), _BAR_PX)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(themed("border"))
        painter.drawRoundedRect(bar, 3, 3)
        if most <= 0:
            return
        per = bar.width() / most
        if row.tokens_per_s:
            painter.setBrush(themed("accent" if row.is_winner else "muted" if row.timed is None else "idle"))
            painter.drawRoundedRect(QRectF(bar.left(), bar.top(), max(3.0, per * row.tokens_per_s), _BAR_PX), 3, 3)
        if one.predicted_tokens_per_s:  # a bracket from low to high with a mark at the prediction
            y = bar.center().y()
            low, high = bar.left() + per * one.low, bar.left() + per * one.high
            painter.setPen(QPen(themed("text"), 1.2))
            painter.drawLine(QPointF(low, y), QPointF(high, y))
            for x in (low, high):
                painter.drawLine(QPointF(x, y - 3), QPointF(x, y + 3))
            at = bar.left() + per * one.predicted_tokens_per_s
            painter.setPen(QPen(themed("text"), 2.2))
            painter.drawLine(QPointF(at, bar.top() - 3), QPointF(at, bar.bottom() + 3))


def _name_font(font: QFont, row: PlanRow) -> QFont:
    """The winning plan's name is bold, and so wider: it must be measured as it is painted."""
    found = QFont(font)
    found.setWeight(QFont.Weight.DemiBold if row.is_winner else QFont.Weight.Normal)
    return found
