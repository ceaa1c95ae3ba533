"""Start-up time of the window, for a benchmark that requests it through the environment."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
from PySide6.QtCore import QEvent, QObject, QTimer
from PySide6.QtWidgets import QApplication, QWidget

from engine.common.files import write_whole

REPORT_VARIABLE = "SWITCHYARD_STARTUP_REPORT"
QUIT_VARIABLE = "SWITCHYARD_QUIT_AFTER_STARTUP"


_reached_s: dict[str, float] = {}
"""When each phase of this process ended, since the epoch."""


def reached(phase: str) -> None:
    _reached_s.setdefault(phase, time.time())


class StartupReport(QObject):
    """Waits for the window's first paint and an idle event loop, then writes the time."""

    def __init__(self, window: QWidget, path: Path) -> None:
        super().__init__(window)
        self._path = path
        self._painted = False
        window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if not self._painted and event.type() == QEvent.Type.Paint:
            self._painted = True
            QTimer.singleShot(0, self, self._write)
        elif self._painted:
            watched.removeEventFilter(self)
        return False

    def _write(self) -> None:
        begun_s = _process_begun_s()
        reached("painting")
        phases = _phases_since(begun_s)
        heavy = sorted(
            {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy", "pyqtgraph", "httpx2"}
        )
        told = {"window_usable_s": round(sum(phases.values()), 4), "phases_s": phases, "heavy_modules": heavy}
        write_whole(self._path, json.dumps(told) + "\n")
        if os.environ.get(QUIT_VARIABLE) == "1":
            QApplication.quit()


def _process_begun_s() -> float:
    """Seconds since the epoch; those of psutil are up to one too early on Linux, which rounds the time of its start."""
    if sys.platform != "linux":
        return psutil.Process().create_time()
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _phases_since(begun_s: float) -> dict[str, float]:
    seconds, before_s = {}, begun_s
    for phase, now_s in _reached_s.items():
        seconds[phase], before_s = round(now_s - before_s, 4), now_s
    return seconds


def report_if_asked(window: QWidget) -> None:
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        StartupReport(window, Path(path))
