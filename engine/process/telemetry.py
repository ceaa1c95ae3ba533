"""Sends recorded telemetry to the window, on its own thread, while the window watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from engine.common import clock
from engine.protocol import (
    Event,
    RequestPlace,
    ResizeCache,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    WatchTelemetry,
)
from engine.telemetry.recorder import RECORDER, Recorder
from engine.telemetry.records import Records, no_spans, no_steps, pack

if TYPE_CHECKING:
    from engine.runtime.telemetry.model_telemetry import ModelTelemetry

_log = logging.getLogger(__name__)

SPANS_S = 0.5
"""Between two collections: each finds the caches full of weights, so that fewer of them cost less."""
MAP_S = 0.5
REPORT_S = 1.0
MOST_SPANS = 4096
"""Records per message: some tens of kilobytes."""
_REMEMBERED_SPANS = 2**15
"""Records kept between two cache reports, which read them; the others have been sent already."""


class TelemetryService:
    """Starts and stops the recorder at the window's request, and forwards its records.

    Args:
        send: see `EventWriter.send`.
    """

    def __init__(self, send: Callable[[Event], bool], recorder: Recorder = RECORDER) -> None:
        self._send, self._recorder = send, recorder
        self._changed = threading.Condition()
        self._using = threading.Lock()  # held while the source is in use, so that its model is not freed
        self._wanted = WatchTelemetry(on=False)
        self._resizes: list[ResizeCache] = []
        self._source: ModelTelemetry | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lost_spans = self._lost_steps = 0
        self._spans: list[Records] = []
        self._steps: list[Records] = []
        self._map_due_s = self._report_due_s = 0.0
        self._report_is_asked = self._map_is_news = self._map_is_sent = False

    def watch(self, command: WatchTelemetry) -> None:
        with self._changed:
            self._wanted = command
            self._wake(starts=command.on)

    def resize(self, command: ResizeCache) -> None:
        """Resizes soon, whether the window watches or not; no effect while no model is loaded."""
        with self._changed:
            self._resizes.append(command)
            self._wake(starts=True)

    def _wake(self, *, starts: bool) -> None:
        if starts and self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def model_is(self, source: ModelTelemetry | None) -> None:
        """The engine has loaded a model, or is about to free the one it had (None)."""
        with self._using:
            if self._source is not None:
                self._source.stop()
            self._source = source
            self._report_is_asked = True
            if source is not None and self._recorder.on:
                source.start()

    def request_begins(self, request_id: str) -> None:
        """Called by the engine thread before a request that records."""
        if self._recorder.on:
            self._send(TelemetryRequest(self._recorder.next_request, request_id, clock.now_ns()))

    def is_elsewhere(self, number: int, place: str) -> None:
        if self._recorder.on:
            self._send(RequestPlace(number, place))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._set_recording(on=False)

    def _run(self) -> None:
        while True:
            with self._changed:
                idle = not (self._wanted.on or self._recorder.on)
                self._changed.wait_for(self._is_urgent, None if idle else SPANS_S)
                if self._closed:
                    return
                wanted, resizes = self._wanted, self._resizes
                self._resizes = []
            try:
                self._do(wanted, resizes)
            except Exception:  # it may work the next time; the engine must go on
                _log.exception("telemetry failed")
                time.sleep(SPANS_S)

    def _is_urgent(self) -> bool:
        return self._closed or bool(self._resizes) or self._wanted.on != self._recorder.on

    def _do(self, wanted: WatchTelemetry, resizes: list[ResizeCache]) -> None:
        if wanted.on != self._recorder.on:
            self._set_recording(on=wanted.on)
        for command in resizes:
            self._resize(command)
        self._map_is_sent &= wanted.expert_map
        if not wanted.on:
            return
        self._send_records()
        now_s = time.monotonic()
        self._map_is_news |= bool(self._steps) or self._report_is_asked
        if wanted.expert_map and now_s >= self._map_due_s and (self._map_is_news or not self._map_is_sent):
            self._map_due_s = now_s + MAP_S
            self._map_is_news, self._map_is_sent = False, True
            with self._using:
                expert_map = self._source.expert_map() if self._source is not None else None
            if expert_map is not None:
                self._send(expert_map)
        if now_s >= self._report_due_s and (self._steps or self._report_is_asked):
            self._report_due_s = now_s + REPORT_S
            self._report()

    def _set_recording(self, *, on: bool) -> None:
        if on == self._recorder.on:
            return
        with self._using:
            if on:
                if self._source is not None:
                    self._source.start()
                self._lost_spans = self._lost_steps = 0
                self._report_is_asked = True
                self._recorder.start()
                return
            self._recorder.stop()
            if self._source is not None:
                self._source.stop()
        self._send_records()
        self._spans, self._steps = [], []

    def _resize(self, command: ResizeCache) -> None:
        with self._using:
            if self._source is not None:
                self._source.resize(command.tier, command.slots)
        self._report_is_asked = True

    def _send_records(self) -> None:
        recorder = self._recorder
        spans, steps = recorder.take_spans(), recorder.take_steps()
        for begin in range(0, len(spans), MOST_SPANS):
            some = spans[begin : begin + MOST_SPANS]
            dropped = recorder.dropped_spans + self._lost_spans
            if not self._send(TelemetrySpans(clock.now_ns(), time.time(), len(some), pack(some), dropped)):
                self._lost_spans += len(some)
        if len(steps):
            dropped = recorder.dropped_steps + self._lost_steps
            if not self._send(TelemetryCounters(len(steps), pack(steps), dropped)):
                self._lost_steps += len(steps)
            self._steps.append(steps)
        if len(spans) and sum(map(len, self._spans)) < _REMEMBERED_SPANS:
            self._spans.append(spans)

    def _report(self) -> None:
        spans = np.concatenate(self._spans) if self._spans else no_spans()
        steps = np.concatenate(self._steps) if self._steps else no_steps()
        self._spans, self._steps, self._report_is_asked = [], [], False
        with self._using:
            report = self._source.cache_report(spans, steps) if self._source is not None else None
        if report is not None:
            self._send(report)
