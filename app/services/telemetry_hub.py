"""Receives what the engine records and what the machine's sensors say, off the GUI thread, and keeps it.

Costs nothing until `start`: numpy and the drivers are loaded by its own thread.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal

from app.services.engine_client import EngineClient, EngineState
from app.services.settings import Settings
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.telemetry.messages import CacheReport, ExpertMap, TelemetryCounters, TelemetryRequest, TelemetrySpans

if TYPE_CHECKING:
    from app.services.device_sampler import DeviceSampler
    from app.services.history.history import History
    from app.services.session_recording import SessionRecording
    from engine.hardware.sensors import SensorSample
    from engine.telemetry.advice import Advice
    from engine.telemetry.analysis import Waiting

_log = logging.getLogger("switchyard.telemetry")

RECORD_SETTING = "record_sessions"
MOST_WAITING = 2000
"""Messages that nobody has taken yet; more are dropped and counted."""
WAITING_TOKENS = 200
_ANALYSE_EVERY_S, _ANALYSE_FIRST_EVERY_S = 8.0, 1.0
_LOOKED = "looked"
"""In the queue: somebody has come to look."""
_PULSE_S = 10.0
"""So often the map of experts is asked for while nobody looks at it, for the recording."""


class TelemetryHub(QObject):
    """The past and the latest word of everything; what is shown reads it when it is painted.

    Signals:
        ready(): the past can be read from now on, through `history`.
        problem(str): a sentence for the user.
        analysed(): `waiting` and `advice` are new.
    """

    ready = Signal()
    problem = Signal(str)
    analysed = Signal()

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        parent: QObject | None = None,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__(parent)
        self._client, self._settings, self._clock_ns = client, settings, clock_ns
        self.history: History | None = None
        self.report: CacheReport | None = None
        self.experts: ExpertMap | None = None
        self.sample: SensorSample | None = None
        self.waiting: Waiting | None = None
        self.advice: Advice | None = None
        self.dropped = 0
        """Spans and messages that were lost since the engine began to record."""
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._sampler: DeviceSampler | None = None
        self._recording: SessionRecording | None = None
        self._watchers: set[object] = set()
        self._map_watchers: set[object] = set()
        self._pulse_due_s = 0.0
        self._model: ModelInfo | None = None
        self._config: EngineConfig | None = None
        self._analyse_due_s = 0.0
        self._unanalysed = False

    # --- on the GUI's thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Begins to listen and to sample; without effect if it has, or after `close`."""
        if self._thread is not None or self._closed:
            return
        self._thread = threading.Thread(target=self._run, name="telemetry-hub", daemon=True)
        self._client.recorded.connect(self._on_recorded)
        self._client.state_changed.connect(self._on_state)
        self._client.model_loaded.connect(self._on_model)
        self._settings.changed.connect(self._on_setting)
        self._model, self._config = self._client.model, self._client.config
        self._watch()
        if self._model is not None:
            self._put(self._model)
        self._thread.start()

    def close(self) -> None:
        """Ends its threads; the session on disk is whole when this returns."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)
            self._client.recorded.disconnect(self._on_recorded)
            self._client.state_changed.disconnect(self._on_state)
            self._client.model_loaded.disconnect(self._on_model)
            self._settings.changed.disconnect(self._on_setting)
            self._thread = None

    @property
    def is_recording(self) -> bool:
        """Whether sessions are written to disk."""
        return self._settings.get(RECORD_SETTING, default=True)

    def look(self, who: object, *, experts: bool = False) -> None:
        """`who` is on the screen from now on, and wants fresh figures; also the map of experts."""
        self._watchers.add(who)
        (self._map_watchers.add if experts else self._map_watchers.discard)(who)
        self._watch()
        self._put(_LOOKED)  # what was decoded before is told at once, not with the next token

    def look_away(self, who: object) -> None:
        """`who` is no longer on the screen."""
        self._watchers.discard(who)
        self._map_watchers.discard(who)
        self._watch()

    def _watch(self) -> None:
        if self._thread is None:
            return
        if self._sampler is not None:
            self._sampler.is_watched = bool(self._watchers)
        on = bool(self._watchers) or self.is_recording
        self._client.watch_telemetry(on=on, expert_map=on and bool(self._map_watchers))

    def _on_recorded(self, message: object) -> None:
        if isinstance(message, ExpertMap) and not self._map_watchers:
            self._client.watch_telemetry(on=True, expert_map=False)  # the pulse has been answered
        elif isinstance(message, CacheReport) and not self._map_watchers and self.is_recording:
            now_s = self._clock_ns() / 1e9
            if now_s >= self._pulse_due_s:
                self._pulse_due_s = now_s + _PULSE_S
                self._client.watch_telemetry(on=True, expert_map=True)
        self._put(message)

    def _on_state(self, state: EngineState) -> None:
        if state in (EngineState.DIED, EngineState.STOPPED):
            self.report = self.experts = None
            self._put(state)

    def _on_model(self, model: ModelInfo) -> None:
        self._model, self._config = model, self._client.config
        self._put(model)

    def _on_setting(self, key: str) -> None:
        if key == RECORD_SETTING:
            self._watch()
            self._put(key)

    def _put(self, item: object) -> None:
        if self._queue.qsize() >= MOST_WAITING and isinstance(item, TelemetrySpans | TelemetryCounters):
            self.dropped += 1
            return
        self._queue.put((self._clock_ns(), item))

    # --- on the thread of the hub -----------------------------------------------------------------

    def _run(self) -> None:
        from app.services.device_sampler import DeviceSampler
        from app.services.history.clock import ClockAlignment
        from app.services.history.history import History
        from app.services.session_recording import SessionRecording
        from engine.common.paths import sessions_dir

        self.history, clock = History(), ClockAlignment()
        self._recording = SessionRecording(sessions_dir(), self._tell_disk)
        self._recording.is_on = self.is_recording
        self._sampler = DeviceSampler(sessions_dir(), self._put)
        self._sampler.is_watched = bool(self._watchers)
        self._sampler.start()
        self._emit(self.ready)
        while (item := self._queue.get()) is not None:
            try:
                self._take(*item, clock)
            except EngineError:  # records that are none: these are lost, not the others
                self.dropped += 1
            except Exception:
                _log.exception("telemetry was not understood")
        self._sampler.close()
        self._recording.end()

    def _take(self, now_ns: int, item: object, clock: Any) -> None:
        from engine.telemetry.records import SPAN, STEP, unpack

        history, recording = self.history, self._recording
        if history is None or recording is None:
            return
        if isinstance(item, TelemetrySpans):
            if clock.heard(item.clock_ns, now_ns) and history.has_engine:
                history.add_mark(now_ns, self.tr("The engine's clock jumped"))
            recording.clock(item.clock_ns + clock.shift_ns, item.wall_s)
            spans = clock.aligned(unpack(item.packed, SPAN), now_ns)
            history.add_spans(spans)
            recording.spans(spans)
        elif isinstance(item, TelemetryCounters):
            steps = clock.aligned(unpack(item.packed, STEP), now_ns)
            history.add_steps(steps)
            recording.steps(steps)
            self._unanalysed = True
            self._analyse()
        elif isinstance(item, TelemetryRequest):
            pass  # answers are not told apart by name here: a request's number is in its spans
        elif isinstance(item, CacheReport):
            self.report = item
            recording.report(now_ns, item)
        elif isinstance(item, ExpertMap):
            self.experts = item
            recording.expert_map(now_ns, item)
        elif isinstance(item, ModelInfo):
            history.add_mark(now_ns, self.tr("{0} loaded").format(item.name))
            recording.begin(_about(item, self._config))
        elif isinstance(item, EngineState):
            died = item is EngineState.DIED
            history.add_mark(now_ns, self.tr("The engine ended unexpectedly") if died else self.tr("The engine ended"))
            recording.end()
        elif item == _LOOKED:
            self._unanalysed, self._analyse_due_s = True, 0.0
            self._analyse()
            self._analyse_due_s = 0.0  # the next tokens are news all the same
        elif item == RECORD_SETTING:
            recording.is_on = self.is_recording
            if not recording.is_on:
                recording.end()
        else:
            self._take_sample(now_ns, item)

    def _take_sample(self, now_ns: int, item: Any) -> None:
        from app.services.history.gauges import gauges_of

        if self.history is not None and self._recording is not None:
            self.sample = item
            self.history.add_sample(now_ns, item)
            self._recording.sample(now_ns, gauges_of(item))
            self._analyse()  # the last tokens of an answer may have come too soon after those before them

    def _analyse(self) -> None:
        from app.services.waiting import advice_for, waiting_for_last

        now_s = self._clock_ns() / 1e9
        if self.history is None or not self._watchers or not self._unanalysed or now_s < self._analyse_due_s:
            return
        self._unanalysed = False
        self.waiting = waiting_for_last(self.history, WAITING_TOKENS)
        is_full = self.waiting.tokens >= WAITING_TOKENS  # few tokens take little time, and each is news
        self._analyse_due_s = now_s + (_ANALYSE_EVERY_S if is_full else _ANALYSE_FIRST_EVERY_S)
        self.advice = advice_for(self.waiting, self.report, self._model, self.sample, self._config)
        self._emit(self.analysed)

    def _tell_disk(self, reason: str) -> None:
        sentence = self.tr("The session is no longer recorded: its file could not be written ({0}).").format(reason)
        self._emit(self.problem, sentence)

    def _emit(self, signal: Any, *values: object) -> None:
        try:
            signal.emit(*values)
        except RuntimeError:
            _log.info("the window is gone")


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
