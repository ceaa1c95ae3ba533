"""The window that `switchyard bench monitor` measures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time, thread_time

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtWidgets import QApplication

from app.main import main
from app.views.main_window.window import MainWindow
from app.widgets.page import MONITOR
from engine.common.config import SamplingParams
from engine.common.files import write_whole
from engine.common.model_info import ModelInfo
from engine.protocol import ChatMessage, Failed, Finished

_TOKENS = 4000
_EVERY_MS = 5
_QUESTION = "Write a long story about a railway yard, with a table of its tracks and a program that sorts the cars."


class MonitorReport(QObject):
    def __init__(self, window: MainWindow, path: Path, seconds: float) -> None:
        super().__init__(window)
        self._window, self._path, self._seconds = window, path, seconds
        self._client = client = window.services.client
        self._waits_s: list[float] = []
        self._works_s: list[float] = []
        self._due_s = self._worked_s = self._began_s = self._spent_s = 0.0
        self._share = 0.0
        self._ticking = QTimer(self)
        self._ticking.setTimerType(Qt.TimerType.PreciseTimer)
        self._ticking.timeout.connect(self._note_wait)
        client.model_loaded.connect(self._begin)

    def _begin(self, _model: ModelInfo) -> None:
        self._window.services.settings.monitor_details = True
        self._window.show_page(MONITOR)
        self._ask()
        QTimer.singleShot(round(1000 * self._seconds), self, self._begin_share)

    def _ask(self) -> None:
        sampling = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=7, max_tokens=_TOKENS)
        answer = self._client.generate([ChatMessage("user", _QUESTION)], sampling)
        answer.finished.connect(self._on_finished)

    def _begin_share(self) -> None:
        self._began_s, self._spent_s = perf_counter(), process_time()
        QTimer.singleShot(round(500 * self._seconds), self, self._begin_waits)

    def _begin_waits(self) -> None:
        self._share = (process_time() - self._spent_s) / (perf_counter() - self._began_s)
        self._due_s, self._worked_s = perf_counter() + _EVERY_MS / 1000, thread_time()
        self._ticking.start(_EVERY_MS)
        QTimer.singleShot(round(500 * self._seconds), self, lambda: self._write(""))

    def _note_wait(self) -> None:
        now_s, worked_s = perf_counter(), thread_time()
        self._waits_s.append(max(now_s - self._due_s, 0.0))
        self._works_s.append(worked_s - self._worked_s)
        self._due_s, self._worked_s = now_s + _EVERY_MS / 1000, worked_s

    def _on_finished(self, event: Finished | Failed) -> None:
        if isinstance(event, Failed):
            self._write(event.message)
        else:
            QTimer.singleShot(0, self, self._ask)

    def _write(self, error: str) -> None:
        self._ticking.stop()
        report = self._window.services.telemetry.report
        document = {
            "share_of_a_core": self._share,
            "events": len(self._waits_s),
            "longest_wait_ms": 1000 * max(self._waits_s, default=0.0),
            "longest_work_ms": 1000 * max(self._works_s, default=0.0),
            "tokens_per_s": report.steps_per_s if report is not None else 0.0,
            "error": error,
        }
        write_whole(self._path, json.dumps(document) + "\n")
        QApplication.quit()


def _begin(window: MainWindow) -> None:
    MonitorReport(
        window, Path(os.environ["SWITCHYARD_MONITOR_REPORT"]), float(os.environ["SWITCHYARD_MONITOR_SECONDS"])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[:1], _begin))
