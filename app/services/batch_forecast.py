"""Forecasts for the form of a batch job, made off the GUI thread."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.tuning.batch_forecast import Forecast, ForecastQuestion, forecast_of

_DEBOUNCE_MS = 250


class BatchForecasts(QObject):
    """Answers the latest question; superseded ones are dropped.

    Signals:
        answered: a `Forecast`, or None if none is possible.
    """

    answered = Signal(object)

    def __init__(
        self,
        parent: QObject | None = None,
        *,
        forecast: Callable[[ForecastQuestion], Forecast | None] | None = None,
    ) -> None:
        super().__init__(parent)
        self._forecast = forecast or forecast_of
        self._asked: ForecastQuestion | None = None
        self._task = LatestTask(self, after_ms=_DEBOUNCE_MS)

    def ask(self, question: ForecastQuestion) -> None:
        """Forecasts after a short delay, so that typing asks only once; the same question is not answered twice."""
        if question != self._asked:
            self._asked = question
            answered = self.answered.emit
            self._task.ask(lambda: self._forecast(question), answered, lambda _error: answered(None))

    def forget(self) -> None:
        self._asked = None
        self._task.forget()

    def close(self) -> None:
        self._asked = None
        self._task.close()
