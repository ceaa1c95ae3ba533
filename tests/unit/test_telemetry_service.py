"""The thread that tells the window: what is asked for is sent, nothing else is, and nobody waits for it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.process import telemetry
from engine.process.streams import MOST_OFFERED, EventWriter
from engine.process.telemetry import TelemetryService
from engine.protocol import (
    CacheReport,
    Droppable,
    Event,
    ExpertMap,
    ResizeCache,
    TelemetryCounters,
    TelemetryRequest,
    TelemetrySpans,
    WatchTelemetry,
)
from engine.telemetry.lanes import DECODE, EXPERTS, GPU
from engine.telemetry.recorder import Recorder
from engine.telemetry.records import SPAN, STEP, Records, unpack
from tests.refusals import until

MAP = ExpertMap((0,), 1, 1, 1.0, "", "", "", "", "", (1,))
REPORT = CacheReport((), (), (), 0.0, 0.0, 0.0, 0.0, "", 0, (), ())


class Source:
    """A model that tells what it is asked."""

    def __init__(self, *, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.counted_steps = 0
        self._fails = fails

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def expert_map(self) -> ExpertMap:
        if self._fails:
            raise ValueError("nonsense")
        return MAP

    def cache_report(self, spans: Records, steps: Records) -> CacheReport:
        self.counted_steps += len(steps)
        return REPORT

    def resize(self, tier: str, slots: int) -> None:
        self.calls.append((tier, slots))


class Window:
    """What has been sent."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.takes = True
        self._changed = threading.Condition()

    def send(self, event: Event) -> bool:
        if isinstance(event, Droppable) and not self.takes:
            return False
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        return True

    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self.events) if isinstance(event, kind)]

    def wait_for(self, what: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(what, 30)


@pytest.fixture
def window() -> Window:
    return Window()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def service(window: Window, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> Iterator[TelemetryService]:
    for pause in ("SPANS_S", "MAP_S", "REPORT_S"):
        monkeypatch.setattr(telemetry, pause, 0.02)
    made = TelemetryService(window.send, recorder)
    yield made
    made.close()
    assert not recorder.on


def test_nothing_is_recorded_until_somebody_watches(service: TelemetryService, window: Window) -> None:
    service.model_is(Source())
    service.request_begins("a")
    assert window.events == []


def test_spans_and_steps_arrive_with_their_request(
    service: TelemetryService, window: Window, recorder: Recorder
) -> None:
    source = Source()
    service.model_is(source)
    service.watch(WatchTelemetry(on=True))
    until(lambda: recorder.on)
    assert source.calls == ["start"]
    service.request_begins("a")
    recorder.begin_request()
    recorder.span(GPU, EXPERTS, 1, 2, nbytes=9)
    recorder.phase(DECODE, 1)
    window.wait_for(lambda: window.of(TelemetryCounters) and window.of(CacheReport) and source.counted_steps)
    (request,) = window.of(TelemetryRequest)
    spans = unpack(window.of(TelemetrySpans)[0].packed, SPAN)
    assert set(spans["request"].tolist()) == {request.number}
    assert spans["nbytes"].max() == 9
    assert unpack(window.of(TelemetryCounters)[0].packed, STEP)["tokens"].tolist() == [1]
    assert not window.of(ExpertMap)
    service.watch(WatchTelemetry(on=False))
    until(lambda: not recorder.on)
    until(lambda: source.calls == ["start", "stop"])


def test_the_map_comes_while_it_is_asked_for(service: TelemetryService, window: Window) -> None:
    service.model_is(Source())
    service.watch(WatchTelemetry(on=True, expert_map=True))
    window.wait_for(lambda: window.of(ExpertMap))


def test_a_model_that_is_freed_is_asked_nothing_more(
    service: TelemetryService, window: Window, recorder: Recorder
) -> None:
    first, second = Source(), Source()
    service.model_is(first)
    service.watch(WatchTelemetry(on=True))
    until(lambda: recorder.on)
    service.model_is(None)
    assert first.calls == ["start", "stop"]
    service.model_is(second)
    assert second.calls == ["start"]


def test_a_cache_is_resized_and_told_of(service: TelemetryService, window: Window) -> None:
    source = Source()
    service.resize(ResizeCache("vram", 3))  # no model yet: without effect
    service.model_is(source)
    service.watch(WatchTelemetry(on=True))
    service.resize(ResizeCache("vram", 5))
    window.wait_for(lambda: window.of(CacheReport))
    until(lambda: ("vram", 5) in source.calls)


def test_a_source_that_fails_stops_nothing(service: TelemetryService, window: Window, recorder: Recorder) -> None:
    service.model_is(Source(fails=True))
    service.watch(WatchTelemetry(on=True, expert_map=True))
    until(lambda: recorder.on)
    recorder.span(GPU, EXPERTS, 1, 2)
    window.wait_for(lambda: window.of(TelemetrySpans))


def test_what_a_slow_pipe_has_no_room_for_is_counted(
    service: TelemetryService, window: Window, recorder: Recorder
) -> None:
    service.watch(WatchTelemetry(on=True))
    until(lambda: recorder.on)
    window.takes = False
    recorder.span(GPU, EXPERTS, 1, 2)
    until(lambda: service._lost_spans == 1)
    window.takes = True
    recorder.span(GPU, EXPERTS, 2, 3)
    window.wait_for(lambda: window.of(TelemetrySpans))
    assert window.of(TelemetrySpans)[-1].dropped == 1


def test_a_writer_takes_only_so_many_at_a_time() -> None:
    writer = EventWriter(-1, on_broken=lambda: None)  # never started: nothing is written
    event = TelemetrySpans(0, 0.0, 0, "", 0)
    assert [writer.send(event) for _ in range(MOST_OFFERED + 2)] == [True] * MOST_OFFERED + [False] * 2
