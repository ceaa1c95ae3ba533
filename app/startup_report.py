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
        seconds = time.time() - psutil.Process(os.getpid()).create_time()
        heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy"})
        write_whole(self._path, json.dumps({"window_usable_s": round(seconds, 4), "heavy_modules": heavy}) + "\n")
        if os.environ.get(QUIT_VARIABLE) == "1":
            QApplication.quit()


def report_if_asked(window: QWidget) -> None:
    """Measures if `SWITCHYARD_STARTUP_REPORT` names a file."""
    path = os.environ.get(REPORT_VARIABLE)
    if path:
        StartupReport(window, Path(path))
