"""The plan: how to run a model on a machine, the memory this takes, its speed, and what limits it.

Its limit is drawn by MoE-Lightning's Hierarchical Roofline Model (its section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.checkpoint.model_shape import ModelShape
from engine.common import footprint
from engine.common.config import Sharing
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up
from engine.formats import STORED
from engine.hardware.machine import HardwareProfile
from engine.planner.batch_plan import GIVEN, batch_memory, carried_out, given_outcome, plan_batch
from engine.planner.batch_prediction import BATCH_ROWS
from engine.planner.costs import Cards, Costs
from engine.planner.engine_memory import EngineMemory, dense_in_ram, engine_memory, ram_usable, sizes_of
from engine.planner.placement import least_ram
from engine.planner.plan_parts import (
    CHAT,
    Alternative,
    BatchPlan,
    CachePlan,
    Limits,
    Plan,
    RooflinePicture,
    RooflinePoint,
    Speed,
    Workload,
    indexes,
)
from engine.planner.plan_search import (
    ENGINE_SETTINGS,
    Question,
    choose_precision,
    in_order,
    quick_best,
    run_shared,
    runs_here,
    search,
    ways_to_share,
)
from engine.planner.plan_words import bottleneck_sentence, help_sentence, sharing_sentence, what_helps
from engine.planner.simulator.request import Outcome


@dataclass(frozen=True, slots=True)
class Level:
    """A memory and its processor.

    Attributes:
        name: "GPU" or "CPU".
        flops: P_peak, 1 / s.
        bytes_per_s: B_peak, bytes / s.
    """

    name: str
    flops: float
    bytes_per_s: float

    def attainable(self, intensity: float) -> float:
        """Eq. 8: for data in this memory; `intensity` in flops per byte of this memory."""
        return min(self.flops, self.bytes_per_s * intensity)


@dataclass(frozen=True, slots=True)
class HierarchicalRoofline:
    """Two levels and the link between them: i is the card, j the host.

    Attributes:
        upper, lower: levels i and j.
        link: B_peak from j to i, bytes / s.
    """

    upper: Level
    lower: Level
    link: float

    def attainable(self, upper_intensity: float, lower_intensity: float) -> float:
        """Eq. 7: at level i on data fetched from level j.

        Args:
            upper_intensity: I_i, flops per byte read from level i.
            lower_intensity: I_j, flops per byte fetched from level j.
        """
        return min(self.upper.attainable(upper_intensity), self.link * lower_intensity)

    def first_turning_point(self, lower_intensity: float) -> float:
        """Eq. 9, P1: below this intensity it does not pay to move the data from j to i."""
        return self.lower.attainable(lower_intensity) / self.link

    def second_turning_point(self, upper_intensity: float) -> float:
        """Eq. 10, P2: below this intensity the link limits a computation at level i."""
        return self.upper.attainable(upper_intensity) / self.link

    def balance(self, upper_intensity: float) -> float:
        """Eq. 11: the I_j at which the link feeds level i as fast as its own memory does."""
        return self.upper.bytes_per_s * upper_intensity / self.link

    def bottleneck(self, upper_intensity: float, lower_intensity: float) -> str:
        """What limits a computation: "link", "GPU memory" or "GPU arithmetic"."""
        limits = {
            "link": self.link * lower_intensity,
            f"{self.upper.name} memory": self.upper.bytes_per_s * upper_intensity,
            f"{self.upper.name} arithmetic": self.upper.flops,
        }
        return min(limits, key=lambda name: limits[name])


def roofline_of(machine: HardwareProfile, cards: int | None = None) -> HierarchicalRoofline:
    """The roofline of a machine, from its data sheet.

    Args:
        cards: that work at once; by default all.

    Raises:
        ValueError: the machine has no graphics card.
    """
    gpu = machine.gpu
    if gpu is None:
        raise ValueError(f"{machine.name} has no graphics card")
    cards = gpu.count if cards is None else cards
    return HierarchicalRoofline(
        upper=Level("GPU", gpu.flops * cards, gpu.bytes_per_s * cards),
        lower=Level("CPU", machine.cpu.flops, machine.cpu.ram_bytes_per_s),
        link=machine.link.h2d * cards,
    )


def operational_intensity(flops: float, nbytes: float) -> float:
    """Definition 3.1, flops per byte; infinite if nothing is read."""
    return flops / nbytes if nbytes > 0 else math.inf


def roofline_picture(costs: Costs, workload: Workload) -> RooflinePicture:
    """The roofline of a machine with a model's experts on it, ready to draw."""
    machine, model = costs.machine, costs.model
    cpu = Level("CPU", machine.cpu.flops, costs.cpu_bytes_per_s)
    width = operational_intensity(2.0 * model.expert_weights, costs.expert_bytes)
    rows = {
        "decode": max(1.0, workload.beams * model.experts_per_token / max(model.experts, 1)),
        "prefill": workload.prompt_tokens * model.experts_per_token / max(model.experts, 1),
    }
    if workload.sequences > 1:
        rows["batch"] = workload.sequences * model.experts_per_token / max(model.experts, 1)
    if machine.gpu is None:
        points = tuple(_on_host(name, cpu, max(each, 1.0) * width) for name, each in rows.items())
        return RooflinePicture(cpu.flops, cpu.bytes_per_s, points=points)
    found = roofline_of(machine, costs.expert_cards)
    roofline = HierarchicalRoofline(found.upper, cpu, found.link)
    points = tuple(
        RooflinePoint(
            name,
            intensity := max(each, 1.0) * width,
            roofline.attainable(intensity, intensity),
            roofline.bottleneck(intensity, intensity),
        )
        # Left of P1 the host computes, at least as fast as the link could feed the card.
        if max(each, 1.0) * width >= roofline.first_turning_point(max(each, 1.0) * width)
        else _on_host(name, cpu, max(each, 1.0) * width)
        for name, each in rows.items()
    )
    return RooflinePicture(
        cpu.flops,
        cpu.bytes_per_s,
        roofline.upper.flops,
        roofline.upper.bytes_per_s,
        roofline.link,
        first_turning_point=roofline.first_turning_point(width),
        second_turning_point=roofline.second_turning_point(width),
        balance=roofline.balance(width),
        points=points,
    )


def _on_host(name: str, cpu: Level, intensity: float) -> RooflinePoint:
    reached = cpu.attainable(intensity)
    return RooflinePoint(name, intensity, reached, "CPU arithmetic" if reached >= cpu.flops else "CPU memory")


__all__ = ["Limits", "Plan", "make_plan"]

_QUICK_LAYERS = 4
_MEASURED, _LOOKED_UP = 0.15, 0.4
"""Expected relative error of a prediction: on a measured machine, and on one known from data sheets."""


def make_plan(
    machine: HardwareProfile,
    model: ModelShape,
    workload: Workload = CHAT,
    limits: Limits | None = None,
    *,
    measured: bool = False,
    given: BatchPlan | None = None,
) -> Plan:
    """The best plan; takes well under a second for any model.

    Args:
        measured: the machine's numbers were measured, so the predicted range is narrower.
        given: a policy of batches by hand, which is planned with if it fits.
    """
    limits = limits or Limits()
    model = limits.held(model, machine)
    question = Question(machine, model, workload, limits, model.precisions[-1])
    precision = choose_precision(question) if limits.precision == "auto" else model.run_as(limits.precision)
    question = replace(question, precision=precision)
    outcomes = search(question)
    wanted, why = given_outcome(question, given) if given is not None else (None, "")
    if wanted is not None:
        outcomes = [wanted, *(one for one in outcomes if one.policy != wanted.policy)]
    ordered = in_order(outcomes, workload) if wanted is None else [wanted]
    able = ((one, _memory(replace(question, cards=one.cards), one)) for one in ordered)
    best, memory = next(((one, held) for one, held in able if held is not None), (None, None))
    if best is None or memory is None:
        raise _does_not_fit(question)
    question = replace(question, cards=best.cards)
    costs = question.setting().costs
    helps = what_helps(question)
    shared = sharing_sentence(best, costs, _shared_otherwise(question, best))
    if given is not None and wanted is not None:
        batch: BatchPlan | None = carried_out(question, wanted, given)
    else:
        batch = plan_batch(question, outcomes) if workload.sequences > 1 else None
    return Plan(
        machine=machine.name,
        model=model.name,
        workload=workload,
        policy=best.policy,
        precision=precision,
        stored=model.words(STORED),
        threads=limits.threads or machine.cpu.cores,
        context_tokens=min(model.context_tokens, limits.context_tokens or model.context_tokens),
        card=memory.card,
        ram=memory.ram,
        disk_bytes=memory.disk,
        cache=_cache(question, best, memory),
        batch=batch,
        speed=_speed(best, measured=measured),
        bottleneck=bottleneck_sentence(best, costs, memory, workload),
        helps=helps,
        what_helps=help_sentence(helps, workload),
        alternatives=_alternatives(question, best, outcomes, measured=measured),
        roofline=roofline_picture(costs, workload),
        limits=limits,
        streamed_bytes=memory.streamed,
        written_bytes=memory.written,
        table_bytes=memory.tables.on_disk,
        table_rows=memory.tables.rows if memory.tables.on_disk else 0,
        table_row_bytes=memory.tables.row_bytes if memory.tables.on_disk else 0,
        sharing="auto" if not shared else "experts" if best.cards is Cards.EXPERTS else "layers",
        sharing_words=shared,
        pictures=memory.pictures,
        gave_way=f"{GIVEN} gives way to the planner's own: {why}." if why else "",
    )


def _shared_otherwise(question: Question, best: Outcome) -> list[Outcome]:
    """The same policy under the other ways for several cards to share the model."""
    others = [cards for cards in ways_to_share(question) if cards is not best.cards]
    found = [run_shared(_only(question, cards), _QUICK_LAYERS, [best.policy]) for cards in others]
    return [one for outcomes in found for one in outcomes]


def _only(question: Question, cards: Cards) -> Question:
    sharing: Sharing = "experts" if cards is Cards.EXPERTS else "layers"
    return replace(question, limits=replace(question.limits, sharing=sharing))


def _memory(question: Question, best: Outcome) -> EngineMemory | None:
    settings, costs = ENGINE_SETTINGS.get(best.policy, {}), question.setting().costs
    if best.batch is not None:
        return batch_memory(costs, question.limits, question.workload, best)
    memory = engine_memory(
        costs,
        question.limits,
        on_card=best.vram_bytes > 0,
        misses=settings.get("misses", "mixed"),
        cache_slots=settings.get("cache_slots"),
        ways=best.ways or None,
    )
    return memory if memory is None or question.workload.sequences == 1 else _with_rows(memory, question)


def _with_rows(memory: EngineMemory, question: Question) -> EngineMemory:
    """Also keys and values of the rows that are answered together, which get half of what is free."""
    work, tier = question.workload, memory.card or memory.ram
    each = question.model.context_bytes(work.prompt_tokens + work.generated_tokens, in_pages=True)
    wanted = round(min(work.sequences, BATCH_ROWS) * work.beams * each)
    tier = replace(tier, kv=tier.kv + min(max(0, wanted - tier.kv), tier.free // 2))
    return replace(memory, ram=tier) if memory.card is None else replace(memory, card=tier)


def _cache(question: Question, best: Outcome, memory: EngineMemory) -> CachePlan:
    if memory.card is None:
        return CachePlan()
    settings, costs = ENGINE_SETTINGS.get(best.policy, {}), question.setting().costs
    rows = costs.break_even_rows()
    return CachePlan(
        slots=memory.slots,
        ways=best.ways or None,
        indexes=indexes(memory.slots, best.ways, question.model.moe_layers),
        policy=settings.get("cache_policy", "auto"),
        misses=settings.get("misses", "mixed"),
        prefetch=settings.get("prefetch", "auto"),
        hit_rate=1.0 if memory.all_experts else best.hit_rate,
        all_experts=memory.all_experts,
        prefill_threshold=rows + 1 if rows < 1 << 16 else None,
    )


def _speed(outcome: Outcome, *, measured: bool) -> Speed:
    decode, off = outcome.decode_tokens_per_s, _MEASURED if measured else _LOOKED_UP
    return Speed(outcome.tokens_per_s, decode, decode * (1 - off), decode * (1 + off), outcome.ttft_s)


def _alternatives(
    question: Question, best: Outcome, outcomes: list[Outcome], *, measured: bool
) -> tuple[Alternative, ...]:
    found = [
        Alternative(
            one.policy, question.precision, _speed(one, measured=measured), runs_here(one.policy, question.workload)
        )
        for one in outcomes
        if one is not best
    ]
    for precision in question.model.precisions:
        if precision == question.precision:
            continue
        other = quick_best(replace(question, precision=precision))
        if other is not None:
            found.append(Alternative(other.policy, precision, _speed(other, measured=measured), runs_here=True))
    return tuple(sorted(found, key=lambda one: -one.speed.tokens_per_s))


def _does_not_fit(question: Question) -> EngineError:
    """`NOT_ENOUGH_MEMORY`, with the precision that fits, or with the memory that would be needed."""
    model, limits = question.model, question.limits
    here = f"{model.name} does not fit on {question.machine.name}"
    asked = model.expert_bytes(question.precision)
    for precision in (each for each in model.precisions if model.expert_bytes(each) < asked):
        costs = question.setting().costs
        lower = Costs(costs.machine, model, precision)
        if engine_memory(lower, limits, on_card=False) is not None:
            words = _at(model, question.precision)
            return _error(f"{here} {words}: the nearest precision that fits is {model.words(precision)}.")
    asked_for = model.precisions if limits.precision == "auto" else (question.precision,)
    tried = [sizes_of(Costs(question.machine, model, each), limits, [each]) for each in reversed(asked_for)]
    least, sizes = min(((least_ram(each), each) for each in tried), key=lambda each: each[0])
    (weights,) = sizes.weights
    lowest, what = weights.precision, "experts and layers" if weights.in_files else "experts"
    usable = ram_usable(Costs(question.machine, model, lowest), limits)
    needed = _ram_for(question, least)
    on_card = min(dense_in_ram(model, each) for each in asked_for) + footprint.CARD_HEADROOM_BYTES
    return _error(
        f"{here}, even {_at(model, lowest)} with its {what} read from disk. It needs {rounded_up(least)} of RAM, and "
        f"only {rounded_down(usable)} can be used: {rounded_up(needed)} of RAM in total would be enough, or a graphics "
        f"card with {rounded_up(on_card)} for everything but the experts."
    )


def _at(model: ModelShape, precision: str) -> str:
    return model.words(precision) if precision == STORED else f"at {precision}"


def _ram_for(question: Question, least: int) -> int:
    """Total RAM of which `least` bytes are usable."""
    low, high = 0, 1 << 46
    while low < high:
        middle = (low + high) // 2
        machine = question.machine.with_memory(ram_bytes=middle)
        enough = ram_usable(Costs(machine, question.model), replace(question.limits, ram_bytes=None)) >= least
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _error(sentence: str) -> EngineError:
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, sentence)
