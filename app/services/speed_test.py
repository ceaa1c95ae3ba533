"""Times a model with the settings as they are: loads it, has it write a little, and says how fast that was."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from app.services.engine_client import EngineClient
from app.services.engine_request import Request
from app.services.model_start import ModelStart
from engine.common.config import SamplingParams
from engine.protocol import ChatMessage, Failed, Finished, ModelLoaded, TerminalEvent

_PROMPT = "Tell a calm story about a lighthouse."
_TOKENS = 64


class SpeedTest(QObject):
    """Signals:
    began.
    ended(float, str): tokens per second, and what went wrong in a sentence; 0 and nothing if it was stopped.
    """

    began = Signal()
    ended = Signal(float, str)

    def __init__(self, client: EngineClient, start: ModelStart, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._client, self._start = client, start
        self._request: Request | None = None
        self._is_waiting = False
        start.loads.connect(self._on_loads)
        start.problem.connect(self._on_problem)

    @property
    def is_running(self) -> bool:
        return self._is_waiting or self._request is not None

    def start(self) -> None:
        """Loads the default model and times it; no effect while it does."""
        if not self.is_running:
            self._is_waiting = True
            self.began.emit()
            self._start.begin()

    def _on_loads(self, load: Request) -> None:
        if self._is_waiting:
            load.finished.connect(self._on_loaded)

    def _on_problem(self, sentence: str) -> None:
        if self._is_waiting:
            self._end(0.0, sentence)

    def _on_loaded(self, event: TerminalEvent) -> None:
        if not self._is_waiting:
            return
        if not isinstance(event, ModelLoaded):
            self._end(0.0, event.message if isinstance(event, Failed) else "")
            return
        self._is_waiting = False
        sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, seed=1)
        self._request = self._client.generate([ChatMessage("user", _PROMPT)], sampling)
        self._request.finished.connect(self._on_answered)

    def _on_answered(self, event: Finished | Failed) -> None:
        self._end(event.tokens_per_s if isinstance(event, Finished) else 0.0, getattr(event, "message", ""))

    def _end(self, tokens_per_s: float, problem: str) -> None:
        self._is_waiting, self._request = False, None
        self.ended.emit(tokens_per_s, problem)
