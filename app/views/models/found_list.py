"""The list of models to get: those of the catalogue, and below them what a search of the hub found."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPointF, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QFont, QFontMetricsF, QPainter, QPen
from PySide6.QtWidgets import (
    QAbstractItemView,
    QListView,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.headed_table import ROW_ROLE, HeadedTable
from app.theme import ColourName, scaled, themed
from app.views.models.phrases import badges, found_text, found_words, offer_line, offer_text
from app.widgets.chip import draw_elided, draw_pills, pills_width, small_font
from app.widgets.fit_table import draw_verdict_mark
from app.widgets.quantities import translate
from engine.checkpoint.hub import Found
from engine.tuning.fit import Recommendation

_LIST_PX, _ROWS, _ROWS_ABOVE = 330, 8, 4
_MARK_PX = 12

Row = Recommendation | Found
_Index = QModelIndex | QPersistentModelIndex


def _name(row: Row, _column: int) -> str:
    return row.entry.name if isinstance(row, Recommendation) else row.id


def _words(row: Row) -> str:
    return offer_text(row) if isinstance(row, Recommendation) else found_text(row)


class FoundList(QListView):
    chosen = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.rows = HeadedTable(parent=self, cell=_name, describe=_words)
        self._most = _ROWS
        self.setModel(self.rows)
        self.setItemDelegate(_Delegate(self))
        self.setAccessibleName(self.tr("Models to get"))
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setMouseTracking(True)
        self.setUniformItemSizes(True)
        self.selectionModel().currentChanged.connect(self._on_current)

    @property
    def row(self) -> Row | None:
        row = self.currentIndex().data(ROW_ROLE)
        return row if isinstance(row, Recommendation | Found) else None

    def show_rows(self, rows: tuple[Row, ...]) -> None:
        if rows != self.rows.rows:
            self.rows.show_rows(rows)
        self.setVisible(bool(rows))
        self._fit_height()

    def choose(self, at: int) -> None:
        self.setCurrentIndex(self.rows.index(at, 0))

    def fit(self, *, wide: bool) -> None:
        if wide:
            self.setFixedWidth(scaled(_LIST_PX))
        else:
            self.setMinimumWidth(0)
            self.setMaximumWidth(16_777_215)
            self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._most = _ROWS if wide else _ROWS_ABOVE
        self._fit_height()

    def _fit_height(self) -> None:
        height = self.itemDelegate().sizeHint(QStyleOptionViewItem(), QModelIndex()).height()
        self.setFixedHeight(height * max(1, min(self._most, self.rows.rowCount())))

    def _on_current(self, index: QModelIndex) -> None:
        row = index.data(ROW_ROLE)
        if isinstance(row, Recommendation | Found):
            self.chosen.emit(row)


class _Delegate(QStyledItemDelegate):
    """Three lines: a name and its labels; what it is good at, or its maker; and the facts."""

    def __init__(self, view: FoundList) -> None:
        super().__init__(view)
        self._view = view

    def sizeHint(self, _option: QStyleOptionViewItem, _index: _Index) -> QSize:
        upper, lower, _pill = self._fonts()
        return QSize(80, round(QFontMetricsF(upper).lineSpacing() + 2 * QFontMetricsF(lower).lineSpacing() + 14))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        row: Row = index.data(ROW_ROLE)
        area = QRectF(option.rect)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if option.state & QStyle.StateFlag.State_Selected:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(themed("accent_background"))
            painter.drawRoundedRect(area.adjusted(0, 1, 0, -1), 8, 8)
        else:
            painter.setPen(QPen(themed("border"), 1))
            painter.drawLine(area.bottomLeft() + QPointF(8, -0.5), area.bottomRight() + QPointF(-8, -0.5))
        (upper, lower, pill), pills, mark_px = self._fonts(), list[str](), 0.0
        if isinstance(row, Recommendation):
            name, middle = row.entry.name, translate("Catalogue", row.entry.strengths)
            facts, is_able = offer_line(row), row.speed is not None
            pills, mark_px = badges(row), _MARK_PX + 6.0
        else:
            middle, _, name = row.id.rpartition("/")
            facts, is_able = row.problem or found_words(row), not row.problem
        left, wide, top = area.left() + 8, area.width() - 16, area.top() + 6
        lines: tuple[tuple[str, QFont, ColourName, float], ...] = (
            (name, upper, "text" if is_able else "muted", 0.0),
            (middle, lower, "muted", 0.0),
            (facts, lower, "muted", mark_px),
        )
        for text, font, colour, indent in lines:
            high = QFontMetricsF(font).lineSpacing()
            mode = Qt.TextElideMode.ElideMiddle if font is upper else Qt.TextElideMode.ElideRight
            draw_elided(painter, QRectF(left + indent, top, wide - indent, high), text, font, colour, mode)
            if font is upper and pills:
                after = QFontMetricsF(upper).horizontalAdvance(text) + 10
                while pills and after + pills_width(pills, pill) > wide:
                    pills.pop()
                draw_pills(painter, left + after, top + high / 2, pills, pill, "accent" if _is_first(row) else "border")
            if indent and isinstance(row, Recommendation):
                mark = QRectF(left, top + (high - _MARK_PX) / 2, _MARK_PX, _MARK_PX)
                draw_verdict_mark(painter, mark, row.verdict)
            top += high
        painter.restore()

    def _fonts(self) -> tuple[QFont, QFont, QFont]:
        upper = small_font(self._view.font(), 13.5)
        upper.setWeight(QFont.Weight.Medium)
        return upper, small_font(self._view.font(), 12), small_font(self._view.font(), 11)


def _is_first(row: Row) -> bool:
    """Whether its first label says that it is one to take first."""
    return isinstance(row, Recommendation) and bool(row.role)
