"""The map's legend: the colour scale, and the marks for where an expert is."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFont, QFontMetricsF, QImage, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import scaled, tabular, themed
from app.widgets.expert_map.data import MapData, place_bits
from app.widgets.expert_map.picture import cividis
from app.widgets.quantities import figures

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
        """The legend for this map; empty for None."""
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
        """(left, row) of the scale and of each mark."""
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
