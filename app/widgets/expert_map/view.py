"""The expert map as a widget, and as a table."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PySide6.QtCore import (
    QAbstractTableModel,
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontMetricsF,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import QSizePolicy, QToolTip, QWidget

from app.theme import scaled, tabular, themed
from app.widgets.expert_map.data import MapData, cividis, draw_map, place_bits, place_text
from app.widgets.quantities import figures, memory, nearest_percent, number
from engine.protocol import IN_VRAM, ON_DISK

Index = QModelIndex | QPersistentModelIndex
LAYER, EXPERT, USES, HITS, LAST, BYTES, PLACE = range(7)


class ExpertTable(QAbstractTableModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._data: MapData | None = None
        self._cells: NDArray[np.intp] = np.empty(0, np.intp)
        self._sorted: tuple[int, Qt.SortOrder] = LAYER, Qt.SortOrder.AscendingOrder

    def show_data(self, data: MapData | None) -> None:
        before = len(self._cells)
        self._data = data
        cells = np.flatnonzero(data.exists) if data is not None else np.empty(0, np.intp)
        if len(cells) != before:
            self.beginResetModel()
            self._cells = self._ordered(cells)
            self.endResetModel()
        elif len(cells):
            self._cells = self._ordered(cells)
            self.dataChanged.emit(self.index(0, 0), self.index(len(cells) - 1, PLACE))

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        self._sorted = column, order
        self.layoutAboutToBeChanged.emit()
        self._cells = self._ordered(np.sort(self._cells))
        self.layoutChanged.emit()

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._cells)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else PLACE + 1

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        data = self._data
        if data is None or not index.isValid() or index.row() >= len(self._cells):
            return None
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.AccessibleTextRole):
            row, expert = divmod(int(self._cells[index.row()]), data.shape[1])
            return self._text(data, row, expert, index.column())
        if role == Qt.ItemDataRole.TextAlignmentRole and index.column() != PLACE:
            return int(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        return None

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return (
                self.tr("Layer"),
                self.tr("Expert"),
                self.tr("Uses"),
                self.tr("Hits"),
                self.tr("Steps ago"),
                self.tr("Size"),
                self.tr("Where"),
            )[section]
        return None

    def _text(self, data: MapData, row: int, expert: int, column: int) -> str:
        uses, last = int(data.uses[row, expert]), int(data.last_step[row, expert])
        if column == LAYER:
            return str(data.layers[row])
        if column == EXPERT:
            return str(expert)
        if column == USES:
            return number(uses, 0)
        if column == HITS:
            return nearest_percent(int(data.hits[row, expert]) / uses) if uses else "–"
        if column == LAST:
            return number(max(0, data.step - last), 0) if last else "–"
        if column == BYTES:
            return memory(data.record_bytes[row])
        return place_text(int(data.places[row, expert]))

    def _ordered(self, cells: NDArray[np.intp]) -> NDArray[np.intp]:
        data, (column, order) = self._data, self._sorted
        if data is None or not len(cells):
            return cells
        columns = data.shape[1]
        uses = data.uses.reshape(-1)[cells].astype(np.float64)
        keys: dict[int, NDArray[Any]] = {
            LAYER: cells,
            EXPERT: cells % columns,
            USES: uses,
            HITS: data.hits.reshape(-1)[cells] / np.maximum(uses, 1),
            LAST: -data.last_step.reshape(-1)[cells].astype(np.float64),
            BYTES: np.array(data.record_bytes)[cells // columns],
            PLACE: data.places.reshape(-1)[cells],
        }
        key = keys.get(column, cells)
        by_key = np.argsort(-key if order == Qt.SortOrder.DescendingOrder else key, kind="stable")
        return np.asarray(cells[by_key])


_BAR_PX, _CELL_PX, _GAP_PX = 84, 12, 14


class MapLegend(QWidget):
    """The cividis scale with its values, and a cell for each place that occurs; it wraps."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._hottest = 0.0
        self._marks: list[tuple[str, str]] = []
        policy = QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setToolTip(self.tr("Recent uses: each counts half as much after 128 tokens"))

    def show_data(self, data: MapData | None) -> None:
        vram, ram, disk, arriving = place_bits(data) if data is not None else (False, False, False, False)
        self._hottest = data.hottest if data is not None else 0.0
        names = {
            "vram": (vram, self.tr("in VRAM")),
            "ram": (ram, self.tr("in RAM")),
            "disk": (disk, self.tr("only on disk")),
            "arriving": (arriving and vram, self.tr("fetching")),
        }
        marks = [(kind, name) for kind, (is_seen, name) in names.items() if is_seen]
        if marks != self._marks:
            self._marks = marks
            self.updateGeometry()
        scale = self.tr("Dark to yellow: 0 to {0} recent uses").format(figures(self._hottest))
        self.setAccessibleName(", ".join((scale, *(name for _, name in marks))))
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(240, self.heightForWidth(max(self.width(), 240)))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().height() < self.heightForWidth(event.size().width()):
            self.updateGeometry()  # fewer fit on a line than at the last layout

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return round((self._places(width)[-1][1] + 1) * self._line_px())

    def _font(self) -> QFont:
        font = tabular(self.font())
        font.setPixelSize(max(9, scaled(11.5)))
        return font

    def _line_px(self) -> float:
        return QFontMetricsF(self._font()).height() + 4

    def _scale_texts(self) -> tuple[str, str]:
        return self.tr("recent uses 0"), figures(self._hottest)

    def _places(self, width: int) -> list[tuple[float, int]]:
        metrics = QFontMetricsF(self._font())
        before, after = self._scale_texts()
        widths = [metrics.horizontalAdvance(before) + metrics.horizontalAdvance(after) + _BAR_PX + 12]
        widths += [_CELL_PX + 6 + metrics.horizontalAdvance(name) for _, name in self._marks]
        left, row, found = 0.0, 0, []
        for wide in widths:
            if left and left + wide > width:
                left, row = 0.0, row + 1
            found.append((left, row))
            left += wide + _GAP_PX
        return found

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        line = self._line_px()
        painter = QPainter(self)
        painter.setFont(self._font())
        metrics = QFontMetricsF(painter.font())
        (left, _), *places = self._places(self.width())
        before, after = self._scale_texts()
        flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        painter.setPen(themed("muted"))
        wide = metrics.horizontalAdvance(before)
        painter.drawText(QRectF(left, 0, wide + 1, line), flags, before)
        scale = np.ascontiguousarray(cividis())
        strip = QImage(scale.tobytes(), len(scale), 1, QImage.Format.Format_RGB32)
        bar = QRectF(left + wide + 6, (line - 9) / 2, _BAR_PX, 9)
        painter.drawImage(bar, strip)
        painter.drawText(QRectF(bar.right() + 6, 0, 80, line), flags, after)
        for (kind, name), (x, row) in zip(self._marks, places, strict=True):
            cell = QRectF(x, row * line + (line - _CELL_PX) / 2, _CELL_PX, _CELL_PX)
            self._draw_mark(painter, cell, kind)
            painter.setPen(themed("muted"))
            wide = metrics.horizontalAdvance(name) + 1
            painter.drawText(QRectF(cell.right() + 6, row * line, wide, line), flags, name)
        painter.end()

    def _draw_mark(self, painter: QPainter, cell: QRectF, kind: str) -> None:
        painter.fillRect(cell, QColor("#545B70"))
        inner = cell.adjusted(1.5, 1.5, -1.5, -1.5)
        if kind == "vram":
            painter.setPen(QPen(QColor("#FFFFFF"), 1.5))
            painter.drawRect(inner)
        elif kind == "arriving":
            painter.setPen(QPen(QColor("#FFFFFF"), 1.5, Qt.PenStyle.DotLine))
            painter.drawRect(inner)
        elif kind == "disk":
            painter.save()
            painter.setClipRect(cell)
            painter.setPen(QPen(themed("surface"), 1))
            for offset in range(-_CELL_PX, 2 * _CELL_PX, 4):
                at = cell.left() + offset
                painter.drawLine(round(at), round(cell.bottom()), round(at + _CELL_PX), round(cell.top()))
            painter.restore()


MARGIN_PX = 26
GAP_PX = 4


class ExpertMapView(QWidget):
    """Signals: `said(str)`, a description of the expert under the mouse or the cursor; empty if there is none."""

    said = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._data: MapData | None = None
        self._by_use = False
        self._order: NDArray[np.intp] | None = None
        self._image: QImage | None = None
        self._cursor: tuple[int, int] | None = None
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(self.tr("Expert map"))
        self.setAccessibleDescription(self.tr("Layers by experts. Arrow keys move from expert to expert."))

    @property
    def data(self) -> MapData | None:
        return self._data

    def show_data(self, data: MapData | None) -> None:
        self._data = data
        self._order = data.order(by_use=self._by_use) if data is not None else None
        if self._cursor is not None and data is not None:
            rows, columns = data.shape
            self._cursor = min(self._cursor[0], rows - 1), min(self._cursor[1], columns - 1)
        self._redraw()
        self._say()

    def sort_by_use(self, by_use: bool) -> None:
        self._by_use = by_use
        self.show_data(self._data)

    def sizeHint(self) -> QSize:
        return QSize(360, 170)

    def minimumSizeHint(self) -> QSize:
        return QSize(180, 120)

    def text_at(self, row: int, column: int) -> str:
        if self._data is None or self._order is None:
            return ""
        data, expert = self._data, int(self._order[row, column])
        place = int(data.places[row, expert])
        if not place:
            return ""
        uses, hits = int(data.uses[row, expert]), int(data.hits[row, expert])
        head = self.tr("Layer {0}, expert {1}").format(data.layers[row], expert)
        parts = [head, self.tr("used {0} times").format(number(uses, 0))]
        if place & (IN_VRAM | ON_DISK) or data.hits.any():
            parts.append(self.tr("hit {0}%").format(number(100 * hits / uses, 0)) if uses else self.tr("never used"))
        if last := int(data.last_step[row, expert]):
            parts.append(self.tr("last {0} steps ago").format(max(0, data.step - last)))
        parts += [memory(data.record_bytes[row]), place_text(place)]
        return " · ".join(parts)

    # --- painting ---------------------------------------------------------------------------------

    def _redraw(self) -> None:
        self._image = None
        self.update()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._redraw()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._redraw()

    def _area(self) -> QRectF:
        return QRectF(0, 0, self.width() - MARGIN_PX - GAP_PX, self.height() - MARGIN_PX - GAP_PX)

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        data, order = self._data, self._order
        if data is None or order is None:
            return
        area, ratio = self._area(), self.devicePixelRatioF()
        painter = QPainter(self)
        if self._image is None:
            size = max(1, round(area.width() * ratio)), max(1, round(area.height() * ratio))
            self._image = draw_map(data, order, *size, QColor("#FFFFFF"), themed("surface"))
            self._image.setDevicePixelRatio(ratio)
        painter.drawImage(0, 0, self._image)
        self._draw_margins(painter, area, data, order)
        if self._cursor is not None:
            rows, columns = data.shape
            cell = QRectF(0, 0, area.width() / columns, area.height() / rows)
            cell.moveTo(self._cursor[1] * cell.width(), self._cursor[0] * cell.height())
            painter.setPen(QPen(themed("miss"), 2))
            painter.drawRect(cell.adjusted(-1, -1, 1, 1))
        if self.hasFocus():
            painter.setPen(QPen(themed("accent"), 2))
            painter.drawRect(area.adjusted(1, 1, -1, -1))
        painter.end()

    def _draw_margins(self, painter: QPainter, area: QRectF, data: MapData, order: NDArray[np.intp]) -> None:
        heat = np.take_along_axis(data.heat, order, axis=1).astype(np.float64)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(themed("idle"))
        for sums, is_row in ((heat.sum(axis=1), True), (heat.sum(axis=0), False)):
            room = area.height() if is_row else area.width()
            step = room / len(sums)
            lengths = MARGIN_PX * sums / max(float(sums.max()), 1.0)
            thick = max(step - 1, 0.6 * step)
            bars = [
                QRectF(area.right() + GAP_PX, index * step, length, thick)
                if is_row
                else QRectF(index * step, area.bottom() + GAP_PX, thick, length)
                for index, length in enumerate(lengths.tolist())
            ]
            painter.drawRects(bars)

    # --- mouse and keys ---------------------------------------------------------------------------

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        at = self._cell_at(event.position().toPoint())
        if at != self._cursor:
            self._cursor = at
            self._say()
            self.update()
        text = self.text_at(*at) if at is not None else ""
        QToolTip.showText(event.globalPosition().toPoint(), text, self)

    def leaveEvent(self, event: object) -> None:  # noqa: ARG002
        self._cursor = None
        self._say()
        self.update()

    def _cell_at(self, at: QPoint) -> tuple[int, int] | None:
        area = self._area()
        if self._data is None or not area.contains(at):
            return None
        rows, columns = self._data.shape
        return int(at.y() * rows / area.height()), int(at.x() * columns / area.width())

    def keyPressEvent(self, event: QKeyEvent) -> None:
        moves = {
            Qt.Key.Key_Left: (0, -1),
            Qt.Key.Key_Right: (0, 1),
            Qt.Key.Key_Up: (-1, 0),
            Qt.Key.Key_Down: (1, 0),
        }
        move = moves.get(Qt.Key(event.key()))
        if move is None or self._data is None:
            event.ignore()
            return
        rows, columns = self._data.shape
        row, column = self._cursor or (0, 0)
        if self._cursor is not None:
            row, column = (row + move[0]) % rows, (column + move[1]) % columns
        self._cursor = row, column
        self._say()
        self.update()

    def _say(self) -> None:
        text = self.text_at(*self._cursor) if self._cursor is not None else ""
        self.setAccessibleDescription(text or self.tr("Layers by experts. Arrow keys move from expert to expert."))
        self.said.emit(text)
