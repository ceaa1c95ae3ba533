"""Tuning in the engine process: a run on the engine thread, and the rate of its events."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.process.requests import RequestQueue
from engine.protocol import Event
from engine.tuning.messages import StartTuning, TuningFinished, TuningProgress
from engine.tuning.run import TunedEngine, TuningEvent, tune

_PROGRESS_S = 0.05
"""Least time between two progress events; results are always sent."""


def run_tuning(
    engine: TunedEngine, request: StartTuning, requests: RequestQueue, send: Callable[[Event], None]
) -> TuningFinished:
    """Runs until done or cancelled.

    Raises:
        EngineError: see `tune`.
    """
    sent_s = 0.0
    stage = ""

    def tell(event: TuningEvent) -> None:
        nonlocal sent_s, stage
        if isinstance(event, TuningProgress):
            is_news = event.stage != stage or (event.number is not None and event.stage == "measuring")
            if not is_news and time.monotonic() - sent_s < _PROGRESS_S:
                return
            stage, sent_s = event.stage, time.monotonic()
        send(event)

    return tune(engine, request, tell, lambda: requests.is_cancelled(request.request_id))
