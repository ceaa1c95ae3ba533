"""The machine's sensors: CPUs, graphics cards, disk and page faults."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyqtgraph as pg
from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtWidgets import QLabel, QSizePolicy, QWidget

from app.theme import themed, use_tabular_figures
from app.widgets.chart import Chart
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import memory, number, translate
from app.widgets.scaffold import STRETCH, Card, add_items, muted_label, vbox
from engine.hardware.sensors import GpuSample, SensorSample

_LEAST_PX, _MOST_PX, _GAP_PX = 9, 30, 2
"""A cell's width, including the gap after it."""
_ONE_ROW_PX, _ROW_PX = 34, 20
BUSY = 0.9
"""Counts as fully busy: drawn with a line on top, so that colour is not the only cue."""


class CoreGrid(Chart):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._busy: tuple[float, ...] = ()
        self._tracks, self._bars, self._marks = (
            pg.BarGraphItem(x0=[], y0=[], width=0, height=0, pen=None) for _ in range(3)
        )
        for item in (self._tracks, self._bars, self._marks):
            self.view.addItem(item, ignoreBounds=True)
        self.view.invertY()
        self.view.sigResized.connect(lambda _view: self._draw())
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.dress()

    def show_cores(self, busy: Sequence[float]) -> None:
        shown = tuple(min(max(share, 0.0), 1.0) for share in busy)
        if len(shown) != len(self._busy):
            self.updateGeometry()
        if shown != self._busy:
            self._busy = shown
            self._draw()
        if shown:
            most = max(range(len(shown)), key=shown.__getitem__)
            text = self.tr("{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%")
            mean = number(100 * sum(shown) / len(shown), 0)
            self.setAccessibleName(text.format(len(shown), mean, most, number(100 * shown[most], 0)))

    def grid(self, width: int) -> tuple[int, int]:
        count = max(len(self._busy), 1)
        columns = min(count, max(1, width // _LEAST_PX))
        rows = -(-count // columns)
        return rows, -(-count // rows)

    def cells(self) -> list[QRectF]:
        rows, columns = self.grid(self.width())
        wide = min(self.width() / columns, _MOST_PX)
        high = self.height() / rows
        return [
            QRectF(index % columns * wide, index // columns * high, wide - _GAP_PX, high - _GAP_PX)
            for index in range(len(self._busy))
        ]

    def text_at(self, at: QPointF) -> str:
        for index, (cell, share) in enumerate(zip(self.cells(), self._busy, strict=True)):
            if cell.contains(at):
                return self.tr("CPU {0}: {1}% busy").format(index, number(100 * share, 0))
        return ""

    def sizeHint(self) -> QSize:
        return QSize(200, self.heightForWidth(200))

    def minimumSizeHint(self) -> QSize:
        return QSize(100, _ONE_ROW_PX)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        rows, _ = self.grid(width)
        return _ONE_ROW_PX if rows == 1 else rows * _ROW_PX

    def dress(self) -> None:
        super().dress()
        self._tracks.setOpts(brush=themed("border"))
        self._bars.setOpts(brush=themed("cpu"))
        self._marks.setOpts(brush=themed("text"))
        self._draw()

    def _draw(self) -> None:
        self.view.setRange(xRange=(0, self.view.width()), yRange=(0, self.view.height()), padding=0)
        busy = np.array(self._busy)
        edges = [(cell.left(), cell.right(), cell.top(), cell.bottom()) for cell in self.cells()]
        lefts, rights, tops, bottoms = np.array(edges or np.empty((0, 4))).T
        for item, y0, y1 in (
            (self._tracks, tops, bottoms),
            (self._bars, bottoms - (bottoms - tops) * busy, bottoms),
            (self._marks, tops, tops + 2 * (busy >= BUSY)),
        ):
            item.setOpts(x0=lefts, x1=rights, y0=y0, y1=y1, width=None, height=None)


_PARTS = 1000


class MachineCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("MachineCard", "Machine"), parent)
        self.explain(
            self.tr(
                "Sensor and driver data of the whole machine, other programs included. If the processor is much "
                "busier than our share of it, other programs are slowing the model down."
            )
        )
        self.caption.setText(self.tr("from sensors and drivers"))
        self.cpu = _line(self)
        self.cores = CoreGrid(self)
        self._gpus = vbox()
        self.gpus: list[_GpuRow] = []
        self.no_gpu = muted_label(self, self.tr("Graphics card: no sensor data"))
        self.rest = muted_label(self)
        add_items(self.body, self.cpu, self.cores, self._gpus, self.no_gpu, self.rest, STRETCH)
        self.show_sample(None)

    def show_sample(self, sample: SensorSample | None) -> None:
        self.cores.setVisible(sample is not None and bool(sample.cpu_by_core))
        self.no_gpu.setVisible(sample is not None and not sample.gpus)
        if sample is None:
            self.cpu.setText(self.tr("No sensor data yet."))
            self.rest.setText("")
            return
        self.cpu.setText(self._cpu_text(sample))
        if sample.cpu_by_core:
            self.cores.show_cores(sample.cpu_by_core)
        while len(self.gpus) < len(sample.gpus):
            self.gpus.append(_GpuRow(self))
            self._gpus.addWidget(self.gpus[-1])
        for place, row in enumerate(self.gpus):
            row.setVisible(place < len(sample.gpus))
            if place < len(sample.gpus):
                row.show_gpu(place, sample.gpus[place])
        self.rest.setText(self._rest_text(sample))

    def _cpu_text(self, sample: SensorSample) -> str:
        cores = sample.cpu_by_core or ()
        parts = [self.tr("CPU {0}%").format(number(100 * sum(cores) / len(cores), 0))] if cores else [self.tr("CPU")]
        if sample.cpu_ours is not None and cores:
            parts.append(self.tr("ours {0}%").format(number(100 * min(1.0, sample.cpu_ours / len(cores)), 0)))
        if sample.cpu_clock_hz:
            parts.append(self.tr("{0} GHz").format(number(sample.cpu_clock_hz / 1e9, 1)))
        if sample.cpu_temperature_c is not None:
            parts.append(self.tr("{0} °C").format(number(sample.cpu_temperature_c, 0)))
        power = sample.cpu_power_w
        parts.append(self.tr("power not available") if power is None else self.tr("{0} W").format(number(power, 0)))
        return " · ".join(parts)

    def _rest_text(self, sample: SensorSample) -> str:
        parts = []
        if sample.disk_read is not None and sample.disk_write is not None:
            text = self.tr("Disk {0} MB/s read, {1} MB/s written")
            parts.append(text.format(number(sample.disk_read / 1e6, 0), number(sample.disk_write / 1e6, 0)))
        if sample.disk_busy is not None:
            parts.append(self.tr("{0}% busy").format(number(100 * sample.disk_busy, 0)))
        if sample.minor_faults is not None:
            text = self.tr("page faults {0}/s, {1}/s from disk")
            parts.append(text.format(number(sample.minor_faults, 0), number(sample.major_faults or 0.0, 0)))
        return " · ".join(parts)


class _GpuRow(QWidget):
    """One card in two lines: load and memory, then clocks, power, temperature and link."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.head, self.tail = _line(self), muted_label(self, role="caption")
        self._busy, self._memory = MemoryBar(self), MemoryBar(self)
        self._busy.setToolTip(self.tr("Busy"))
        self._memory.setToolTip(self.tr("VRAM: ours; hatched: other programs"))
        use_tabular_figures(self.tail)
        vbox(self.head, self._busy, self._memory, self.tail, into=self, gap=3)

    def show_gpu(self, place: int, gpu: GpuSample) -> None:
        name = self.tr("GPU {0}").format(place)
        known = gpu.busy is not None or gpu.vram_total is not None
        busy = self.tr("{0}% busy").format(number(100 * gpu.busy, 0)) if gpu.busy is not None else ""
        used = self.tr("{0} of {1}").format(memory(gpu.vram_used or 0), memory(gpu.vram_total or 0))
        parts = [name, busy, used if gpu.vram_total else "", "" if known else self.tr("not responding")]
        self.head.setText(" · ".join(filter(None, parts)))
        self._busy.setVisible(gpu.busy is not None)
        self._memory.setVisible(bool(gpu.vram_total))
        self._busy.show_parts((BarPart("", round(_PARTS * (gpu.busy or 0.0)), "gpu"),), _PARTS)
        if gpu.vram_total:
            ours = gpu.vram_ours or 0
            others = gpu.vram_others if gpu.vram_others is not None else max(0, (gpu.vram_used or 0) - ours)
            shown = (BarPart("", ours, "gpu"), BarPart("", others, "idle", hatched=True))
            self._memory.show_parts(shown, gpu.vram_total)
        self.tail.setText(self._details(gpu))
        self.tail.setVisible(bool(self.tail.text()))
        self.setAccessibleName(f"{self.head.text()}. {self.tail.text()}")

    def _details(self, gpu: GpuSample) -> str:
        parts = []
        if gpu.clock_hz is not None:
            parts.append(self.tr("{0} GHz").format(number(gpu.clock_hz / 1e9, 2)))
        if gpu.memory_clock_hz is not None:
            parts.append(self.tr("memory {0} GHz").format(number(gpu.memory_clock_hz / 1e9, 2)))
        if gpu.power_w is not None:
            limit = f" / {number(gpu.power_limit_w, 0)}" if gpu.power_limit_w is not None else ""
            parts.append(self.tr("{0} W").format(f"{number(gpu.power_w, 0)}{limit}"))
        if gpu.temperature_c is not None:
            parts.append(self.tr("{0} °C").format(number(gpu.temperature_c, 0)))
        if gpu.pcie_rx is not None and gpu.pcie_tx is not None:
            text = self.tr("PCIe {0} in, {1} out GB/s")
            parts.append(text.format(number(gpu.pcie_rx / 1e9, 1), number(gpu.pcie_tx / 1e9, 1)))
        if gpu.slowed_by:
            parts.append(self.tr("slowed by {0}").format(", ".join(gpu.slowed_by)))
        return " · ".join(parts)


def _line(parent: QWidget) -> QLabel:
    label = muted_label(parent)
    use_tabular_figures(label)
    return label
