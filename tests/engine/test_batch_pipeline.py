"""Sweeps over an emulated card: whatever the order of a layer's work, answers are those of the CPU."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedules import PartsTimer
from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CopyRecord
from engine.devices.memory_budget import MemoryCategory
from engine.jobs.rows import BatchOutcome
from engine.kernels.native.paged_attention import KvType
from engine.planner.schedules import (
    CGOPIPE,
    CPU_EXPERTS,
    HOT_ONLY,
    HYBRID,
    KLOTSKI,
    KLOTSKI_ON_CARD,
    S4,
    SCHEDULES,
    Schedule,
)
from engine.planner.simulator.sweeps import predicted_seconds
from engine.runtime.batch.layers import DecoderLayers
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.batch.pipeline.device_pipeline import DevicePipeline
from engine.runtime.batch.pipeline.layer_experts import sites_of
from engine.runtime.batch.policy import BatchPolicy, ScheduleChoice
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor, ContinuousBatch
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END
from tests.engine.single_streams import Alone, answers_alone, answers_of, rows_of
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

KINDS = (CGOPIPE, S4, HOT_ONLY, KLOTSKI_ON_CARD, CPU_EXPERTS)
"""Between them the schedules do all that there is."""
ORDERED = [
    pytest.param(each, marks=[] if each in KINDS else [pytest.mark.exhaustive], id=each.name)
    for each in SCHEDULES.values()
    if each.order
]
LENGTHS = [1, 40, 90, 12, 33, 7, 64]
_rows = partial(rows_of, LENGTHS, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("pipeline"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[int, tuple[int, ...]]:
    with on_devices.opened(folder, 0) as loaded:
        return answers_alone(loaded, _rows())


@pytest.fixture(scope="module")
def on_card(folder: Path) -> Iterator[LoadedModel]:
    with on_devices.opened(folder, 1, cache_slots=3) as loaded:
        yield loaded


def _policy(schedule: Schedule | None, rows: int = 2) -> BatchPolicy:
    return BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=120, micro_batch_rows=rows, schedule=schedule)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        pytest.param(each, rows, marks=[] if rows == (1, 3, 8)[number % 3] else [pytest.mark.exhaustive])
        for number, each in enumerate((None, *SCHEDULES.values()))
        for rows in (1, 3, 8)
    ],
    ids=str,
)
def test_answers_are_those_of_the_cpu(
    on_card: LoadedModel, wanted: dict[int, tuple[int, ...]], schedule: Schedule | None, rows: int
) -> None:
    assert answers_of(on_card, _rows(), _policy(schedule, rows)) == wanted


@given(
    schedule=st.sampled_from([each for each in SCHEDULES.values() if each.order]),
    rows=st.integers(1, 8),
    tokens=st.integers(1, 150),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
@settings(max_examples=2, deadline=None)
def test_rows_go_on_after_giving_way(
    on_card: LoadedModel,
    wanted: dict[int, tuple[int, ...]],
    schedule: Schedule,
    rows: int,
    tokens: int,
    stops: list[int],
) -> None:
    answers: dict[int, GenerationResult] = {}
    policy = BatchPolicy(rows=8, kv_bytes=2**22, sweep_tokens=tokens, micro_batch_rows=rows, schedule=schedule)
    executor, source = BatchExecutor(on_card, policy), iter(_rows())
    chat = Alone(on_card)
    try:
        for stop in stops:
            looks = iter(range(stop))
            outcome = executor.run(
                source,
                lambda answer: answers.__setitem__(answer.row, answer),
                should_yield=lambda looks=looks: next(looks, None) is None,  # type: ignore[misc]
            )
            first = _rows()[1]
            said = chat.generate_from_ids(first.ids, first.sampling, end_ids=NO_END)
            assert said.token_ids == wanted[1]
            if outcome is BatchOutcome.FINISHED:
                break
        executor.run(source, lambda answer: answers.__setitem__(answer.row, answer))
    finally:
        executor.close()
        chat.clear()
    assert {row: answer.token_ids for row, answer in answers.items()} == wanted


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("schedule", ORDERED)
def test_a_batch_stops_when_it_is_cancelled_and_another_one_follows(
    on_card: LoadedModel, wanted: dict[int, tuple[int, ...]], schedule: Schedule
) -> None:
    for stop in (1, 2, 5):
        executor, looks = BatchExecutor(on_card, _policy(schedule)), iter(range(stop))
        outcome = executor.run(iter(_rows()), lambda answer: None, cancelled=lambda: next(looks, None) is None)  # noqa: B023
        assert outcome is BatchOutcome.CANCELLED
        executor.close()
    assert answers_of(on_card, _rows(), _policy(schedule)) == wanted


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("code", [ErrorCode.NOT_ENOUGH_MEMORY, ErrorCode.INTERNAL])
@pytest.mark.parametrize("schedule", ORDERED)
def test_rows_are_kept_when_attention_fails(
    on_card: LoadedModel,
    wanted: dict[int, tuple[int, ...]],
    schedule: Schedule,
    code: ErrorCode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = iter(range(4))
    where, name = (DevicePipeline, "attend_there") if schedule.in_ram else (PagedStates, "attend_rows")
    own = getattr(where, name)

    def attend(self: Any, *args: Any) -> Any:
        if next(failures, None) == 3:
            raise EngineError(code, "Attention could not be computed.")
        return own(self, *args)

    monkeypatch.setattr(where, name, attend)
    answers: dict[int, tuple[int, ...]] = {}

    def take(answer: GenerationResult) -> None:
        answers[answer.row] = answer.token_ids

    executor, source = BatchExecutor(on_card, _policy(schedule)), iter(_rows())
    try:
        # Without memory, rows step aside until there is some.
        with refused(code) if code is ErrorCode.INTERNAL else nullcontext():
            executor.run(source, take)
        executor.run(source, take)
    finally:
        executor.close()
    assert answers == wanted


@pytest.mark.parametrize("slots", [0, 9])
def test_each_expert_that_is_not_resident_crosses_the_link_once_a_sweep(folder: Path, slots: int) -> None:
    with on_devices.opened(folder, 1, cache_slots=slots) as loaded:
        weights, sweeps, pipeline, layers = _weights_sent(loaded)
        # One layer more: the first one of a sweep that does not come any more is on its way.
        experts = pipeline.experts.most
        assert weights <= (sweeps * layers + 1) * experts + slots
        if not slots:
            assert weights == (sweeps * layers + 1) * experts
            return
        resident = slots // layers  # once every slot is filled, so many of each layer stay
        assert weights <= (sweeps * layers + 1) * (experts - resident) + 2 * layers * experts
        assert weights < sweeps * layers * experts


def _weights_sent(on_card: LoadedModel) -> tuple[int, int, DevicePipeline, int]:
    """(experts that crossed the link, sweeps, the pipeline, its layers) of all rows by CGOPipe."""
    (card,) = on_card.devices.devices
    executor = BatchExecutor(on_card, _policy(CGOPIPE))
    batch = executor._batch
    assert isinstance(batch, ContinuousBatch)
    pipeline = batch.model._pipeline
    record = next(iter(pipeline.experts.cards[0].experts.sites.values())).experts.cache.layout.nbytes
    copies: list[CopyRecord] = []
    stop = card.copy_log.listen(copies.append)
    sweeps = 0
    sweep = batch.model.sweep

    def counted(work: list[Any]) -> Any:
        nonlocal sweeps
        sweeps += 1
        return sweep(work)

    batch.model.sweep = counted  # type: ignore[method-assign]
    executor.run(iter(_rows()), lambda answer: None)
    pipeline._attention.settle()
    card.synchronize()
    stop()
    assert card.memory.use().used <= card.memory.use().total
    executor.close()
    weights = sum(copy.nbytes == record and copy.direction == "h2d" for copy in copies)
    assert {copy.direction for copy in copies} == {"h2d", "d2h"}
    return weights, sweeps, pipeline, len(pipeline.experts.cards[0].experts.sites)


def test_sweeps_whose_parts_are_timed_answer_as_ever(on_card: LoadedModel, wanted: dict[int, tuple[int, ...]]) -> None:
    answers: dict[int, tuple[int, ...]] = {}
    timer = PartsTimer()
    executor = BatchExecutor(on_card, _policy(timer.schedule, rows=3))
    try:
        executor.run(iter(_rows()), lambda answer: answers.__setitem__(answer.row, answer.token_ids))
    finally:
        executor.close()
    assert answers == wanted
    assert len(timer.sweeps) >= 6
    assert {(sweep.layers, max(each.times.count for each in timer.sweeps)) for sweep in timer.sweeps} == {(3, 3)}
    for sweep in timer.sweeps:
        parts = sweep.times
        assert min(parts.before_s, parts.between_s, parts.attention_s, parts.card_attention_s) > 0
        assert min(parts.experts_s, parts.host_experts_s) > 0
        assert 0 < parts.wanted <= parts.experts
    assert all(predicted_seconds(each, timer.sweeps) for each in SCHEDULES.values() if each.order)


def test_int8_caches_go_to_the_card_with_their_scales(on_card: LoadedModel) -> None:
    policies = [replace(_policy(schedule), kv_type=KvType.INT8) for schedule in (S4, CGOPIPE)]
    assert answers_of(on_card, _rows(), policies[0]) == answers_of(on_card, _rows(), policies[1])


def test_a_card_without_room_for_two_layers_answers_as_well(folder: Path, wanted: dict[int, tuple[int, ...]]) -> None:
    with on_devices.opened(folder, 1, cache_slots=3) as loaded:
        (card,) = loaded.devices.devices
        layers = [site.experts for site in sites_of(DecoderLayers(loaded.model))[0].values()]
        layer = layers[0].source.num_experts * layers[0].cache.layout.nbytes
        loaded.devices.experts.give_back(0, card.memory.total)
        taken = card.memory.reserve(card.memory.free - 2 * layer + 1, MemoryCategory.ACTIVATIONS)
        assert answers_of(loaded, _rows(), _policy(None)) == wanted
        taken.release()


def test_the_fastest_schedule_is_found_for_sweeps_of_a_size() -> None:
    choice, seconds = ScheduleChoice(), {CGOPIPE: 3.0, KLOTSKI: 1.0, HYBRID: 2.0}
    taken = []
    for _ in range(900):
        schedule = choice.of(10)
        taken.append(schedule)
        choice.took(schedule, 10, seconds[schedule])
    assert taken[0] is CGOPIPE
    assert taken[-100:].count(KLOTSKI) >= 98
    assert choice.of(100) is CGOPIPE
