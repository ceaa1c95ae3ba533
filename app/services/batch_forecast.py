"""Forecasts of a batch job, made off the GUI thread while its form is filled in."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.tuning.batch_forecast import Forecast, ForecastQuestion, forecast_of

_DEBOUNCE_MS = 250


class BatchForecasts(QObject):
    """Answers the last question asked; one that another has overtaken is left out.

    Signals:
        told: a `Forecast`, or None if nothing can be said.
    """

    told = Signal(object)

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
        """Predicts a moment later, so that who types asks once; the same question is not answered twice."""
        if question != self._asked:
            self._asked = question
            told = self.told.emit
            self._task.ask(lambda: self._forecast(question), told, lambda _error: told(None))

    def forget(self) -> None:
        """Nobody wants to know any more."""
        self._asked = None
        self._task.forget()

    def close(self) -> None:
        """As `forget`, and waits for what is under way."""
        self._asked = None
        self._task.close()
