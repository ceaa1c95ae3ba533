"""Receives what the engine records: decodes it, converts it to the window's clock and writes the session to disk."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal, SignalInstance

from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.telemetry.messages import CacheReport, ExpertMap, RequestPlace, TelemetryCounters, TelemetrySpans

if TYPE_CHECKING:
    from engine.hardware.sensors import SensorSample
    from engine.telemetry.records import Records

_log = logging.getLogger("switchyard.telemetry")

MOST_WAITING = 2000
"""Messages queued for the thread; more are dropped and counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One message's records, on the window's clock; arrays are read-only.

    Attributes:
        spans, steps: None if the message had none.
        clock_jumped: whether the engine's clock was set since the previous message.
    """

    at_ns: int
    spans: Records | None = None
    steps: Records | None = None
    clock_jumped: bool = False


class HistoryRecorder(QObject):
    """Queues messages for a thread, and emits the results as signals.

    Clocks and the session's file are private to the thread.

    Signals:
        ready(): the thread has imported what a history needs (numpy), and runs.
        recorded(Recorded): one per message with spans or steps, in order.
        failed(str): the session is no longer written, for this reason.
    """

    ready = Signal()
    recorded = Signal(object)
    failed = Signal(str)
    _ready_there = Signal()
    _recorded_there = Signal(object)
    _failed_there = Signal(str)
    _lost_there = Signal()
    """For the thread; the public signals are emitted on the GUI's, where receivers disconnect safely."""

    def __init__(self, parent: QObject | None = None, *, is_on: bool = True) -> None:
        super().__init__(parent)
        self._inbox: queue.SimpleQueue[Callable[[_ThreadState], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.dropped = 0
        """Messages dropped so far."""
        self._ready_there.connect(self.ready)
        self._recorded_there.connect(self.recorded)
        self._failed_there.connect(self.failed)
        self._lost_there.connect(self._count_lost)
        self.write_sessions(is_on)

    @property
    def waiting(self) -> int:
        return self._inbox.qsize()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the session on disk is complete when this returns."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def take(self, message: object, at_ns: int) -> None:
        """Queues a telemetry message of the engine that arrived at this time."""
        if self.waiting >= MOST_WAITING and isinstance(message, TelemetrySpans | TelemetryCounters):
            self.dropped += 1
        else:
            self._inbox.put(lambda state: state.take(message, at_ns))

    def take_sample(self, sample: SensorSample, at_ns: int) -> None:
        self._inbox.put(lambda state: state.take_sample(sample, at_ns))

    def begin_session(self, model: ModelInfo | None, config: EngineConfig | None = None) -> None:
        """Starts a session for this model, or for an engine without any, whose requests other servers answer."""
        about = {} if model is None else _about(model, config)
        self._inbox.put(lambda state: state.session.begin(about))

    def write_sessions(self, on: bool) -> None:
        self._inbox.put(lambda state: state.write_sessions(on))

    def _count_lost(self) -> None:
        self.dropped += 1

    def _run(self) -> None:
        import app.services.history.history  # noqa: F401  # imports numpy here, not on the GUI thread

        state = _ThreadState(
            lambda made: self._emit(self._recorded_there, made), lambda reason: self._emit(self._failed_there, reason)
        )
        self._emit(self._ready_there)
        while (work := self._inbox.get()) is not None:
            try:
                work(state)
            except EngineError:  # these records are invalid; others may be fine
                self._emit(self._lost_there)
            except Exception:
                _log.exception("a telemetry message could not be handled")
        state.session.end()

    def _emit(self, signal: SignalInstance, *values: object) -> None:
        try:
            signal.emit(*values)
        except RuntimeError:
            _log.info("the window has been deleted")


class _ThreadState:
    def __init__(self, recorded: Callable[[Recorded], None], failed: Callable[[str], None]) -> None:
        from app.services.history.history import ClockAlignment
        from app.services.session_recording import SessionRecording
        from engine.common.paths import sessions_dir

        self._recorded = recorded
        self._clock = ClockAlignment()
        self.session = SessionRecording(sessions_dir(), failed)

    def write_sessions(self, on: bool) -> None:
        self.session.is_on = on
        if not on:
            self.session.end()

    def take(self, message: object, at_ns: int) -> None:
        if isinstance(message, TelemetrySpans):
            self._take_spans(message, at_ns)
        elif isinstance(message, TelemetryCounters):
            self._take_steps(message, at_ns)
        elif isinstance(message, CacheReport):
            self.session.report(at_ns, message)
        elif isinstance(message, ExpertMap):
            self.session.expert_map(at_ns, message)
        elif isinstance(message, RequestPlace):
            self.session.place(at_ns, message)

    def take_sample(self, sample: SensorSample, at_ns: int) -> None:
        from app.services.history.gauges import gauges_of

        self.session.sample(at_ns, gauges_of(sample))

    def _take_spans(self, message: TelemetrySpans, at_ns: int) -> None:
        from engine.telemetry.records import SPAN, unpack

        jumped = self._clock.observe(message.clock_ns, at_ns)
        self.session.clock(message.clock_ns + self._clock.shift_ns, message.wall_s)
        spans = self._clock.aligned(unpack(message.packed, SPAN), at_ns)
        spans.flags.writeable = False
        self._recorded(Recorded(at_ns, spans=spans, clock_jumped=jumped))
        self.session.spans(spans)

    def _take_steps(self, message: TelemetryCounters, at_ns: int) -> None:
        from engine.telemetry.records import STEP, unpack

        steps = self._clock.aligned(unpack(message.packed, STEP), at_ns)
        steps.flags.writeable = False
        self._recorded(Recorded(at_ns, steps=steps))
        self.session.steps(steps)


def _about(model: ModelInfo, config: EngineConfig | None) -> dict[str, Any]:
    return {
        "model": model.name,
        "device": model.device,
        "precision": model.precision,
        "threads": model.threads,
        "layers": model.layers,
        "experts": model.experts,
        "experts_per_token": model.experts_per_token,
        "config": {} if config is None else dataclasses.asdict(config),
    }
