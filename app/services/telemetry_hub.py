"""The Monitor's data: the history, the latest reports, and what the last tokens waited for.

On the GUI thread only.  Slow work is done by `HistoryRecorder`, `Analyser` and `DeviceMonitor`, which send their
results by signals, as immutable messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal

from app.services.analyser import Analyser, Findings, Machine
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient, EngineState
from app.services.recorder import HistoryRecorder, Recorded
from app.services.settings import Settings
from engine.common.model_info import ModelInfo
from engine.hardware.sensors import SensorSample
from engine.telemetry.messages import CacheReport, ExpertMap, RequestPlace

if TYPE_CHECKING:
    from app.services.history.history import History

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
