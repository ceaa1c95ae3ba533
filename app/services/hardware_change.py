"""Says once, after the window has opened, that the hardware is another than when it was tuned."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.device_monitor import DeviceMonitor
from engine.hardware.probe import Probe


class HardwareChange(QObject):
    """Compares the first look at the hardware with what was tuned, off the GUI thread.

    Signals: `noticed(tuple[str, ...])`: what is another, in sentences; never if nothing is.
    """

    noticed = Signal(object)

    def __init__(self, devices: DeviceMonitor, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._comparing = LatestTask(self)
        devices.hardware_found.connect(self._compare)

    def close(self) -> None:
        """Waits for a comparison under way."""
        self._comparing.close()

    def _compare(self, probe: Probe) -> None:
        self._comparing.ask(lambda: _changes(probe), self._on_compared)

    def _on_compared(self, changed: tuple[str, ...]) -> None:
        if changed:
            self.noticed.emit(changed)


def _changes(probe: Probe) -> tuple[str, ...]:
    from engine.tuning.machine_look import changes_since  # with the planner, which the window does not open with

    gpu = probe.compute_gpu
    return changes_since(probe, "cuda:0" if gpu is not None and gpu.total_bytes else "")
