"""Samples of the machine, taken in a thread of their own: a driver that takes its time holds up nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from engine.hardware.nvml import own_processes
from engine.hardware.sensors import DeviceSensors, SensorSample

_log = logging.getLogger("switchyard.sampler")

WATCHED_S, UNWATCHED_S = 0.4, 0.5
"""Between two samples while somebody looks, and otherwise."""
_FAMILY_S = 2.0
"""So often it is asked who has been started: an engine is seen so much later."""
_BUSY_PART = 0.1
"""A sampler whose drivers are slow takes samples more rarely, so that it is busy for no more than this."""


class OwnProcesses:
    """This process and all that it has started, looked up now and then: that means looking at every process."""

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
    """What is sampled; `engine.hardware.sensors.DeviceSensors` is the real one."""

    def sample(self) -> SensorSample: ...
    def close(self) -> None: ...


def _sensors(folder: Path | None) -> Sensors:
    return DeviceSensors(folder, pids=OwnProcesses())


class DeviceSampler:
    """Calls `take` with each sample, from its own thread, until it is closed."""

    def __init__(
        self,
        folder: Path | None,
        take: Callable[[SensorSample], None],
        make_sensors: Callable[[Path | None], Sensors] = _sensors,
    ) -> None:
        self._folder, self._take, self._make = folder, take, make_sensors
        self._closing = threading.Event()
        self.is_watched = False
        self._thread = threading.Thread(target=self._run, name="device-sampler", daemon=True)

    def start(self) -> None:
        """Begins; once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; waits for a sample under way, but not for a driver that hangs."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        sensors: Sensors | None = None
        took_s = 0.0
        while not self._closing.wait(max(WATCHED_S if self.is_watched else UNWATCHED_S, took_s / _BUSY_PART)):
            began_s = time.thread_time()
            try:
                sensors = sensors or self._make(self._folder)
                self._take(sensors.sample())
            except Exception:  # the next may do: drivers are reset, laptops' cards fall asleep
                _log.exception("no sample of the machine")
                sensors = None
            took_s = min(time.thread_time() - began_s, 1.0)
        if sensors is not None:
            sensors.close()
