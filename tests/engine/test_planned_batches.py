"""Random batch policies of the planner's search, carried out on emulated cards: what is planned is what runs."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.catalogue import find_shape
from engine.common.config import SamplingParams
from engine.common.falls import FALLS
from engine.devices.device import Direction, Event, Stream
from engine.devices.memory_budget import MemoryCategory
from engine.hardware.machine import read_machine
from engine.hardware.profiles import with_emulated
from engine.planner.batch_plan import batch_memory, batch_plan_of
from engine.planner.costs import Costs, engine_costs
from engine.planner.engine_memory import EngineMemory, engine_memory, memory_rule
from engine.planner.plan_parts import CHUNKS_TOGETHER, BatchPlan, Limits, Workload, with_all_visits
from engine.planner.policy_search import PAGE, PerformanceModel, policies
from engine.planner.schedules import MULTI_BATCH, S3, Schedule
from engine.planner.simulator.plans import CGOPIPE, FLEXGEN_S4, KLOTSKI, run_batch, system_of
from engine.planner.simulator.sweeps import CopyCost, OffloadPolicy, PassCosts, SimulatedCard, Timeline
from engine.runtime.batch.pipeline.device_pipeline import DevicePipeline
from engine.runtime.batch.pipeline.layer_experts import LayerExperts, SharedLayerExperts
from engine.runtime.batch.pipeline.layer_run import ExpertsCall
from engine.runtime.batch.policy import policy_for
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from engine.telemetry import lanes
from tests.engine import on_devices
from tests.engine.loaded_tiny import NO_END, random_prompt
from tests.engine.tiny_families import tiny_checkpoint

LAYERS, EXPERTS, HOT, POLICIES = 4, 8, 2, 200
QUICK = (0, 1, 3, 6, 9, 13, 20, 88, 93, 96)
"""Of all kinds, with some and with all of keys and values on the card."""
OFF = 0.05
CARD = "emulated:slow-link"
KINDS = [
    (CGOPIPE, True, False, ""),
    (CGOPIPE, False, False, ""),
    (CGOPIPE, True, True, ""),
    (CGOPIPE, False, True, ""),
    (KLOTSKI, False, False, ""),
    (FLEXGEN_S4, False, False, ""),
    (CGOPIPE, True, False, MULTI_BATCH.name),
    (CGOPIPE, True, False, S3.name),
]
"""The system, where it computes attention and experts (A_g = 0, F_g = 0), and another schedule by hand.  Of
MoE-Lightning's schedules that is S1 (CGOPipe), S4, S2 (weights in one piece) and S3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of whole pages of the system, so that their records have no padding."""
    return tiny_checkpoint(
        "mixtral",
        tmp_path_factory.mktemp("planned"),
        num_hidden_layers=LAYERS,
        num_local_experts=EXPERTS,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=None,
    )


@dataclass(frozen=True)
class Case:
    """A policy of the search, with all that it was found for."""

    name: str
    work: Workload
    limits: Limits
    costs: Costs
    policy: OffloadPolicy
    by_hand: str = ""

    @property
    def plan(self) -> BatchPlan:
        system = system_of(self.name, self.policy, own=True)
        chunk = memory_rule(self.costs, self.limits).chunk
        outcome = run_batch(self.name, system, self.costs, self.work, self.policy, chunk=chunk)
        plan = batch_plan_of(self.costs, self.work, outcome)
        return replace(plan, decode=self.by_hand or plan.decode)

    @property
    def memory(self) -> EngineMemory:
        system = system_of(self.name, self.policy, own=True)
        return batch_memory(
            self.costs, self.limits, self.work, run_batch(self.name, system, self.costs, self.work, self.policy)
        )


def drawn(folder: Path, seed: int) -> Case:
    """One of the policies that the search finds for a random job and card, evenly over all kinds."""
    chance = random.Random(seed)
    shape = find_shape(str(folder))
    while True:
        name, cpu_attention, cpu_experts, by_hand = chance.choice(KINDS)
        work = Workload("job", chance.randint(33, 110), 3, chance.randint(2, 24))
        vram = chance.randint(1400, 2600) * 1024
        limits = Limits(vram_bytes=vram, threads=1, precision="bf16", context_tokens=128)
        machine = with_emulated(replace(read_machine("gcp-l4"), gpu=None), CARD, vram)
        costs = engine_costs(machine, shape, "bf16", 1)
        placed = engine_memory(costs, limits, on_card=True)
        if placed is None or placed.all_experts:
            continue
        rule = memory_rule(costs, limits)
        if name == KLOTSKI:
            rule = with_all_visits(rule, shape)
        if work.sequences * work.prompt_tokens > CHUNKS_TOGETHER * rule.chunk:
            continue  # rows would begin one after the other, and answers be written beside prompts
        performance = PerformanceModel(costs, work, rule)
        found = [each.policy for each in policies(performance, cpu_attention, cpu_experts)]
        # A share of few pages is no share of them.
        found = [each for each in found if each.micro_batches <= 6 and (each.cached in (0, 1) or each.sequences >= 12)]
        if found:
            shares = chance.choice(sorted({(each.resident, each.cached) for each in found}))
            policy = chance.choice([each for each in found if (each.resident, each.cached) == shares])
            return Case(name, replace(work, sequences=policy.sequences), limits, costs, policy, by_hand)


@dataclass
class Ran:
    """What a job did.

    Attributes:
        orders: of each sweep, its schedule, how many micro-batches, tokens in the longest row before it, and whether it
            read prompts.
        moved: bytes of each sweep, by what they are and where to.
        held: the most of each kind of memory.
        wanted: of each sweep, experts that are not on the card and are used, in all layers.
        outputs, hits: bytes of what experts in RAM, and those on the card, make of rows.
    """

    orders: list[tuple[Schedule, int, int, bool]] = field(default_factory=list)
    wanted: Counter[int] = field(default_factory=Counter)
    outputs: Counter[int] = field(default_factory=Counter)
    hits: Counter[int] = field(default_factory=Counter)
    moved: list[Counter[tuple[str, str]]] = field(default_factory=list)
    held: Counter[MemoryCategory] = field(default_factory=Counter)


def run(loaded: LoadedModel, case: Case, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Answers as many rows as planned, of planned lengths, by the plan's schedules alone."""
    (card,) = loaded.devices.devices
    ran, plan = Ran(), case.plan

    def counted(stream: Stream) -> None:
        own = stream.copy

        def copy(destination: torch.Tensor, source: torch.Tensor, label: Any, *, direction: Direction) -> Event:
            of = "states" if stream is card.small_copy_stream else "weights"
            of = "keys and values" if label[0] == lanes.KEYS_VALUES else of
            (ran.moved[-1] if ran.moved else Counter())[of, str(direction)] += source.nbytes
            return own(destination, source, label, direction=direction)

        monkeypatch.setattr(stream, "copy", copy)

    for stream in card.streams:
        counted(stream)
    sweep = DevicePipeline.sweep

    def swept(pipeline: DevicePipeline, batches: Sequence[Any], schedule: Schedule) -> Iterator[None]:
        pieces = [piece for batch in batches for piece in batch.pieces.pieces]
        reads = any(piece.tokens > 1 for piece in pieces)
        pipeline.experts.each(lambda card: card.begin(whole=True))  # what stays is there before the first one
        ran.orders.append((schedule, len(batches), max(piece.held for piece in pieces), reads))
        ran.moved.append(Counter())
        for step in sweep(pipeline, batches, schedule):
            for kind, nbytes in card.memory.use().by_category.items():
                ran.held[kind] = max(ran.held[kind], nbytes)
            yield step

    bring, in_ram = LayerExperts.bring_wanted, SharedLayerExperts.compute_in_ram

    def there(experts: LayerExperts, call: ExpertsCall) -> set[int]:
        layer = experts.sites[id(call.module)].experts
        return set(layer.cache.residents(layer.layer))

    def brought(experts: LayerExperts, calls: Sequence[ExpertsCall]) -> None:
        used = {expert for call in calls for expert in call.index.flatten().tolist()}
        ran.wanted[len(ran.moved)] += len(used - there(experts, calls[0]))
        bring(experts, calls)

    def computed(experts: SharedLayerExperts, call: ExpertsCall) -> torch.Tensor:
        held = there(experts.cards[0].experts, call)
        misses = [expert for expert in call.index.flatten().tolist() if expert not in held]
        ran.outputs[len(ran.moved)] += len(misses) * call.hidden[0].nbytes
        ran.hits[len(ran.moved)] += (call.index.numel() - len(misses)) * call.hidden[0].nbytes
        return in_ram(experts, call)

    monkeypatch.setattr(LayerExperts, "bring_wanted", brought)
    monkeypatch.setattr(SharedLayerExperts, "compute_in_ram", computed)

    monkeypatch.setattr(DevicePipeline, "sweep", swept)
    policy = replace(policy_for(loaded, plan), kv_bytes=2**24, by_hand=True)
    rows = [
        BatchRequest(
            row,
            ids=tuple(random_prompt(case.work.prompt_tokens, seed=row)),
            sampling=SamplingParams(max_tokens=case.work.generated_tokens),
            end_ids=NO_END,
        )
        for row in range(case.work.sequences)
    ]
    with closing(BatchExecutor(loaded, policy)) as executor:
        executor.run(iter(rows), lambda answer: None)
        assert FALLS.note == ""
    return ran


def planned_bytes(case: Case, schedule: Schedule, count: int, held: int, outputs: int) -> Counter[tuple[str, str]]:
    """Of a sweep that decodes, by its simulation, with so many bytes of outputs of experts on the CPU."""
    rows = case.policy.sequences / count
    costs = PassCosts(case.costs, rows, rows, held + 1, False, page_tokens=PAGE, dense_stays=True)
    times = replace(costs.times(case.policy), count=count, outputs=CopyCost(1e-6, outputs / LAYERS / count))
    card = SimulatedCard(Timeline())
    card.put(0, times)
    card.sweep(schedule, times, LAYERS)
    kinds = {
        ("h2d", "experts"): ("weights", "h2d"),
        ("h2d", "kv"): ("keys and values", "h2d"),
        ("d2h", "kv"): ("keys and values", "d2h"),
        ("d2h", "qkv"): ("states", "d2h"),
        ("d2h", "hidden"): ("states", "d2h"),
        ("small_copy", "hidden"): ("states", "h2d"),
    }
    moved: Counter[tuple[str, str]] = Counter()
    for span in card.timeline.spans:
        if (kind := kinds.get((span.lane, span.name))) is not None:
            moved[kind] += span.nbytes
    return moved


def check(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = drawn(folder, seed)
    config = {"precision": "bf16", "vram_bytes": case.limits.vram_bytes, "context_tokens": 128}
    with on_devices.opened(folder, 1, **config) as loaded:
        ran = run(loaded, case, monkeypatch)
    said, plan = f"seed {seed}: {case.name} {case.by_hand}, {case.work}, {case.policy}", case.plan
    assert {order[0].name for order in ran.orders if order[3]} == {plan.prefill}, said
    record, page = case.costs.expert_bytes, case.costs.model.kv_bytes_per_token() * PAGE
    decoding = 0
    for number, ((schedule, count, held, reads), moved) in enumerate(zip(ran.orders, ran.moved, strict=True), 1):
        if reads:
            continue
        decoding += 1
        assert (schedule.name, count) == (plan.decode, plan.batches), said
        planned = planned_bytes(case, schedule, count, held, ran.outputs[number])
        if not schedule.whole_layers and not schedule.experts_in_ram:
            # As many as were wanted, which no plan knows, and hot ones that were not.
            hot = HOT * record  # the first layer's came at the end of the sweep before
            more = moved.pop(("weights", "h2d"), 0) - ran.wanted[number] * record
            assert -hot <= more <= LAYERS * hot, (more / record, ran.wanted, said)
            del planned["weights", "h2d"]
        allowed = Counter[tuple[str, str]]()
        if 0 < case.policy.cached < 1:
            allowed = Counter({("keys and values", "h2d"): page, ("keys and values", "d2h"): 2 * page / PAGE})
        if schedule.experts_in_ram and case.policy.resident:
            allowed["states", "h2d"] = ran.hits[
                number
            ]  # where that is faster, the CPU computes what is on the card, too
        for kind in planned | moved:
            off = abs(moved[kind] - planned[kind])
            assert off <= max(OFF * planned[kind], allowed[kind]), (kind, planned[kind], moved[kind], said)
    assert decoding == case.work.generated_tokens - 1, said
    memory = case.memory.card
    bytes_planned = memory.weights + memory.experts + memory.staging + memory.kv
    at_most = sum(nbytes for kind, nbytes in ran.held.items() if kind is not MemoryCategory.ACTIVATIONS)
    assert at_most == pytest.approx(bytes_planned, rel=OFF), (dict(ran.held), memory, said)
    assert ran.held[MemoryCategory.ACTIVATIONS] <= memory.activations, said


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("seed", QUICK)
def test_a_policy_is_carried_out(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(folder, seed, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [seed for seed in range(POLICIES) if seed not in QUICK])
def test_each_policy_is_carried_out(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(folder, seed, monkeypatch)
