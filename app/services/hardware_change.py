"""Notices, once after start-up, that the hardware has changed since the last tuning."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.device_monitor import DeviceMonitor
from engine.hardware.probe import Probe


class HardwareChange(QObject):
    """Compares the detected hardware with the tuned one, off the GUI thread.

    Signals: `noticed(tuple[str, ...])`: the changes, as sentences; only if there are any.
    """

    noticed = Signal(object)

    def __init__(self, devices: DeviceMonitor, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._comparing = LatestTask(self)
        devices.hardware_found.connect(self._compare)

    def close(self) -> None:
        self._comparing.close()

    def _compare(self, probe: Probe) -> None:
        self._comparing.ask(lambda: _changes(probe), self._on_compared)

    def _on_compared(self, changed: tuple[str, ...]) -> None:
        if changed:
            self.noticed.emit(changed)


def _changes(probe: Probe) -> tuple[str, ...]:
    from engine.tuning.machine_state import changes_since  # imports the planner, too slow for start-up

    gpu = probe.compute_gpu
    return changes_since(probe, probe.card_device if gpu is not None and gpu.total_bytes else "")
