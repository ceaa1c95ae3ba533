"""Hardware and sensor data from the operating system and drivers, which nothing else queries.

In its own thread, so that a slow driver blocks nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from PySide6.QtCore import QObject, Signal, SignalInstance

from engine.common.paths import sessions_dir
from engine.hardware.nvml import own_processes
from engine.hardware.probe import Probe, probe
from engine.hardware.sensors import DeviceSensors, SensorSample

_log = logging.getLogger("switchyard.devices")

EVERY_S = 0.5
"""Interval between two samples."""
_FAMILY_S = 2.0
"""How often our processes are listed: how late a new engine may be noticed."""
_BUSY_PART = 0.1
"""Slow drivers are sampled less often, so that the thread is busy no more than this share of the time."""


class OwnProcesses:
    """This process and its descendants, refreshed now and then: that means listing every process."""

    def __init__(self, look: Callable[[], Iterable[int]] = own_processes) -> None:
        self._look = look
        self._due_s = 0.0
        self._found: frozenset[int] = frozenset()

    def __call__(self) -> frozenset[int]:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _FAMILY_S
            self._found = frozenset(self._look())
        return self._found


class Sensors(Protocol):
    def sample(self) -> SensorSample: ...
    def close(self) -> None: ...


def _real_sensors() -> Sensors:
    return DeviceSensors(sessions_dir(), pids=OwnProcesses())


class DeviceMonitor(QObject):
    """Samples from `start` until `stop`.

    Signals:
        sampled(SensorSample): twice a second.
        hardware_found(Probe): once, soon after the first sample.
    """

    sampled = Signal(object)
    hardware_found = Signal(object)
    _sampled_there = Signal(object)
    _hardware_found_there = Signal(object)
    """For the thread; the public signals are emitted on the GUI's, where receivers disconnect safely."""

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        make_sensors: Callable[[], Sensors] = _real_sensors,
        look: Callable[[], Probe] = probe,
    ) -> None:
        super().__init__(parent)
        self._make_sensors, self._look = make_sensors, look
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampled_there.connect(self.sampled)
        self._hardware_found_there.connect(self.hardware_found)

    def start(self) -> None:
        if self._thread is None and not self._stopping.is_set():
            self._thread = threading.Thread(target=self._run, name="device-monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for a running sample, but not for a driver that hangs."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        sensors = self._sample(None)
        profile = None if self._stopping.is_set() else self._probed()
        if profile is not None:
            self._emit(self._hardware_found_there, profile)
        pause_s = EVERY_S
        while not self._stopping.wait(pause_s):
            began_s = time.thread_time()
            sensors = self._sample(sensors)
            pause_s = max(EVERY_S, min(time.thread_time() - began_s, 1.0) / _BUSY_PART)
        if sensors is not None:
            sensors.close()

    def _sample(self, sensors: Sensors | None) -> Sensors | None:
        try:
            sensors = sensors or self._make_sensors()
            self._emit(self._sampled_there, sensors.sample())
        except Exception:  # the next may succeed: drivers are reset, laptops' cards are suspended
            _log.exception("sampling the sensors failed")
            return None
        return sensors

    def _probed(self) -> Probe | None:
        try:
            return self._look()
        except Exception:
            _log.exception("detecting the hardware failed")
            return None

    def _emit(self, signal: SignalInstance, value: object) -> None:
        try:
            signal.emit(value)
        except RuntimeError:
            _log.info("the window has been deleted")
