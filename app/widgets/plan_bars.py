"""A plan's memory: a bar per tier, and below it every part by name and amount."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QCoreApplication, QEvent, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QFont, QFontMetricsF, QPainter, QPainterPath, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import ColourName, themed
from app.widgets.quantities import number
from app.widgets.small_font import small_font
from engine.planner.plan_parts import TierBytes

translate = QCoreApplication.translate
_GIB = 2**30
_BAR_PX, _SWATCH_PX = 14.0, 9.0
_TENTHS = 10


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a tier; `colour` names one of the theme's."""

    name: str
    amount: int
    colour: ColourName
    hatched: bool = False


@dataclass(frozen=True, slots=True)
class TierBar:
    """A tier: its parts, and its size, 0 if unknown; `unit` is what it calls a GB: memories count in powers of 1024."""

    name: str
    parts: tuple[BarPart, ...]
    total: int
    unit: int = _GIB

    @property
    def used(self) -> int:
        return sum(part.amount for part in self.parts)


def memory_parts(tier: TierBytes, slots: int = 0) -> tuple[BarPart, ...]:
    """What a memory is planned for; `slots` is how many experts have a place in it, 0 to leave that out."""
    experts = (
        translate("PlanBars", "experts, {0} slots").format(f"{slots:,}") if slots else translate("PlanBars", "experts")
    )
    return (
        BarPart(translate("PlanBars", "weights"), tier.weights, "gpu"),
        BarPart(experts, tier.experts, "hit"),
        BarPart(translate("PlanBars", "staging"), tier.staging, "pcie"),
        BarPart(translate("PlanBars", "KV cache"), tier.kv, "disk"),
        BarPart(translate("PlanBars", "activations"), tier.activations, "cpu"),
        BarPart(translate("PlanBars", "headroom"), tier.headroom, "faint", hatched=True),
        BarPart(translate("PlanBars", "other programs"), tier.other_programs, "idle", hatched=True),
    )


def adding_up(amounts: Sequence[int], unit: int = _GIB) -> list[int]:
    """Bytes in tenths of a GB of `unit` bytes that add up to the rounded sum, so that the displayed numbers do too.

    Where rounding each one would miss the sum, those closest to the next tenth are rounded up (largest remainder).
    """
    exact = [amount * _TENTHS / unit for amount in amounts]
    whole = [int(one) for one in exact]
    missing = round(sum(exact)) - sum(whole)
    by_remainder = sorted(range(len(exact)), key=lambda at: exact[at] - whole[at], reverse=True)
    for at in by_remainder[: max(0, missing)]:
        whole[at] += 1
    return whole


class PlanBars(QWidget):
    """As high as its labels need at its width."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._tiers: tuple[TierBar, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setSizePolicy(policy)
        self.setAccessibleName(self.tr("Memory by tier"))

    def show_tiers(self, tiers: tuple[TierBar, ...]) -> None:
        """Draws these tiers."""
        self._tiers = tiers
        said = []
        for tier in tiers:
            parts = ", ".join(f"{name} {amount} GB" for name, amount, _part in self._labels(tier))
            said.append(f"{tier.name} {self._amount(tier)}: {parts}")
        self.setAccessibleDescription("\n".join(said))
        self.setToolTip("\n".join(said))
        self._fit()

    def sizeHint(self) -> QSize:
        return QSize(420, self._height(max(self.width(), 300)))

    def minimumSizeHint(self) -> QSize:
        return QSize(260, self._height(max(self.width(), 260)))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.oldSize().width() != event.size().width():
            self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        self.setFixedHeight(self._height(max(self.width(), 260)))
        self.update()

    # --- words ------------------------------------------------------------------------------------

    def _labels(self, tier: TierBar) -> list[tuple[str, str, BarPart | None]]:
        """(name, amount, part) of each non-empty part, free space last: together they are the total."""
        parts = [part for part in tier.parts if part.amount > 0]
        amounts = [_tenths(one) if one else self.tr("under {0}").format(_tenths(1)) for one in self._tenths(tier)]
        found: list[tuple[str, str, BarPart | None]] = [
            (part.name, amount, part) for part, amount in zip(parts, amounts, strict=False)
        ]
        if len(amounts) > len(parts):
            found.append((self.tr("free"), amounts[-1], None))
        return found

    def _tenths(self, tier: TierBar) -> list[int]:
        """Amounts of each non-empty part, and of free space if there is any."""
        free = tier.total - tier.used
        amounts = [part.amount for part in tier.parts if part.amount > 0]
        return adding_up([*amounts, free] if tier.total and free > 0 else amounts, tier.unit)

    def _amount(self, tier: TierBar) -> str:
        tenths = self._tenths(tier)
        if not tier.total:
            return self.tr("{0} GB").format(_tenths(sum(tenths)))
        if tier.used >= tier.total:
            return self.tr("{0} of {1} GB").format(_tenths(sum(tenths)), _tenths(*adding_up([tier.total], tier.unit)))
        return self.tr("{0} of {1} GB").format(_tenths(sum(tenths[:-1])), _tenths(sum(tenths)))

    # --- drawing ----------------------------------------------------------------------------------

    def _small(self) -> QFont:
        return small_font(self.font(), 12.5)

    def _lines(self, tier: TierBar, width: float) -> list[list[tuple[float, str, str, BarPart | None]]]:
        """Labels in lines: (x, name, amount, part)."""
        metrics = QFontMetricsF(self._small())
        lines: list[list[tuple[float, str, str, BarPart | None]]] = [[]]
        x = 0.0
        for name, amount, part in self._labels(tier):
            wide = _SWATCH_PX + 6 + metrics.horizontalAdvance(f"{name} {amount}") + 18
            if x and x + wide - 18 > width:
                lines.append([])
                x = 0.0
            lines[-1].append((x, name, amount, part))
            x += wide
        return lines

    def _tier_height(self, tier: TierBar, width: float) -> float:
        line = QFontMetricsF(self._small()).height() + 3
        return line + 3 + _BAR_PX + 6 + len(self._lines(tier, width)) * line + 12

    def _height(self, width: float) -> int:
        return round(sum(self._tier_height(tier, width) for tier in self._tiers)) if self._tiers else 0

    def paintEvent(self, event: QPaintEvent) -> None:  # noqa: ARG002
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        top, width = 0.0, float(self.width())
        for tier in self._tiers:
            self._draw_tier(painter, tier, QRectF(0, top, width, self._tier_height(tier, width)))
            top += self._tier_height(tier, width)
        painter.end()

    def _draw_tier(self, painter: QPainter, tier: TierBar, area: QRectF) -> None:
        painter.setFont(self._small())
        metrics = QFontMetricsF(self._small())
        line = metrics.height() + 3
        head = QRectF(area.left(), area.top(), area.width(), line)
        bold = self._small()
        bold.setWeight(QFont.Weight.DemiBold)
        painter.setFont(bold)
        painter.setPen(themed("text"))
        painter.drawText(head, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, tier.name)
        painter.setFont(self._small())
        painter.drawText(head, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, self._amount(tier))
        bar = QRectF(area.left(), head.bottom() + 3, area.width(), _BAR_PX)
        draw_bar(painter, tier, bar)
        y = bar.bottom() + 6
        for row in self._lines(tier, area.width()):
            for x, name, amount, part in row:
                swatch = QRectF(x, y + (line - _SWATCH_PX) / 2, _SWATCH_PX, _SWATCH_PX)
                _fill(painter, swatch, part)
                painter.setPen(themed("muted"))
                left = x + _SWATCH_PX + 6
                painter.drawText(QRectF(left, y, area.width(), line), Qt.AlignmentFlag.AlignVCenter, name)
                painter.setPen(themed("text"))
                at = left + metrics.horizontalAdvance(f"{name} ")
                painter.drawText(QRectF(at, y, area.width(), line), Qt.AlignmentFlag.AlignVCenter, amount)
            y += line


def draw_bar(painter: QPainter, tier: TierBar, bar: QRectF) -> None:
    """A tier's parts side by side in `bar`; the rest of it is free."""
    whole = max(tier.total, tier.used)
    outline = QPainterPath()
    outline.addRoundedRect(bar, 4, 4)
    painter.save()
    painter.setClipPath(outline)
    painter.fillRect(bar, themed("border"))
    left = bar.left()
    for part in tier.parts:
        if part.amount > 0 and whole:
            width = max(2.0, bar.width() * part.amount / whole)
            _fill(painter, QRectF(left, bar.top(), width, bar.height()), part)
            left += width
            painter.setPen(QPen(themed("surface"), 1))
            painter.drawLine(QPointF(left, bar.top()), QPointF(left, bar.bottom()))
    painter.restore()


def _fill(painter: QPainter, area: QRectF, part: BarPart | None) -> None:
    solid = themed(part.colour if part is not None else "border")
    if part is None or not part.hatched:
        painter.fillRect(area, solid)
        return
    faded = QColor(solid)
    faded.setAlpha(90)
    painter.fillRect(area, faded)
    painter.fillRect(area, QBrush(solid, Qt.BrushStyle.BDiagPattern))


def _tenths(amount: int) -> str:
    return number(amount / _TENTHS, 1)
