"""Recording: nothing is lost silently, whichever threads record and whenever somebody takes."""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.common.errors import EngineError
from engine.telemetry.lanes import (
    ATTENTION,
    CPU_ATTENTION,
    CPU_EXPERTS,
    DECODE,
    EXPERTS,
    GPU,
    H2D,
    PHASE,
    PREFILL,
    layer_number,
)
from engine.telemetry.layer_log import STAMP, LayerLog, Stamped
from engine.telemetry.recorder import Recorder, Ring
from engine.telemetry.records import COUNTERS, SPAN, STEP, pack, unpack
from tests.unit.recorded import spans


@given(st.integers(1, 8), st.lists(st.integers(-1, 30), max_size=30))
def test_a_ring_keeps_the_newest_and_counts_what_it_drops(capacity: int, actions: list[int]) -> None:
    ring, number, seen = Ring(capacity), 0, []
    for action in actions:
        if action < 0:
            seen += ring.take()
            continue
        for _ in range(action):
            ring.append((number,))
            number += 1
    seen += ring.take()
    kept = [entry for (entry,) in seen]
    assert kept == sorted(set(kept))
    assert len(kept) + ring.dropped == number
    if number:
        assert kept[-1] == number - 1


def test_spans_of_all_threads_are_taken_once() -> None:
    recorder = Recorder()
    recorder.start()

    def record(lane: int) -> None:
        for moment in range(100):
            recorder.span(lane, EXPERTS, moment, moment + 1, layer=3, nbytes=7)

    threads = [threading.Thread(target=record, args=(lane,)) for lane in (GPU, H2D)]
    for thread in threads:
        thread.start()
    record(CPU_EXPERTS)
    for thread in threads:
        thread.join()
    taken = recorder.take_spans()
    assert len(taken) == 300
    assert [int((taken["lane"] == lane).sum()) for lane in (GPU, H2D, CPU_EXPERTS)] == [100] * 3
    assert taken["nbytes"].sum() == 2100
    assert len(recorder.take_spans()) == 0
    assert recorder.dropped_spans == 0


def test_phases_tile_the_time_of_a_request() -> None:
    recorder = Recorder()
    counted = [0] * len(COUNTERS)
    recorder.count_with(lambda: tuple(counted))
    recorder.start()
    recorder.begin_request(1000)
    counted[0] = 5
    recorder.phase(PREFILL, 12, 3000)
    recorder.span(GPU, EXPERTS, 3001, 3002)
    counted[0], counted[-1] = 7, 100
    recorder.phase(DECODE, 1, 3500)
    recorder.end_request()
    taken, ended = recorder.take_spans(), recorder.take_steps()
    assert ended["start_ns"].tolist() == [1000, 3000]
    assert ended["end_ns"].tolist() == [3000, 3500]
    assert ended["hits"].tolist() == [5, 2]
    assert ended["disk_bytes"].tolist() == [0, 100]
    assert ended["tokens"].tolist() == [12, 1]
    phases = taken[taken["lane"] == PHASE]
    assert phases["end_ns"].tolist() == [3000, 3500]
    assert taken[taken["lane"] == GPU]["step"].tolist() == [int(ended["step"][1])]
    assert (recorder.request, recorder.step) == (0, -1)


def test_a_single_token_layer_is_two_spans_and_its_choice() -> None:
    recorder, stamps = Recorder(), _Stamps()
    recorder.layers.follow(stamps)
    for layer in (3, 4):
        recorder.layers.name(layer, layer, ATTENTION)
        recorder.layers.name(10 * layer, layer, EXPERTS)
    recorder.uses = deque()
    stamps.stamp(3, 1, 2)  # before the recording
    recorder.start()
    assert stamps.on
    recorder.begin_request(0)
    for layer in (3, 4):
        stamps.stamp(layer, 10, 20)
        stamps.stamp(10 * layer, 20, 50, 7, 2)
        stamps.stamp(99, 0, 1, 5)  # of nobody that is known
    assert not len(recorder.take_spans())  # whose they are is known when their step has ended
    recorder.phase(DECODE, 1, 60)
    taken = recorder.take_spans()
    assert set(taken["step"].tolist()) == {0}
    assert set(taken["request"].tolist()) == {1}
    attention, experts = taken[taken["lane"] == CPU_ATTENTION], taken[taken["lane"] == CPU_EXPERTS]
    assert attention[["layer", "start_ns", "end_ns", "count"]].tolist() == [(3, 10, 20, 1), (4, 10, 20, 1)]
    assert experts[["layer", "start_ns", "end_ns", "count"]].tolist() == [(3, 20, 50, 2), (4, 20, 50, 2)]
    ((_, layers, chosen, counts, _),) = recorder.uses
    assert (layers.tolist(), chosen.tolist(), counts.tolist()) == ([3, 4], [7, 2, 7, 2], [2, 2])
    assert recorder.on_cpu == 6
    assert recorder.since_ns == 60
    recorder.stop()
    assert not stamps.on


def test_layers_that_nobody_takes_in_time_are_counted() -> None:
    log, stamps = LayerLog(), _Stamps(capacity=4)
    log.follow(stamps)
    log.name(1, 0, EXPERTS)
    for step in range(10):
        stamps.stamp(1, step, step + 1, step)
        assert log.end_step(1, step, CPU_ATTENTION) == (1 if step < 4 else 0)
    assert log.dropped == 6
    taken = log.take()
    assert taken.steps.tolist() == taken.spans["step"].tolist() == taken.experts.tolist() == [0, 1, 2, 3]
    assert log.dropped == 6
    assert log.take() is None
    stamps.stamp(1, 20, 21, 20)
    assert log.end_step(1, 20, CPU_ATTENTION) == 7  # also whom the dropped ones chose
    taken = log.take()
    assert taken.steps.tolist() == taken.experts.tolist() == [20]


def test_a_step_that_runs_while_recording_starts_keeps_its_layers_to_itself() -> None:
    recorder, stamps = Recorder(), _Stamps()
    recorder.layers.follow(stamps)
    recorder.layers.name(1, 0, EXPERTS)
    recorder.begin_request(0)
    stamps.when_empty = lambda: stamps.stamp(1, 10, 20, 0)  # after the last look, on the engine's thread
    recorder.start()
    for step in range(3):
        stamps.stamp(1, 30, 40, step)
        recorder.phase(DECODE, 1, 50)
        taken = recorder.take_spans()
        layers = taken[taken["lane"] == CPU_EXPERTS]
        assert set(layers["step"].tolist()) == {step}
        assert layers["end_ns"].tolist() == [20, 40] if not step else [40]
    assert not stamps.take(9)[0].tolist()


class _Stamps:
    """Native code's stamps."""

    def __init__(self, capacity: int = 100) -> None:
        self.written = self.dropped = self.chosen = self.ended_ns = self.taken = 0
        self.on = False
        self.when_empty: Callable[[], None] | None = None  # what another thread does just then
        self._capacity = capacity
        self._stamps: list[tuple[int, int, int, int]] = []
        self._chosen: list[int] = []

    def switch(self, on: bool) -> None:
        self.on = on

    def stamp(self, which: int, begun_ns: int, ended_ns: int, *chosen: int) -> None:
        self.chosen += len(chosen)
        self.ended_ns = ended_ns
        if len(self._stamps) == self._capacity:
            self.dropped += 1
            return
        self._stamps.append((which, begun_ns, ended_ns, len(chosen)))
        self._chosen += chosen
        self.written += 1

    def take(self, most: int) -> tuple[Stamped, NDArray[np.int32]]:
        if not self._stamps and self.when_empty is not None:
            now, self.when_empty = self.when_empty, None
            now()
            return np.empty(0, STAMP), np.empty(0, np.int32)
        taken, self._stamps = self._stamps[: max(0, most)], self._stamps[max(0, most) :]
        self.taken += len(taken)
        count = sum(stamp[3] for stamp in taken)
        chosen, self._chosen = self._chosen[:count], self._chosen[count:]
        return np.array(taken, STAMP), np.array(chosen, np.int32)


class _Work:
    """What a stream was given."""

    def __init__(self) -> None:
        self.ended: bool = False
        self.failure: Exception | None = None
        self.started_s, self.ended_s = 1.5, 2.5

    def done(self) -> bool:
        return self.ended


def test_a_streams_work_is_a_span_once_it_has_ended_well() -> None:
    recorder, works = Recorder(), [_Work(), _Work(), _Work()]
    recorder.start()
    for number, work in enumerate(works):
        recorder.event(work, H2D, EXPERTS, layer=number, nbytes=9)
    works[0].ended = True
    works[2].ended, works[2].failure = True, ValueError()
    first = recorder.take_spans()
    assert first["layer"].tolist() == [0]
    assert (int(first["start_ns"][0]), int(first["end_ns"][0])) == (1_500_000_000, 2_500_000_000)
    works[1].ended = True
    assert recorder.take_spans()["layer"].tolist() == [1]


@given(spans())
def test_packed_spans_come_out_as_they_went_in(records: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack(pack(records), SPAN), records)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: pack(np.frombuffer(data, np.uint8))))
def test_what_is_not_records_is_refused(text: str) -> None:
    try:
        assert len(unpack(text, STEP)) == 0
    except EngineError:
        return


@pytest.mark.parametrize(
    ("name", "number"),
    [("model.layers.12.mlp.experts", 12), ("model.norm", -1), ("layers.3", 3), ("transformer.blocks.7.ffn", 7)],
)
def test_layers_are_numbered_by_their_name(name: str, number: int) -> None:
    assert layer_number(name) == number
