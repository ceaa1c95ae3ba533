"""Cards with a clock of their own: what sharing each layer's experts gains, and what the planner says it does."""

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import prepare
from engine.bench.opened import decode_seconds, prefill_seconds, random_text
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.model_shape import ModelShape
from engine.checkpoint.synthetic import make_synthetic
from engine.common import clock
from engine.common.config import BatchJob, EngineConfig, Misses, SamplingParams, Sharing
from engine.common.costs import Cost
from engine.devices.timeline import Wire
from engine.experts.dispatch import BANK_LAYER
from engine.hardware.machine import HardwareProfile, read_machine
from engine.hardware.profiles import with_emulated
from engine.planner.batch_prediction import JobPrediction, JobRows
from engine.planner.costs import Cards, Costs, Observed, engine_costs
from engine.planner.plan_parts import BatchPlan
from engine.planner.predict import predict_decode
from engine.planner.schedules import CGOPIPE, KLOTSKI, S4, Schedule
from engine.planner.simulator.sweeps import CopyCost, OffloadPolicy, PassCosts, SimulatedCard, Timeline
from engine.runtime.batch import job_plan
from engine.runtime.batch.job_plan import PlanWatch
from engine.runtime.batch.policy import BatchPolicy, policy_for
from engine.runtime.engine import Engine
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine.loaded_tiny import open_model

MODEL = "synthetic:qwen3-moe-small?layers=4&experts=96&vocab=512"
CARD = "link25-8gb"
"""With a bridge between cards."""
ROWS, MICRO_BATCH, PROMPT = 24, 12, 4
SHORT, LONG, STEPS = 64, 512, 12
"""Prompts of chats, and tokens of their answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_HOME", str(tmp_path_factory.mktemp("synthetic")))
        yield make_synthetic(MODEL)
    measured_s.cache_clear()


def config_of(
    folder: Path, cards: int, misses: Misses = "mixed", sharing: Sharing = "experts", slots: int = 0
) -> EngineConfig:
    return EngineConfig(
        str(folder),
        device=device_of(cards),
        precision="bf16",
        threads=1,
        context_tokens=LONG,
        cache_slots=slots,
        misses=misses,
        sharing=sharing if cards > 1 else "auto",
    )


def opened(
    folder: Path, cards: int, misses: Misses = "mixed", sharing: Sharing = "experts", slots: int = 0
) -> LoadedModel:
    config = config_of(folder, cards, misses, sharing, slots)
    return open_model(config)


def job_s(loaded: LoadedModel, schedule: Schedule, tokens: int) -> float:
    """Of all rows, each answered with so many tokens."""
    policy = BatchPolicy(rows=ROWS, kv_bytes=2**24, sweep_tokens=1024, micro_batch_rows=MICRO_BATCH, schedule=schedule)
    drawn = random.Random(1)
    rows = [
        BatchRequest(
            row,
            ids=tuple(drawn.randrange(300, 500) for _ in range(PROMPT)),
            sampling=SamplingParams(max_tokens=tokens),
            end_ids=frozenset(),
        )
        for row in range(ROWS)
    ]
    with closing(BatchExecutor(loaded, policy)) as executor:
        begun_s = clock.now()
        executor.run(iter(rows), lambda _answer: None)
        return clock.now() - begun_s


def sweep_s(loaded: LoadedModel, schedule: Schedule) -> float:
    """Of a decode step of all rows: what two tokens more of each take."""
    return (job_s(loaded, schedule, 5) - job_s(loaded, schedule, 3)) / 2


def machine_of(cards: int, name: str = CARD) -> HardwareProfile:
    """What the planner knows of the modelled machine: its data sheets."""
    return with_emulated(replace(read_machine("gcp-l4"), gpu=None), device_of(cards, name))


def device_of(cards: int, name: str = CARD) -> str:
    return f"emulated:{name}{f'x{cards}' if cards > 1 else ''}?host=fixed"


def costs_of(shape: ModelShape, cards: int) -> Costs:
    return engine_costs(machine_of(cards), shape, "bf16", 1, cards=Cards.EXPERTS if cards > 1 else Cards.LAYERS)


def planned_s(shape: ModelShape, schedule: Schedule, cards: int, evenness: float = 1.0) -> float:
    """The same by the planner's costs, with dense weights on the card."""
    costs = replace(costs_of(shape, cards), observed=Observed(evenness))
    work = PassCosts(costs, MICRO_BATCH, MICRO_BATCH, PROMPT + 5, prefill=False)
    times = work.times(OffloadPolicy(ROWS, MICRO_BATCH))
    times = replace(times, dense=CopyCost())
    simulated = SimulatedCard(Timeline(record=False))
    for _ in range(3):
        simulated.sweep(schedule, times, shape.layers)
    ends = simulated.ends
    return ends[-1] - ends[-1 - shape.layers]


@cache
def measured_s(folder: Path, schedule: Schedule, cards: int) -> tuple[float, float]:
    """(seconds, how even the run has found routing to be)."""
    loaded, known = opened(folder, cards), costs_of(find_shape(str(folder)), cards)
    try:
        job_plan.observed_of(loaded, known)  # from now on times are compared with it
        seconds, found = sweep_s(loaded, schedule), job_plan.observed_of(loaded, known)
        # All parts take what they should, but for what a busy host needs between those of a layer: no clock of ours.
        assert replace(found, card_layer=1.0) == Observed(found.evenness)
        return seconds, found.evenness
    finally:
        loaded.close()


@pytest.mark.parametrize(("cards", "gain"), some([(4, 3.0), (2, 1.7)], every=4))
def test_batches_take_as_long_as_planned(cards: int, gain: float, folder: Path) -> None:
    shape = find_shape(str(folder))
    (one, _), (several, _) = (measured_s(folder, CGOPIPE, count) for count in (1, cards))
    assert one / several >= gain
    assert one == pytest.approx(planned_s(shape, CGOPIPE, 1), rel=0.15)
    assert several == pytest.approx(planned_s(shape, CGOPIPE, cards), rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "cards", "gain"),
    some([(KLOTSKI, 2, 1.7), (KLOTSKI, 4, 2.4), (S4, 4, 2.4), (S4, 2, 1.6)], every=4),
)
def test_schedules_with_attention_on_the_card_take_as_long_as_planned(
    schedule: Schedule, cards: int, gain: float, folder: Path
) -> None:
    """How many experts are wanted is for the routing to say: the planner takes what the run has found of it."""
    shape = find_shape(str(folder))
    (one, even), (several, even_of_several) = (measured_s(folder, schedule, count) for count in (1, cards))
    assert one / several >= gain
    assert one == pytest.approx(planned_s(shape, schedule, 1, even), rel=0.15)
    assert several == pytest.approx(planned_s(shape, schedule, cards, even_of_several), rel=0.15)


def test_what_sweeps_take_counts_more_than_what_the_planner_knew(folder: Path) -> None:
    machine = machine_of(1)
    gpu, cpu, calls = machine.gpu, machine.cpu, machine.calls
    said = replace(
        machine,
        gpu=replace(gpu, bytes_per_s=4 * gpu.bytes_per_s, flops=4 * gpu.flops),
        cpu=replace(cpu, ram_bytes_per_s=4 * cpu.ram_bytes_per_s, flops=4 * cpu.flops),
        calls=replace(calls, launch_s=calls.launch_s / 4, native_s=calls.native_s / 4),
    )
    loaded, known = opened(folder, 1), engine_costs(said, find_shape(str(folder)), "bf16", 1)
    try:
        assert job_plan.observed_of(loaded, known) == Observed()
        for schedule in (CGOPIPE, S4):
            job_s(loaded, schedule, 6)
        found = job_plan.observed_of(loaded, known)
    finally:
        loaded.close()
    assert found.card_layer > 3.5  # and what the host needs between its parts, which is no clock of ours
    assert (found.cpu_attention, found.card_attention) == (pytest.approx(4, rel=0.01), pytest.approx(4, rel=0.01))
    assert (found.card_experts, found.cpu_experts) == (1, 1)
    right = engine_costs(machine, known.model, "bf16", 1)
    told = replace(known, observed=found)
    assert told.cpu_attention(12, 4096) == pytest.approx(right.cpu_attention(12, 4096), rel=0.05)
    assert told.card_attention(12, 4096) == pytest.approx(right.card_attention(12, 4096), rel=0.05)


def routing_of(loaded: LoadedModel, prompt: Sequence[int]) -> NDArray[np.int16]:
    """Experts that its tokens use, [tokens, layers, k]; of the last layer only one is computed, so its are guessed."""
    seen, removers = list[NDArray[np.int16]](), list[Any]()
    for module in loaded.model.modules():
        if BANK_LAYER in module.__dict__:
            removers.append(module.register_forward_pre_hook(lambda _, given: seen.append(given[1].numpy().copy())))
    prefill_seconds(loaded, prompt)
    for remover in removers:
        remover.remove()
    seen = seen[-len(removers) :]  # before the prompt, single tokens show how layers are called
    return np.stack([*seen[:-1], seen[-2]], 1).astype(np.int16)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("cards", "misses", "sharing", "slots"),
    some(
        [
            (4, "mixed", "experts", 24),
            (4, "cpu", "experts", 48),
            (2, "mixed", "experts", 0),
            (1, "mixed", "experts", 0),
            (4, "fetch", "experts", 0),
            (1, "fetch", "experts", 0),
            (4, "fetch", "layers", 0),
            (2, "cpu", "experts", 0),
            (4, "mixed", "experts", 0),
            (4, "mixed", "experts", 48),
            (4, "fetch", "experts", 24),
            (2, "mixed", "experts", 48),
            (1, "mixed", "experts", 96),
            (1, "mixed", "experts", 250),
        ],
        every=6,
    ),
)
def test_chats_and_prompts_take_as_long_as_planned(
    cards: int, misses: Misses, sharing: Sharing, slots: int, folder: Path
) -> None:
    """Which experts are used is for the model to say: the planner is told.  With slots, so is the engine, by what it
    has seen before."""
    text, prompts = random_text(300, SHORT, STEPS), {}
    if slots:
        with closing(opened(folder, cards, misses, sharing, slots)) as loaded:
            decode_seconds(loaded, text)
    with closing(opened(folder, cards, misses, sharing, slots)) as loaded:
        step_s = statistics.fmean(decode_seconds(loaded, text))
        for count in (SHORT, LONG):
            for seed in range(2):  # what is measured while running settles
                prompt = random_text(300, count, 1, seed).prompt
                took_s = prefill_seconds(loaded, prompt)
            prompts[count] = took_s, routing_of(loaded, prompt)
    shape, config = find_shape(str(folder)), config_of(folder, cards, misses, sharing, slots)
    for count, (took_s, routing) in prompts.items():
        found = predict_decode(machine_of(cards), shape, config, prompt_tokens=count, tokens=STEPS, routing=routing)
        if count == LONG or not slots:  # for a cache the short one is a step like others
            assert took_s == pytest.approx(found.ttft_s, rel=0.15)
        if count == SHORT:
            assert step_s == pytest.approx(1 / found.tokens_per_s, rel=0.15)


def planned_rate(engine: Engine, rows: str, slower: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """What would be predicted of a job if the link were said to be so much slower."""

    def said(*given: Any) -> HardwareProfile:
        machine = with_emulated(*given)
        link = machine.link
        return replace(machine, link=replace(link, h2d=link.h2d / slower, d2h=link.d2h / slower))

    monkeypatch.setattr(job_plan, "with_emulated", said)
    monkeypatch.setattr(job_plan, "observed", lambda _loaded: None)
    assert engine._loaded is not None
    job = prepare(BatchJob(rows, f"{rows}.jsonl", sampling=SamplingParams(max_tokens=8)))
    found = job_plan.plan_job(job, engine._loaded).prediction
    return found.tokens_per_s


@pytest.mark.parametrize("when", some(["in mid-job", "before"], every=4))
def test_a_link_that_is_ten_times_slower_than_said_is_planned_with(
    when: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the planner knows of the link is its profile; what it is, only its clock tells."""
    rows, slower = tmp_path / "rows.csv", [10.0 if when == "before" else 1.0]
    rows.write_text("text\n" + "".join(f"row {row} of them\n" for row in range(ROWS)))
    monkeypatch.setattr(Wire, "needed_s", lambda wire, nbytes: wire.latency_s + slower[0] * nbytes / wire.bytes_per_s)
    said = list[JobPrediction]()

    def told(_answer: object, _question: str) -> None:
        if when == "in mid-job":
            slower[0] = 10.0

    def run(name: str) -> tuple[JobEnding, list[str]]:
        job = BatchJob(str(rows), str(tmp_path / f"{name}.jsonl"), sampling=SamplingParams(max_tokens=8))
        watcher = JobWatcher(lambda *_: None, told, lambda: False, lambda: None, lambda: False, said.append)
        ending = engine.run_batch(prepare(job), watcher)
        return ending, [json.loads(line)["answer"] for line in Path(job.output).read_text().splitlines()]

    monkeypatch.setattr(job_plan, "policy_for", lambda *args, **plan: replace(policy_for(*args, **plan), rows=6))
    engine = Engine()
    config = EngineConfig(
        str(folder), device=f"emulated:{CARD}?host=fixed", precision="bf16", threads=1, vram_bytes=300 * 2**20
    )
    engine.load_exactly(config, on_progress=lambda *_: None, cancelled=lambda: False)
    try:
        ending, answers = run("first")
        assert (ending.finished, ending.pace.failed, len(answers)) == (True, 0, ROWS)
        assert ("Copies to the graphics card take" in ending.note) == (when == "in mid-job")
        as_said, as_it_is = (planned_rate(engine, str(rows), each, monkeypatch) for each in (1.0, 10.0))
        assert as_said > 2 * as_it_is
        assert said[-1].tokens_per_s == pytest.approx(as_it_is, rel=0.15)
        if when == "in mid-job":
            assert [each.tokens_per_s for each in said] == pytest.approx([as_said, as_it_is], rel=0.15)
    finally:
        engine.unload()


def found(loaded: LoadedModel, kind: Cost, factor: float) -> None:
    """The run finds that this takes so many times as long as was known."""
    for card in job_plan._latencies(loaded):
        base_s = card.costs.predict(kind, 2**16) / card.costs.factor(kind)
        while abs(math.log(card.costs.factor(kind) / factor)) > 0.001:
            card.costs.observe(kind, 2**16, factor * base_s)


def test_rows_are_planned_again_only_where_another_plan_is_clearly_better(folder: Path) -> None:
    config = replace(config_of(folder, 1), cache_slots=None, vram_bytes=300 * 2**20)
    loaded, shape = open_model(config), find_shape(str(folder))
    try:
        rows = JobRows(300, 300, 64)
        for kind, factor, said in (
            (Cost.H2D, 10, "Copies to the graphics card take 10 times as long as"),
            (Cost.CPU_ATTENTION, 10, "Attention takes 10 times as long on the processor as"),
            (Cost.CARD_EXPERT, 10, "Experts take 10 times as long on the graphics card as"),
            (Cost.CARD_ATTENTION, 10, ""),  # what the plan does without
            (Cost.H2D, 1.3, ""),
        ):
            plan = job_plan.plan_rows(rows, loaded, shape).batch
            watch = PlanWatch(plan, rows, loaded)
            assert watch() == ""
            found(loaded, kind, factor)
            assert watch() == (f"{said} the plan for rows had, so these are planned again." if said else "")
            assert watch() == ""
            better = job_plan.plan_rows(rows, loaded, shape).batch
            assert (better.decode, better.sequences, better.micro_batch) != (
                plan.decode,
                plan.sequences,
                plan.micro_batch,
            ) or not said
            assert PlanWatch(better, rows, loaded)() == ""
            found(loaded, kind, 1)
    finally:
        loaded.close()


def test_rows_are_planned_again_if_the_disk_is_another_than_was_known(folder: Path) -> None:
    config = replace(config_of(folder, 1), cache_slots=None, vram_bytes=300 * 2**20, ram_bytes=150 * 2**20)
    loaded, shape = open_model(config), find_shape(str(folder))
    known, _ = job_plan._machine_of(loaded, shape, job_plan.probe())
    rows = JobRows(100, 300, 64)

    def planned_where_reading_takes(factor: float) -> BatchPlan:
        assert loaded.disk_backed is not None
        disk = loaded.disk_backed.disk
        disk.bytes_read = 2**30
        disk._busy_s = factor * disk.bytes_read / known.disk_bytes_per_s
        found = job_plan.plan_rows(rows, loaded, shape).batch
        assert found is not None
        return found

    try:
        slow, fast = map(planned_where_reading_takes, (10, 0.05))
        assert fast.tokens_per_s > 10 * slow.tokens_per_s
        of_fast = PlanWatch(fast, rows, loaded)
        assert of_fast() == ""
        assert planned_where_reading_takes(10) == slow
        assert (
            of_fast() == "Reads from disk take 200 times as long as the plan for rows had, so these are planned again."
        )
        of_slow = PlanWatch(slow, rows, loaded)
        assert of_slow() == ""
        planned_where_reading_takes(100)  # whatever the plan, they wait for it
        assert of_slow() == ""
        planned_where_reading_takes(0.05)
        assert of_slow().startswith("Reads from disk take 0.0005 times as long as the plan for rows had")
    finally:
        loaded.close()


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    assert clock.own is None
