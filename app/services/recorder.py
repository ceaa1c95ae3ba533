"""Takes what the engine records: unpacks it, brings it onto the window's clock and writes the session to disk."""

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
from engine.telemetry.messages import CacheReport, ExpertMap, TelemetryCounters, TelemetrySpans

if TYPE_CHECKING:
    from engine.hardware.sensors import SensorSample
    from engine.telemetry.records import Records

_log = logging.getLogger("switchyard.telemetry")

MOST_WAITING = 2000
"""Messages that the thread has not taken yet; more are dropped and counted."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What one message held, on the window's clock; its arrays are read-only.

    Attributes:
        spans, steps: None where the message had none.
        clock_jumped: whether the engine's clock was set since the message before.
    """

    at_ns: int
    spans: Records | None = None
    steps: Records | None = None
    clock_jumped: bool = False


class Recorder(QObject):
    """Everything that comes in is put into the thread's queue, and what it makes of it comes out as signals.

    The thread has its own state, which nobody else sees: clocks and the session's file.

    Signals:
        ready(): the thread has loaded what a history needs (numpy), and works.
        recorded(Recorded): one for each message of spans or steps, in their order.
        failed(str): the session is no longer written, because of this.
    """

    ready = Signal()
    recorded = Signal(object)
    failed = Signal(str)
    _ready_there = Signal()
    _recorded_there = Signal(object)
    _failed_there = Signal(str)
    _lost_there = Signal()
    """On the thread.  What is public is emitted on the GUI's: whoever connects may be gone before an event arrives."""

    def __init__(self, parent: QObject | None = None, *, is_on: bool = True) -> None:
        super().__init__(parent)
        self._inbox: queue.SimpleQueue[Callable[[_Desk], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self.dropped = 0
        """Messages that were lost since it began."""
        self._ready_there.connect(self.ready)
        self._recorded_there.connect(self.recorded)
        self._failed_there.connect(self.failed)
        self._lost_there.connect(self._count_lost)
        self.write_sessions(is_on)

    @property
    def waiting(self) -> int:
        """Messages that the thread has not taken yet."""
        return self._inbox.qsize()

    def start(self) -> None:
        """Begins, with what has come already; once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; the session on disk is whole when this returns."""
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def take(self, message: object, at_ns: int) -> None:
        """A message of the engine's telemetry that came at this moment."""
        if self.waiting >= MOST_WAITING and isinstance(message, TelemetrySpans | TelemetryCounters):
            self.dropped += 1
        else:
            self._inbox.put(lambda desk: desk.take(message, at_ns))

    def take_sample(self, sample: SensorSample, at_ns: int) -> None:
        """A sample of the sensors."""
        self._inbox.put(lambda desk: desk.take_sample(sample, at_ns))

    def begin_session(self, model: ModelInfo, config: EngineConfig | None) -> None:
        """What comes from now on is of this model."""
        self._inbox.put(lambda desk: desk.session.begin(_about(model, config)))

    def end_session(self) -> None:
        """The engine has ended."""
        self._inbox.put(lambda desk: desk.session.end())

    def write_sessions(self, on: bool) -> None:
        """Whether sessions are written to disk from now on."""
        self._inbox.put(lambda desk: desk.write_sessions(on))

    def _count_lost(self) -> None:
        self.dropped += 1

    def _run(self) -> None:
        import app.services.history.history  # noqa: F401  # loads numpy here, not on the GUI's thread

        desk = _Desk(
            lambda made: self._emit(self._recorded_there, made), lambda reason: self._emit(self._failed_there, reason)
        )
        self._emit(self._ready_there)
        while (work := self._inbox.get()) is not None:
            try:
                work(desk)
            except EngineError:  # its records are not records; the others are
                self._emit(self._lost_there)
            except Exception:
                _log.exception("telemetry was not understood")
        desk.session.end()

    def _emit(self, signal: SignalInstance, *values: object) -> None:
        try:
            signal.emit(*values)
        except RuntimeError:
            _log.info("the window is gone")


class _Desk:
    """What the recorder's thread works with."""

    def __init__(self, tell: Callable[[Recorded], None], failed: Callable[[str], None]) -> None:
        from app.services.history.clock import ClockAlignment
        from app.services.session_recording import SessionRecording
        from engine.common.paths import sessions_dir

        self._tell = tell
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

    def take_sample(self, sample: SensorSample, at_ns: int) -> None:
        from app.services.history.gauges import gauges_of

        self.session.sample(at_ns, gauges_of(sample))

    def _take_spans(self, message: TelemetrySpans, at_ns: int) -> None:
        from engine.telemetry.records import SPAN, unpack

        jumped = self._clock.observe(message.clock_ns, at_ns)
        self.session.clock(message.clock_ns + self._clock.shift_ns, message.wall_s)
        spans = self._clock.aligned(unpack(message.packed, SPAN), at_ns)
        spans.flags.writeable = False
        self._tell(Recorded(at_ns, spans=spans, clock_jumped=jumped))
        self.session.spans(spans)

    def _take_steps(self, message: TelemetryCounters, at_ns: int) -> None:
        from engine.telemetry.records import STEP, unpack

        steps = self._clock.aligned(unpack(message.packed, STEP), at_ns)
        steps.flags.writeable = False
        self._tell(Recorded(at_ns, steps=steps))
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
