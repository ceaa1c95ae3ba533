"""Where rows of a job may be answered, and how long that will take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.batch_files.messages import EndpointKey
from engine.common.config import BatchJob, EngineConfig
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, saved_endpoints
from engine.remote.keys import key_of_this_run
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
        """Cancels the question."""
        self._asked = None
        self._task.forget()

    def close(self) -> None:
        """As `forget`, and waits for a running forecast."""
        self._asked = None
        self._task.close()


def has_ray() -> bool:
    """Whether jobs can be given to a Ray cluster: it is installed if somebody wanted that."""
    return importlib.util.find_spec("ray") is not None


def on_each_node(config: EngineConfig | None, job: BatchJob) -> EngineConfig | None:
    """How a cluster runs a job's model; limits of this PC are not those of its nodes."""
    if config is None or not job.ray:
        return None
    return EngineConfig(config.model, precision=config.precision, kv_precision=config.kv_precision)


def offered_endpoints() -> tuple[Endpoint, ...]:
    """Those that people added; none if the list cannot be read, which Settings explains."""
    try:
        return saved_endpoints()
    except EngineError:
        return ()


def keys_for(job: BatchJob) -> tuple[EndpointKey, ...]:
    """Keys that were given to this window and are kept nowhere, of the endpoints that a job names."""
    if not job.is_remote:
        return ()
    named = [endpoint for endpoint in offered_endpoints() if endpoint.name in job.endpoints]
    return tuple(EndpointKey(each.name, key) for each in named if (key := key_of_this_run(each)))
