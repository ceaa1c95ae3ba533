"""The Monitor's data: the history, the latest reports, and what the last tokens waited for.

On the GUI thread only.  Slow work is done by `HistoryRecorder`, `Analyser` and `DeviceMonitor`, which send their
results by signals, as immutable messages.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal, SignalInstance

from app.services.analyser import Analyser, Findings, Machine
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient, EngineState
from app.services.settings import Settings
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.hardware.sensors import SensorSample
from engine.protocol import CacheReport, ExpertMap, RequestPlace, TelemetryCounters, TelemetrySpans

if TYPE_CHECKING:
    from app.services.history.history import History
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


_PULSE_S = 10.0
"""How often the expert map is requested for the recording while no page shows it."""


class TelemetryHub(QObject):
    """Widgets read it when they paint.  Costs nothing until `start`: the recorder's thread imports numpy.

    Attributes:
        history: None until `ready`.
        report, experts: the engine's latest; None once it has ended.
        sample: the sensors' latest.
        findings: of the last analysis.

    Signals:
        ready(): `history` can be read from now on.
        problem(str): a sentence for the user.
        analysed(): `findings` are new.
    """

    ready = Signal()
    problem = Signal(str)
    analysed = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        devices: DeviceMonitor,
        parent: QObject | None = None,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(parent)
        self._client, self._settings, self.devices, self._clock_ns = client, settings, devices, clock_ns
        self.history: History | None = None
        self.report: CacheReport | None = None
        self.experts: ExpertMap | None = None
        self.sample: SensorSample | None = None
        self.findings: Findings | None = None
        self.recorder = HistoryRecorder(self, is_on=self.is_recording)
        self._analyser = Analyser(clock_ns, self)
        self._marks: list[tuple[int, str]] = []
        """Events from before the history was ready."""
        self._places: dict[int, str] = {}
        """Shared with the history."""
        self._started = self._closed = False
        self._watchers: set[object] = set()
        self._map_watchers: set[object] = set()
        self._pulse_due_s = 0.0
        self.recorder.ready.connect(self._on_ready)
        self.recorder.recorded.connect(self._on_recorded)
        self.recorder.failed.connect(self._on_disk_trouble)
        self._analyser.analysed.connect(self._on_analysed)

    def start(self) -> None:
        if self._started or self._closed:
            return
        self._started = True
        self._client.recorded.connect(self._on_message)
        self._client.state_changed.connect(self._on_state)
        self._client.model_loaded.connect(self._on_model)
        self._settings.changed.connect(self._on_setting)
        self.devices.sampled.connect(self._on_sample)
        self._watch()
        if self._client.model is not None:
            self._on_model(self._client.model)
        else:
            self.recorder.begin_session(None)
        self.recorder.start()
        self.devices.start()

    def close(self) -> None:
        if self._started and not self._closed:
            self._client.recorded.disconnect(self._on_message)
            self._client.state_changed.disconnect(self._on_state)
            self._client.model_loaded.disconnect(self._on_model)
            self._settings.changed.disconnect(self._on_setting)
            self.devices.sampled.disconnect(self._on_sample)
        self._closed = True
        self.devices.stop()
        self.recorder.close()
        self._analyser.close()

    @property
    def is_recording(self) -> bool:
        return self._settings.record_sessions

    def subscribe(self, subscriber: object, *, experts: bool = False) -> None:
        """Keeps figures up to date for `subscriber`, a visible widget; `experts` includes the expert map."""
        self._watchers.add(subscriber)
        (self._map_watchers.add if experts else self._map_watchers.discard)(subscriber)
        self._watch()
        self._analyser.hurry()  # analyse earlier tokens at once, not with the next one
        self._analyse()

    def unsubscribe(self, subscriber: object) -> None:
        self._watchers.discard(subscriber)
        self._map_watchers.discard(subscriber)
        self._watch()

    def _watch(self) -> None:
        if self._started:
            on = bool(self._watchers) or self.is_recording
            self._client.watch_telemetry(on=on, expert_map=on and bool(self._map_watchers))

    # --- events of the engine and the sensors -----------------------------------------------------

    def _on_message(self, message: object) -> None:
        now_ns = self._clock_ns()
        if isinstance(message, ExpertMap):
            self.experts = message
            if not self._map_watchers:
                self._client.watch_telemetry(on=True, expert_map=False)  # one map is enough for now
        elif isinstance(message, CacheReport):
            self.report = message
            if not self._map_watchers and self.is_recording and now_ns / 1e9 >= self._pulse_due_s:
                self._pulse_due_s = now_ns / 1e9 + _PULSE_S
                self._client.watch_telemetry(on=True, expert_map=True)
        elif isinstance(message, RequestPlace):
            self._places[message.number] = message.place
        self.recorder.take(message, now_ns)

    def _on_sample(self, sample: SensorSample) -> None:
        self.sample = sample
        now_ns = self._clock_ns()
        if self.history is not None:
            self.history.add_sample(now_ns, sample)
        self.recorder.take_sample(sample, now_ns)
        self._analyse()  # the last tokens may have arrived within the interval after the previous analysis

    def _on_model(self, model: ModelInfo) -> None:
        self._mark(self._clock_ns(), self.tr("{0} loaded").format(model.name))
        self.recorder.begin_session(model, self._client.config)

    def _on_state(self, state: EngineState) -> None:
        if state in (EngineState.DIED, EngineState.STOPPED):
            self.report = self.experts = None
            died = state is EngineState.DIED
            text = self.tr("The engine ended unexpectedly") if died else self.tr("The engine ended")
            self._mark(self._clock_ns(), text)
            self.recorder.begin_session(None)  # ends the one before; the next engine may be asked for no model

    def _on_setting(self, key: str) -> None:
        if key == "record_sessions":
            self._watch()
            self.recorder.write_sessions(self.is_recording)

    # --- results of the recorder and the analyser -------------------------------------------------

    def _on_ready(self) -> None:
        from app.services.history.history import History

        self.history = History()
        self.history.places = self._places
        for mark in self._marks:
            self.history.add_mark(*mark)
        self._marks.clear()
        self.ready.emit()

    def _on_recorded(self, recorded: Recorded) -> None:
        history = self.history
        if history is None:
            return
        if recorded.clock_jumped and history.has_engine:
            self._mark(recorded.at_ns, self.tr("The engine's clock jumped"))
        if recorded.spans is not None:
            history.add_spans(recorded.spans)
        if recorded.steps is not None:
            history.add_steps(recorded.steps)
            self._analyser.note_news()
            self._analyse()

    def _analyse(self) -> None:
        if self.history is not None and self._watchers and not self._closed:
            machine = Machine(self._client.model, self._client.config, self.report, self.sample)
            self._analyser.analyse(self.history, machine)

    def _on_analysed(self, findings: Findings) -> None:
        self.findings = findings
        self.analysed.emit()

    def _on_disk_trouble(self, reason: str) -> None:
        words = self.tr("The session is no longer recorded: its file could not be written ({0}).")
        self.problem.emit(words.format(reason))

    def _mark(self, at_ns: int, text: str) -> None:
        if self.history is not None:
            self.history.add_mark(at_ns, text)
        else:
            self._marks.append((at_ns, text))
