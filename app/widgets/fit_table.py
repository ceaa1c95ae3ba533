"""The files of a repository as a table: memory bars, speed with its range, and verdicts, in words and as marks."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QPointF,
    QRectF,
    Qt,
    Signal,
)
from PySide6.QtGui import QFont, QFontMetricsF, QKeyEvent, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QHeaderView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app.models.headed_table import ROW_ROLE, HeadedTable, Index
from app.theme import ColourName, themed
from app.widgets.chip import draw_elided, small_font
from app.widgets.memory_bar import BarPart, TierBar, draw_bar, memory_parts
from app.widgets.quantities import SEPARATOR, figures, file_size, memory, number, rough
from app.widgets.text_table import show_whole_rows
from engine.checkpoint.hub import Candidate
from engine.planner.plan_parts import PicturePlan
from engine.tuning.fit import FitCard, FitRow, FitSpeed

translate = QCoreApplication.translate

Presence = Literal["downloading", "here"]
"""Of a model that can be downloaded: it is on its way, or on this PC."""

FAST, WORKS, BATCH_ONLY, TOO_LARGE = "fast", "works", "batch-only", "too-large"
VERDICT_LOOKS: dict[str, tuple[int, ColourName]] = {
    FAST: (3, "pcie"),
    WORKS: (2, "gpu"),
    BATCH_ONLY: (1, "cpu"),
    TOO_LARGE: (0, "miss"),
}
"""Bars of a signal, and their colour: the number of bars and the word tell verdicts apart without the colour."""


def verdict_words(verdict: str) -> str:
    """`Fast`."""
    return {
        FAST: translate("Fit", "Fast"),
        WORKS: translate("Fit", "Works"),
        BATCH_ONLY: translate("Fit", "Batch only"),
        TOO_LARGE: translate("Fit", "Too large"),
    }[verdict]


def quality_words(quality: str) -> str:
    """How close a file's answers are to the original's."""
    return {
        "original": translate("Fit", "original"),
        "near": translate("Fit", "near-original"),
        "good": translate("Fit", "good quality"),
        "fair": translate("Fit", "fair quality"),
        "poor": translate("Fit", "poor quality"),
    }.get(quality, quality)


def speed_words(speed: FitSpeed | None) -> str:
    if speed is None:
        return "–"
    if speed.timing != "estimated":
        return translate("Fit", "{0} tokens/s").format(figures(speed.decode))
    return translate("Fit", "about {0} tokens/s").format(rough(speed.decode))


def range_words(speed: FitSpeed | None) -> str:
    if speed is None:
        return ""
    if speed.timing != "estimated":
        return translate("Fit", "measured here")
    return translate("Fit", "estimated, {0} to {1}").format(rough(speed.low), rough(speed.high))


def first_token_words(speed: FitSpeed) -> str:
    """`first token after about 0.8 s`."""
    if speed.timing != "estimated":
        return translate("Fit", "first token after {0} s").format(figures(speed.ttft))
    return translate("Fit", "first token after about {0} s").format(rough(speed.ttft))


def picture_words(pictures: PicturePlan) -> str:
    """`pictures: 0.4 s each, 620 MB`."""
    words = translate("Fit", "pictures: about {0} s each on the graphics card, {1}")
    if not pictures.on_card:
        words = translate("Fit", "pictures: about {0} s each on the CPU, {1}")
    return words.format(rough(pictures.seconds), memory(pictures.nbytes))


def fit_bars(row: FitRow) -> tuple[TierBar, ...]:
    bars = []
    if row.card is not None:
        bars.append(TierBar(translate("Fit", "VRAM"), memory_parts(row.card), row.card.total))
    if row.ram is not None:
        bars.append(TierBar(translate("Fit", "RAM"), memory_parts(row.ram), row.ram.total))
    disk = row.disk
    files = BarPart(translate("Fit", "download"), disk.download, "disk")
    prepared = BarPart(translate("Fit", "converted weights"), disk.bank, "hit")
    if disk.bank_free is None or not disk.bank:
        bars.append(TierBar(translate("Fit", "Disk"), (files, prepared), disk.free, 10**9))
    else:
        bars.append(TierBar(translate("Fit", "Disk"), (files,), disk.free, 10**9))
        bars.append(TierBar(translate("Fit", "Library"), (prepared,), disk.bank_free, 10**9))
    return tuple(bars)


def spoken(row: FitRow, *, recommended: bool) -> str:
    said = [f"{row.candidate.label}, {file_size(row.bytes)}, {quality_words(row.quality)}"]
    if recommended:
        said[0] += SEPARATOR + translate("Fit", "recommended")
    said.append(verdict_words(row.verdict))
    if row.speed is not None:
        said.append(f"{speed_words(row.speed)} ({range_words(row.speed)}), {first_token_words(row.speed)}")
    said.append(row.candidate.problem or row.why)
    return "\n".join(filter(None, said))


def files_words(candidate: Candidate) -> str:
    weights = [file for file in candidate.files if file.path.lower().endswith((".gguf", ".safetensors"))]
    if not weights:
        return ""
    name = weights[0].path.rpartition("/")[2]
    if len(weights) == 1:
        return name
    return translate("Fit", "{0} and {1} more", "", len(weights) - 1).format(name, len(weights) - 1)


class FitColumn(IntEnum):
    FILE = 0
    MEMORY = 1
    SPEED = 2
    VERDICT = 3


_PAD = 8.0
_BAR_PX = 8.0
MOST_ROWS = 7
"""More scroll."""
_LEAST_MEMORY_EM = 12
_MOST_TOTAL = 200
_NARROW_EM = 70


class FitTable(QTableView):
    """Signals: `chosen`, when another row became current; `opened`, when one was activated by key or double click."""

    chosen = Signal()
    opened = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._asked = ""
        headings = (self.tr("File"), self.tr("Memory"), self.tr("Speed"), self.tr("On this PC"))
        self.card = FitCard((), None, "")
        self.rows = HeadedTable(
            headings,
            parent=self,
            describe=lambda row: spoken(row, recommended=row == self.recommended),
            key=lambda row: row.candidate.label,
        )
        self.setProperty("table", "text")
        self.setModel(self.rows)
        self.setItemDelegate(FitDelegate(self))
        show_whole_rows(self, self.tr("Files, and how they would run here"))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFrameShape(QFrame.Shape.NoFrame)
        head = self.horizontalHeader()
        head.setSectionsClickable(False)
        head.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        head.setSectionResizeMode(FitColumn.MEMORY, QHeaderView.ResizeMode.Stretch)
        self.selectionModel().currentRowChanged.connect(lambda *_: self.chosen.emit())
        self.doubleClicked.connect(lambda _index: self.opened.emit())
        self.rows.modelReset.connect(self._fit)
        self._fit()

    @property
    def row(self) -> FitRow | None:
        row = self.currentIndex().data(ROW_ROLE)
        return row if isinstance(row, FitRow) else None

    @property
    def recommended(self) -> FitRow | None:
        return self.card.rows[self.card.recommended] if self.card.recommended is not None else None

    def show_card(self, card: FitCard, asked: str = "") -> None:
        """Shows a card; the row of the label that was asked for is current, or else the recommended one, until the
        user takes another."""
        before = self.row
        was_recommended = before is not None and before == self.recommended
        self.card = card
        self.rows.show_rows(card.rows)
        is_new = bool(asked) and asked != self._asked
        stays = before is not None and (not was_recommended or before.candidate.label == asked)
        self._asked = asked
        at = self.rows.row_of(before.candidate.label) if before is not None and stays and not is_new else -1
        if at < 0:
            at = self.rows.row_of(asked)
        if at < 0:
            at = card.recommended if card.recommended is not None else 0
        if card.rows and self.currentIndex().row() != at:
            self.setCurrentIndex(self.rows.index(at, 0))
        self.chosen.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.row is not None:
            self.opened.emit()
            return
        super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        metrics = QFontMetricsF(self.font())
        em = metrics.averageCharWidth()
        narrow = self.viewport().width() < _NARROW_EM * em
        self.setColumnWidth(FitColumn.FILE, round((14 if narrow else 16) * em + 2 * _PAD))
        self.setColumnWidth(FitColumn.SPEED, round((14 if narrow else 18) * em + 2 * _PAD))
        self.setColumnWidth(FitColumn.VERDICT, round((11 if narrow else 12) * em + 22 + _PAD))
        others = sum(self.columnWidth(column) for column in FitColumn if column is not FitColumn.MEMORY)
        left = self.viewport().width() - others
        # Without room for bars, those below the table show the same of the current row.
        self.setColumnHidden(FitColumn.MEMORY, left < _LEAST_MEMORY_EM * em)
        if self.isColumnHidden(FitColumn.MEMORY):
            self.setColumnWidth(FitColumn.SPEED, max(0, left) + self.columnWidth(FitColumn.SPEED))
        height = round(2 * metrics.lineSpacing() + 14)
        self.verticalHeader().setDefaultSectionSize(height)
        shown = max(1, min(MOST_ROWS, self.rows.rowCount()))
        self.setFixedHeight(self.horizontalHeader().sizeHint().height() + shown * height)


class FitDelegate(QStyledItemDelegate):
    """Paints every cell in two lines."""

    def __init__(self, view: FitTable) -> None:
        super().__init__(view)
        self._view = view

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        row: FitRow = index.data(ROW_ROLE)
        area = QRectF(option.rect)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if option.state & QStyle.StateFlag.State_Selected:
            painter.fillRect(option.rect, themed("accent_background"))
        elif option.state & QStyle.StateFlag.State_MouseOver:
            painter.fillRect(option.rect, themed("hover"))
        painter.setPen(QPen(themed("border"), 1))
        painter.drawLine(area.bottomLeft() + QPointF(0, -0.5), area.bottomRight() + QPointF(0, -0.5))
        inner = area.adjusted(_PAD, 0, -_PAD, 0)
        column = FitColumn(index.column())
        if column is FitColumn.FILE:
            below = f"{file_size(row.bytes)} · {quality_words(row.quality)}"
            _two_lines(painter, option.font, inner, row.candidate.label, below)
        elif column is FitColumn.SPEED:
            _two_lines(painter, option.font, inner, speed_words(row.speed), range_words(row.speed))
        elif column is FitColumn.VERDICT:
            draw_verdict_mark(painter, QRectF(inner.left(), inner.center().y() - 7, 14, 14), row.verdict)
            below = self.tr("recommended") if row == self._view.recommended else ""
            words = inner.adjusted(22, 0, _PAD, 0)
            _two_lines(painter, option.font, words, verdict_words(row.verdict), below, bold=False, colour="accent_text")
        else:
            self._memory(painter, option.font, inner, row)
        painter.restore()

    def _memory(self, painter: QPainter, font: QFont, area: QRectF, row: FitRow) -> None:
        small = small_font(font, 11)
        bars = fit_bars(row)
        gap = 12.0
        width = (area.width() - gap * (len(bars) - 1)) / len(bars)
        line = QFontMetricsF(small).lineSpacing()
        top = area.center().y() - (line + 3 + _BAR_PX) / 2
        for number_, tier in enumerate(bars):
            left = area.left() + number_ * (width + gap)
            fits = (words for words in _amounts(tier) if QFontMetricsF(small).horizontalAdvance(words) <= width)
            draw_elided(painter, QRectF(left, top, width, line), next(fits, _amounts(tier)[-1]), small, "muted")
            draw_bar(painter, tier.parts, max(tier.total, tier.used), QRectF(left, top + line + 3, width, _BAR_PX))


def _two_lines(
    painter: QPainter,
    font: QFont,
    area: QRectF,
    first: str,
    second: str,
    *,
    bold: bool = True,
    colour: ColourName = "muted",
) -> None:
    upper, lower = QFont(font), small_font(font, 12)
    upper.setWeight(QFont.Weight.DemiBold if bold else QFont.Weight.Normal)
    high, low = QFontMetricsF(upper).lineSpacing(), QFontMetricsF(lower).lineSpacing()
    if not second:
        draw_elided(painter, area, first, upper, "text")
        return
    top = area.center().y() - (high + low) / 2
    draw_elided(painter, QRectF(area.left(), top, area.width(), high), first, upper, "text")
    draw_elided(painter, QRectF(area.left(), top + high, area.width(), low), second, lower, colour)


def _amounts(tier: TierBar) -> tuple[str, ...]:
    """`VRAM 7.1/8`, and what is said with less room; of a disk, whose size says little beside a file's, only what is
    taken."""
    used = number(tier.used / tier.unit, 1)
    total = tier.total / tier.unit
    short = f"{tier.name} {used}"
    return (f"{short}/{number(total, 0)}", short, used) if 0 < total < _MOST_TOTAL else (short, used)


def draw_verdict_mark(painter: QPainter, area: QRectF, verdict: str) -> None:
    """Three bars of a signal, as many filled as the verdict has; a cross for what is too large."""
    lit, colour = VERDICT_LOOKS[verdict]
    painter.save()
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    if verdict == TOO_LARGE:
        painter.setPen(QPen(themed(colour), 2.2, Qt.PenStyle.SolidLine, Qt.PenCapStyle.RoundCap))
        inner = area.adjusted(2.5, 2.5, -2.5, -2.5)
        painter.drawLine(inner.topLeft(), inner.bottomRight())
        painter.drawLine(inner.topRight(), inner.bottomLeft())
    else:
        painter.setPen(Qt.PenStyle.NoPen)
        for bar in range(3):
            height = area.height() * (bar + 1) / 3
            place = QRectF(area.left() + bar * 5, area.bottom() - height, 3.6, height)
            painter.setBrush(themed(colour if bar < lit else "border"))
            painter.drawRoundedRect(place, 1, 1)
    painter.restore()
