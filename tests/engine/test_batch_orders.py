"""The order in which schedules hand out a sweep's work: alone, by the simulator, and by the executor."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.experts.whole_layer import Half, LayerBuffers
from engine.jobs.rows import BatchOutcome
from engine.planner.plan_parts import BatchPlan
from engine.planner.schedules import (
    CGOPIPE,
    CPU_EXPERTS,
    MULTI_BATCH,
    S4,
    SCHEDULES,
    LayerWork,
    Schedule,
    layer_by_layer,
)
from engine.planner.simulator.plans import CGOPIPE as MOE_LIGHTNING
from engine.planner.simulator.plans import FLEXGEN_S4, KLOTSKI, system_of
from engine.planner.simulator.sweeps import (
    CopyCost,
    LayerTimes,
    OffloadPolicy,
    SimulatedCard,
    SweepParts,
    Timeline,
    _SimulatedLayer,
    predicted_seconds,
)
from engine.runtime.batch.pipeline.device_pipeline import DevicePipeline, _Layer
from engine.runtime.batch.pipeline.layer_run import LayerRun
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from tests.engine import on_devices
from tests.engine.loaded_tiny import library_tokens
from tests.engine.single_streams import answers_of, rows_of
from tests.engine.tiny_families import tiny_checkpoint

_rows = partial(rows_of, [5, 40, 12, 33, 7], 4)

Event = tuple[Any, ...]
"""What, of which layer, of which micro-batch or page."""

LAYERS, EXPERTS = 3, 4
WORK = [name for name, member in vars(LayerWork).items() if callable(member) and not name.startswith("_")]
ORDERED = [schedule for schedule in SCHEDULES.values() if schedule.order is not None]


# Alone


class _Noting:
    """A layer that notes what it is asked."""

    def __init__(self, index: int, count: int, events: list[Event]) -> None:
        self.index, self.count, self.events = index, count, events

    def __getattr__(self, name: str) -> Any:
        def note(*args: Any, **_options: Any) -> None:
            self.events.append((name, self.index, *args))

        return note


def _events(schedule: Schedule, layers: int, count: int) -> list[Event]:
    events: list[Event] = []
    works: Any = [_Noting(index, count, events) for index in range(layers)]
    for index, _ in enumerate(schedule.order(works)):
        assert ("finish", index, count - 1) in events  # it stops behind each layer
    return events


@given(st.integers(1, 5), st.integers(1, 7))
def test_cgopipe_goes_on_across_the_borders_of_layers(layers: int, count: int) -> None:
    events = _events(CGOPIPE, layers, count)
    place = {event[:3]: position for position, event in enumerate(events)}
    assert len(place) == len(events)  # nothing twice
    for index in range(layers):
        pages = [event[2] for event in events if event[:2] == ("bring_page", index)]
        assert pages == list(range(count))
        finished = [place["finish", index, number] for number in range(count)]
        assert finished == sorted(finished)
        for number in range(count):
            attended = place["attend_in_ram", index, number]
            assert place["begin", index, number] < attended < place["take_attended", index, number] < finished[number]
            if index:
                assert place["begin", index, number] > place["finish", index - 1, number]
        if index + 1 < layers:
            last = place["finish", index, count - 1]
            # A buffer is free only behind the layer that computes from it; then its pages come first.
            assert events[last + 1][:3] == ("bring_page", index + 1, 0)
            assert all(place["bring_page", index + 1, page] > last for page in range(count))
            # The next layer attends while this one's last micro-batches compute.
            ahead = min(2, count) - 1
            assert all(place["attend_in_ram", index + 1, number] < last for number in range(ahead))


@pytest.mark.parametrize("schedule", [each for each in ORDERED if each not in (CGOPIPE, MULTI_BATCH)], ids=str)
def test_other_schedules_finish_a_layer_before_the_next_begins(schedule: Schedule) -> None:
    events = _events(schedule, 3, 2)
    assert [event[1] for event in events] == sorted(event[1] for event in events)


@pytest.mark.parametrize("schedule", ORDERED, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_micro_batch_attends_and_leaves_each_layer_once(schedule: Schedule, count: int) -> None:
    times = Counter(event[:3] for event in _events(schedule, 3, count))
    for index in range(3):
        for number in range(count):
            attended = times["take_attended", index, number] + times["attend_on_device", index, number]
            assert (times["begin", index, number], attended, times["finish", index, number]) == (1, 1, 1)
            assert times["attend_on_device", index, number] == (schedule.in_ram is not None)


# By the simulator and by the executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("orders"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def on_card(folder: Path) -> Iterator[LoadedModel]:
    with on_devices.opened(folder, 1, cache_slots=0) as loaded:
        yield loaded


def _noted(monkeypatch: pytest.MonkeyPatch, layer: type, into: list[list[Event]]) -> None:
    """Whatever a layer does is noted, in the list that is the last one then."""
    for name in WORK:
        own = getattr(layer, name)

        @wraps(own)
        def note(self: Any, *args: Any, name: str = name, own: Any = own, **options: Any) -> Any:
            numbers = tuple(tuple(each) if isinstance(each, Sequence) else each for each in args)
            into[-1].append((name, self._index, *numbers, *options.items()))
            return own(self, *args, **options)

        monkeypatch.setattr(layer, name, note)


def _times(count: int) -> LayerTimes:
    part = dict.fromkeys(
        ("before_s", "between_s", "after_s", "attention_s", "card_attention_s", "host_experts_s"), 1e-3
    )
    return LayerTimes(
        count, experts_s=1e-3, expert_s=1e-3, expert=CopyCost(1e-3, 1), experts=EXPERTS, wanted=EXPERTS, hot=2, **part
    )


class _Executed:
    """What the executor does in each of its sweeps.

    Attributes:
        sweeps: its work; sizes: micro-batches of each; reading: whether each read prompts.
        copies: (layer, how many of its experts) as they are sent to the device, in all sweeps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel, policy: BatchPolicy) -> None:
        self.sweeps: list[list[Event]] = []
        self.sizes: list[int] = []
        self.reading: list[bool] = []
        self.copies: list[tuple[int, int]] = []
        _noted(monkeypatch, _Layer, self.sweeps)
        sweep, bring = DevicePipeline.sweep, LayerBuffers.bring

        def swept(pipeline: DevicePipeline, batches: Sequence[Any], schedule: Schedule) -> Any:
            self.sweeps.append([])
            self.sizes.append(len(batches))
            self.reading.append(any(piece.tokens > 1 for batch in batches for piece in batch.pieces.pieces))
            return sweep(pipeline, batches, schedule)

        def brought(buffers: LayerBuffers, half: Half, experts: Sequence[int]) -> None:
            before = len(half.copied)
            bring(buffers, half, experts)
            if len(half.copied) > before:
                assert half.layer is not None
                self.copies.append((half.layer, len(half.copied) - before))

        monkeypatch.setattr(DevicePipeline, "sweep", swept)
        monkeypatch.setattr(LayerBuffers, "bring", brought)
        self.answers = answers_of(loaded, _rows(), policy)


def _simulated(
    monkeypatch: pytest.MonkeyPatch, orders: Sequence[tuple[Schedule, int]]
) -> tuple[list[list[Event]], Timeline]:
    """The work of sweeps by these schedules of so many micro-batches, one after the other."""
    sweeps: list[list[Event]] = []
    _noted(monkeypatch, _SimulatedLayer, sweeps)
    card = SimulatedCard(Timeline())
    for schedule, count in orders:
        sweeps.append([])
        card.sweep(schedule, _times(count), LAYERS)
    return sweeps, card.timeline


def _policy(schedule: Schedule | None) -> BatchPolicy:
    return BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=60, micro_batch_rows=2, schedule=schedule)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("schedule", ORDERED, ids=str)
def test_the_executor_does_what_the_simulator_assumes(
    on_card: LoadedModel, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = _Executed(monkeypatch, on_card, _policy(schedule))
    simulated, timeline = _simulated(monkeypatch, [(schedule, count) for count in executed.sizes])
    assert executed.sweeps
    assert executed.sweeps == simulated
    if schedule.whole_layers:  # else what is brought depends on what is wanted
        assert executed.copies == [
            (span.layer, span.count) for span in timeline.spans if (span.lane, span.name) == ("h2d", "experts")
        ]


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (MOE_LIGHTNING, OffloadPolicy(8, 2)),
        (MOE_LIGHTNING, OffloadPolicy(8, 2, cpu_attention=False)),
        (MOE_LIGHTNING, OffloadPolicy(8, 2, cpu_experts=True)),
        (MOE_LIGHTNING, OffloadPolicy(8, 2, cpu_attention=False, cpu_experts=True)),
        (KLOTSKI, OffloadPolicy(8, 2, cpu_attention=False)),
        (FLEXGEN_S4, OffloadPolicy(8, 2, cpu_attention=False)),
    ],
)
def test_what_a_plan_offers_is_executed(
    on_card: LoadedModel, name: str, sizes: OffloadPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention and experts are computed as well: prompts by one schedule, answers by another."""
    system = system_of(name, sizes)
    plan = BatchPlan(
        name,
        system.prefill.name,
        system.decode.name,
        sizes.sequences,
        sizes.micro_batch,
        weights_on_card=0.0,
        cache_on_card=0.0,
        row_tokens=48,
        batches=sizes.micro_batches,
        fewest_batches=None,
        hides_transfers=False,
        tokens_per_s=1.0,
    )
    executed = _Executed(monkeypatch, on_card, policy_for(on_card, plan))
    # The first ones: later the schedule that turns out fastest.
    for reading, schedule in ((True, system.prefill), (False, system.decode)):
        first = executed.reading.index(reading)
        (simulated,), _ = _simulated(monkeypatch, [(schedule, executed.sizes[first])])
        assert executed.sweeps[first] == simulated
        attends_there = any(event[0] == "attend_on_device" for event in simulated)
        assert attends_there == (reading or not sizes.cpu_attention)
        assert any(event[0] == "compute_in_ram" for event in simulated) == (sizes.cpu_experts and not reading)


@pytest.mark.parametrize(("rows", "by_plan"), [(5, True), (6, False)])
def test_as_many_rows_as_were_planned_for_go_by_the_plan_however_few_experts_they_want(
    on_card: LoadedModel, rows: int, by_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = DevicePipeline.__init__

    def make(self: DevicePipeline, *args: Any) -> None:
        made(self, *args)
        self.experts_per_token = 0  # no sweep wants most experts

    monkeypatch.setattr(DevicePipeline, "__init__", make)
    policy = replace(_policy(None), rows=rows, planned=CPU_EXPERTS, planned_reading=S4)
    executed = _Executed(monkeypatch, on_card, policy)
    kinds = {event[0] for sweep in executed.sweeps for event in sweep}
    assert ("compute_in_ram" in kinds) == by_plan
    assert bool(executed.sweeps) == by_plan
    assert len(executed.answers) == 5


def test_a_new_schedule_is_a_function_and_runs_everywhere(
    on_card: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CONTRIBUTING says: the executor answers by it, and the simulator knows what it takes."""

    def backwards(work: LayerWork) -> None:
        work.bring_page(0, 1)
        for number in reversed(range(work.count)):
            work.begin(number)
            work.attend_in_ram(number)
            work.take_attended(number)
            work.finish(number)

    toy = Schedule("backwards", layer_by_layer(backwards))
    monkeypatch.setitem(SCHEDULES, toy.name, toy)
    library = AutoModelForCausalLM.from_pretrained(folder)
    wanted = {row.row: tuple(library_tokens(library, row.ids, row.sampling.max_tokens)) for row in _rows()}
    executed = _Executed(monkeypatch, on_card, _policy(SCHEDULES[toy.name]))
    assert executed.answers == wanted
    simulated, _ = _simulated(monkeypatch, [(toy, count) for count in executed.sizes])
    assert executed.sweeps == simulated
    # Nothing overlaps but weights: the first layer's are one part of five late.
    assert predicted_seconds(toy, [SweepParts(LAYERS, _times(2))]) == pytest.approx(1e-3 * (1 + LAYERS * 2 * 5))


@pytest.mark.parametrize("stop", [1, 2])
def test_layers_that_were_begun_ahead_are_let_go_of(
    on_card: LoadedModel, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, waiting = list[weakref.ref[LayerRun]](), list[bool]()
    begin = DevicePipeline.begin

    def begun(pipeline: DevicePipeline, *args: Any) -> LayerRun:
        run = begin(pipeline, *args)
        runs.append(weakref.ref(run))
        waiting.append(run.call is not None)
        return run

    monkeypatch.setattr(DevicePipeline, "begin", begun)
    executor, looks = BatchExecutor(on_card, _policy(CGOPIPE)), iter(range(stop))
    outcome = executor.run(iter(_rows()), lambda answer: None, cancelled=lambda: next(looks, None) is None)
    executor.close()
    assert outcome is BatchOutcome.CANCELLED
    assert any(waiting)
    assert not any(run() for run in runs)
