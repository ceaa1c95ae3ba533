"""The button that shows the simulator's timeline below the real one."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QPushButton, QWidget

from app.services.background import LatestTask
from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.predicted_timeline import (
    RequestShape,
    predict,
    request_before,
)
from app.services.session_library import OpenedSession
from app.services.telemetry_hub import TelemetryHub
from app.widgets.timeline.navigator import Navigator
from engine.common.config import EngineConfig
from engine.planner.predict import recorded_config, running_config
from engine.telemetry.lanes import DECODE
from engine.telemetry.messages import CacheReport


class PredictButton(QPushButton):
    """Checked while a prediction is shown: it then follows the visible request.

    Signals: `predicted(Predicted)`; `reported(str)`: why there is none; `unwanted`, once it is unchecked.
    """

    predicted = Signal(object)
    reported = Signal(str)
    unwanted = Signal()

    def __init__(
        self, client: EngineClient, hub: TelemetryHub, navigator: Navigator, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._client, self._hub, self._navigator = client, hub, navigator
        self._session: OpenedSession | None = None
        self._predicting = LatestTask(self)
        self._asked: RequestShape | None = None
        self.setText(self.tr("Predicted"))
        self.setProperty("kind", "chip")
        self.setCheckable(True)
        self.setToolTip(self.tr("The simulator's prediction for this request, below the recording"))
        self.setAccessibleName(self.tr("Show the predicted timeline"))
        self.toggled.connect(self._on_toggled)

    def show_session(self, session: OpenedSession | None) -> None:
        """What to predict: an opened session's requests, or with None the live ones."""
        self._session = session
        self.setChecked(False)

    def follow(self) -> None:
        """Predicts again if another request is visible; cheap if it is the same."""
        if self.isChecked() and not self._predicting.is_busy:
            shape = self._shape()
            if shape is not None and (self._asked is None or _differ(shape, self._asked)):
                self._ask(shape)

    def wait(self) -> None:
        self._predicting.close()

    def measured_tokens_per_s(self) -> float | None:
        """The visible request's decode speed."""
        history = self._navigator.history
        runs = history.last_request(self._navigator.viewport.end_ns) if history is not None else []
        decoded = [run for run in runs if run.phase == DECODE]
        took_ns = sum(run.end_ns - run.start_ns for run in decoded)
        return 1e9 * sum(run.tokens for run in decoded) / took_ns if took_ns else None

    def _on_toggled(self, wanted: bool) -> None:
        self._asked = None
        if not wanted:
            self._predicting.forget()
            self.unwanted.emit()
            return
        shape = self._shape()
        if shape is not None:
            self._ask(shape)
        else:
            self.reported.emit(self.tr("Nothing to predict yet: ask something in Chat first."))
            self.setChecked(False)

    def _shape(self) -> RequestShape | None:
        history: History | None = self._navigator.history
        request = request_before(history, self._navigator.viewport.end_ns) if history is not None else None
        config = self._config()
        return None if request is None or config is None else RequestShape(config[0], config[1], *request)

    def _config(self) -> tuple[EngineConfig, str] | None:
        if self._session is not None:
            about = self._session.about
            reports = [report for _, report in self._session.reports]
            return recorded_config(about, _slots(reports[-1] if reports else None)), str(about.get("model", ""))
        model = self._client.model
        if model is None:
            return None
        return running_config(model, self._client.config, _slots(self._hub.report)), model.name

    def _ask(self, shape: RequestShape) -> None:
        self._asked = shape
        self._predicting.ask(lambda: predict(shape), self.predicted.emit, self._on_failed)

    def _on_failed(self, error: Exception) -> None:
        reason = getattr(error, "message", None) or self.tr("the model's files could not be read")
        self.reported.emit(self.tr("No prediction: {0}").format(reason))
        self.setChecked(False)


def _differ(one: RequestShape, other: RequestShape) -> bool:
    """Whether they need separate predictions: an answer that grew within the same number of steps does not."""
    if (one.config, one.prompt_tokens) != (other.config, other.prompt_tokens):
        return True
    return one.tokens > 1.3 * other.tokens + 16


def _slots(report: CacheReport | None) -> int | None:
    tiers = report.tiers if report is not None else ()
    return next((tier.slots for tier in tiers if tier.tier == "vram"), None)
