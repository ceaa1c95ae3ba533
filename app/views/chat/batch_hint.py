"""A line in the chat while a batch job runs, or was stopped by the engine's end: chats have priority."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import BatchRun
from app.widgets.chip import Dot, ElidedLabel
from app.widgets.quantities import percent
from app.widgets.scaffold import hbox, push_button
from engine.batch_files.messages import BatchFinished, BatchProgress
from engine.common.errors import ErrorCode
from engine.protocol import Failed


class BatchHint(QWidget):
    """Follows the engine; visible only while a job runs, or stays paused because the engine stopped.

    Signals: `opened`, to show the job.
    """

    opened = Signal()

    def __init__(self, client: EngineClient, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._is_running = False
        self._share: float | None = None
        self._is_left = False
        self._dot = Dot(self, "cpu")
        self._words = ElidedLabel(self, role="secondary")
        self.button = push_button(self, self.tr("Show job"), self._on_opened, kind="quiet")
        self.button.setProperty("compact", "true")
        hbox(self._dot, (self._words, 1), self.button, into=self, margins=(4, 0, 0, 4))
        client.batch_began.connect(self._follow)
        client.state_changed.connect(self._refresh)
        self.hide()

    @property
    def text(self) -> str:
        return self._words.full_text

    def _follow(self, run: BatchRun) -> None:
        run.progressed.connect(self._on_progressed)
        run.finished.connect(self._on_finished)

    def _on_progressed(self, event: BatchProgress) -> None:
        self._is_running, self._is_left = True, False
        self._share = min(1.0, event.done / event.total) if event.total > 0 else None
        self._refresh()

    def _on_finished(self, event: BatchFinished | Failed) -> None:
        was_running, self._is_running = self._is_running, False
        if was_running:
            self._is_left = isinstance(event, Failed) and event.code is ErrorCode.ENGINE_DIED
            self._refresh()

    def _on_opened(self) -> None:
        self._is_left = False
        self._refresh()
        self.opened.emit()

    def _refresh(self, *_: object) -> None:
        self.setVisible(self._is_running or self._is_left)
        if self._is_left:
            self._words.set_full_text(
                self.tr("The engine stopped, so the batch job is paused; no answered row is lost.")
            )
        if not self._is_running:
            return
        share = "" if self._share is None else f" ({percent(self._share)})"
        if self._client.state is EngineState.BUSY:
            words = self.tr(
                "The batch job{0} shares the engine with your chat: both are slower until the answer is complete."
            )
        else:
            words = self.tr("A batch job is running{0}. Your chats share the engine with it and come first.")
        self._words.set_full_text(words.format(share))
