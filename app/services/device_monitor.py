"""What the machine is and what fills its memory, as far as the operating system and drivers tell."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
from PySide6.QtCore import QObject, QTimer, Signal

from app.services.background import LatestTask
from engine.hardware.cgroup import memory_limits
from engine.hardware.probe import HardwareProfile, probe

SAMPLE_MS = 1000
PROBE_MS = 5000


@dataclass(frozen=True, slots=True)
class RamSample:
    """Bytes of RAM: the machine's (or container's), what of it is taken, and what this window itself holds."""

    total: int
    used: int
    window: int


class DeviceMonitor(QObject):
    """Samples while it runs; the slow look at the hardware happens off the GUI thread.

    Signals:
        ram_sampled(RamSample): every second.
        hardware_found(HardwareProfile): once, and again every few seconds where there is a graphics card.
    """

    ram_sampled = Signal(object)
    hardware_found = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._window = psutil.Process(os.getpid())
        self._probe = LatestTask(self)
        self._sampling = QTimer(self, interval=SAMPLE_MS)
        self._sampling.timeout.connect(self.sample)
        self._probing = QTimer(self, interval=PROBE_MS)
        self._probing.timeout.connect(self._look)

    def start(self) -> None:
        self.sample()
        self._sampling.start()
        self._look()

    def stop(self) -> None:
        """Stops sampling and waits for a look under way."""
        self._sampling.stop()
        self._probing.stop()
        self._probe.close()

    def sample(self) -> None:
        """One sample of RAM; takes well under a millisecond."""
        memory = psutil.virtual_memory()
        limit, limited_free = memory_limits()
        total = memory.total if limit is None else min(limit, memory.total)
        free = memory.available if limited_free is None else min(limited_free, memory.available)
        self.ram_sampled.emit(RamSample(total, max(0, total - free), self._window.memory_info().rss))

    def _look(self) -> None:
        if not self._probe.is_busy:  # a look that takes long is not begun again and again
            self._probe.ask(probe, self._on_probed)

    def _on_probed(self, profile: HardwareProfile) -> None:
        self.hardware_found.emit(profile)
        if profile.gpus and self._sampling.isActive():
            self._probing.start()
