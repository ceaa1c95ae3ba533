"""GUI latency while answers stream, for `switchyard bench startup`.

The window prompts the loaded model, shows the answers as usual, and records the longest delay of a GUI event that
is due every few milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

from PySide6.QtCore import QObject, Qt, QTimer
from PySide6.QtWidgets import QApplication

from app.services.chat_store import Message, MessageState
from app.views.chat.chat_view import ChatView
from app.views.main_window import MainWindow
from app.widgets.page import CHAT
from engine.common.config import SamplingParams
from engine.common.files import write_whole
from engine.common.model_info import ModelInfo

TOKENS = 512
"""Tokens to stream in total; short answers are followed by further prompts."""
_EVERY_MS = 5
_QUESTION = "Write a long story about a railway yard, with a table of its tracks and a program that sorts the cars."


class StreamingReport(QObject):
    """Sends prompts until `TOKENS` have streamed, writes the figures and quits."""

    def __init__(self, window: MainWindow, path: Path) -> None:
        super().__init__(window)
        chat = window.page(CHAT)
        assert isinstance(chat, ChatView)
        self._presenter = chat.presenter
        self._path = path
        self._waits_ms: list[float] = []
        self._tokens = 0
        self._due = 0.0
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._note_wait)
        window.services.client.model_loaded.connect(self._begin)
        self._presenter.queue.changed.connect(self._on_answer)

    def _begin(self, _model: ModelInfo) -> None:
        sampling = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=7, max_tokens=TOKENS)
        self._presenter.set_sampling(sampling)
        self._due = perf_counter() + _EVERY_MS / 1000
        self._timer.start(_EVERY_MS)
        self._presenter.send(_QUESTION)

    def _note_wait(self) -> None:
        now = perf_counter()
        self._waits_ms.append(max(now - self._due, 0.0) * 1000)
        self._due = now + _EVERY_MS / 1000

    def _on_answer(self, answer: Message) -> None:
        if answer.state is MessageState.STREAMING:
            return
        self._tokens += answer.stats.generated_tokens if answer.stats is not None else 0
        if answer.stats is None:
            self._write(answer.reason)
        elif self._tokens < TOKENS:
            # Deferred: the page has not handled the end of this answer yet.
            QTimer.singleShot(0, self, lambda: self._presenter.send(_QUESTION))
        else:
            self._write("")

    def _write(self, error: str) -> None:
        self._timer.stop()
        report = {
            "tokens": self._tokens,
            "events": len(self._waits_ms),
            "longest_wait_ms": max(self._waits_ms, default=0.0),
            "error": error,
        }
        write_whole(self._path, json.dumps(report) + "\n")
        QApplication.quit()
