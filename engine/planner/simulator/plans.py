"""All policies on one machine, model and workload, and the one that Switchyard would choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from engine.planner import schedules
from engine.planner.costs import Costs
from engine.planner.plan_parts import CHUNKS_TOGETHER, Workload, card_memory, usual_rule, with_all_visits
from engine.planner.policy_search import PAGE, PerformanceModel, best_of, block_times, fewest_batches, policies
from engine.planner.schedules import Schedule
from engine.planner.simulator.request import Outcome, utilisation
from engine.planner.simulator.requests import Setting, run_requests
from engine.planner.simulator.strategy import IDEAL_PREFETCH, OWN, PUBLISHED, Residency, Strategy
from engine.planner.simulator.sweeps import OffloadPolicy, PassCosts, SimulatedCard, Timeline

DEEPSPEED, FLEXGEN_S4, FLEXGEN_S3 = "DeepSpeed", "FlexGen (S4)", "FlexGen, CPU attention (S3)"
CGOPIPE, KLOTSKI = "MoE-Lightning (CGOPipe)", "Klotski"
_CPU_ATTENTION = (FLEXGEN_S3, CGOPIPE)
_MOST_KLOTSKI_BATCHES = 15
"""Where Klotski's inequalities need fewer, as many batches as its authors used are tried too."""
_DRAWN_LAYERS = 6


@dataclass(frozen=True, slots=True)
class BatchSystem:
    """How a system runs batches.

    Attributes:
        prefill, decode: its schedules.
        expanded_attention, pinned, page_tokens, dense_stays: see `PassCosts`.
    """

    prefill: Schedule
    decode: Schedule
    expanded_attention: bool = False
    pinned: bool = True
    page_tokens: int = 1
    dense_stays: bool = False


def run_batches(name: str, setting: Setting, *, record: bool = False) -> Iterator[Outcome]:
    """The outcome of a workload under one schedule, for each policy that fits and is worth trying."""
    if setting.costs.machine.gpu is None:
        return
    performance = performance_of(name, setting)
    for policy in policies_to_try(name, performance, setting):
        if performance.held_bytes(policy)[1] <= performance.rule.ram:
            system = system_of(name, policy, own=performance.rule.record is not None)
            yield run_planned(name, system, performance, policy, record=record)


def performance_of(name: str, setting: Setting) -> PerformanceModel:
    """Of a policy, with the memory that its schedule leaves."""
    rule = setting.rule or usual_rule(setting.costs.machine)
    if name == KLOTSKI:
        rule = with_all_visits(rule, setting.costs.model)
    return PerformanceModel(setting.costs, setting.workload, rule)


def run_planned(
    name: str, system: BatchSystem, performance: PerformanceModel, policy: OffloadPolicy, *, record: bool = False
) -> Outcome:
    """`run_batch` with this memory."""
    rule = performance.rule
    return run_batch(
        name,
        system,
        performance.costs,
        performance.workload,
        policy,
        chunk=rule.chunk,
        disk_share=performance.disk_share(policy),
        vram_bytes=rule.card - performance.card_room(policy.resident) + performance.held_bytes(policy)[0],
        record=record,
    )


def system_of(name: str, policy: OffloadPolicy, *, own: bool = False) -> BatchSystem:
    """The system that runs a policy; the simulator and the executor use the same schedules.

    Args:
        own: by this engine, which moves whole pages of keys and values, and of the weights only experts.
    """
    if own:
        return replace(system_of(name, policy), page_tokens=PAGE, dense_stays=True)
    if name == FLEXGEN_S3:
        return BatchSystem(schedules.S4, schedules.S3, expanded_attention=True)
    if name == KLOTSKI:
        return BatchSystem(schedules.KLOTSKI_ON_CARD, schedules.KLOTSKI_ON_CARD)
    if name == CGOPIPE and policy.cpu_experts:
        order = schedules.CPU_EXPERTS if policy.cpu_attention else schedules.CPU_EXPERTS_ON_CARD
        return BatchSystem(schedules.S4, order)
    return BatchSystem(schedules.S4, schedules.CGOPIPE if policy.cpu_attention else schedules.S4)


def policies_to_try(name: str, performance: PerformanceModel, setting: Setting) -> list[OffloadPolicy]:
    """Policies without duplicates; none if not even one sequence fits on the card."""
    tried = [] if setting.even_only else list(_searched(name, performance))
    for share in sorted({0.0, *(policy.resident for policy in tried)}):
        tried += _grid(name, performance, setting, share)
    return list(dict.fromkeys(tried))


def _searched(name: str, performance: PerformanceModel) -> Iterator[OffloadPolicy]:
    """The best policy by eqs. 12 to 14, for each placement of attention and experts that the schedule supports."""
    if name == DEEPSPEED:
        return
    places = [(name in _CPU_ATTENTION, False)]
    if name == CGOPIPE:
        places = [(True, False), (False, False), (True, True), (False, True)]
    for cpu_attention, cpu_experts in places:
        found = best_of(list(policies(performance, cpu_attention, cpu_experts)))
        if found is not None:
            yield found.policy


def _grid(name: str, performance: PerformanceModel, setting: Setting, share: float) -> Iterator[OffloadPolicy]:
    """The largest micro-batch, with several numbers of micro-batches."""
    work = performance.workload
    # DeepSpeed keeps its cache on the card.
    kept = performance.kv_bytes() if name == DEEPSPEED else 0.0
    per_sequence = performance.micro_batch_bytes() + kept
    largest = int(max(performance.card_room(share), 0.0) // per_sequence)
    if largest < 1:
        return
    sizes = [min(largest, work.sequences)]
    if performance.rule.record is not None and name != DEEPSPEED:
        sizes = performance.micro_batches(sizes[0])
    for micro_batch in sizes:
        for count in _counts(name, setting, micro_batch, share):
            yield OffloadPolicy(
                min(micro_batch * count, work.sequences),
                micro_batch,
                share,
                cpu_attention=name in _CPU_ATTENTION,
                cached=1.0 if name == DEEPSPEED else 0.0,
            )


def _counts(name: str, setting: Setting, micro_batch: int, share: float) -> list[int]:
    most = -(-setting.workload.sequences // micro_batch)
    if name == DEEPSPEED:
        return [1]
    if name == KLOTSKI:
        hiding = fewest_batches(block_times(setting.costs, setting.workload, micro_batch, share))
        return sorted({1, min(most, hiding or most), min(most, _MOST_KLOTSKI_BATCHES)})
    return sorted({1, min(most, 4), min(most, 15), most})


def run_batch(
    name: str,
    system: BatchSystem,
    costs: Costs,
    workload: Workload,
    policy: OffloadPolicy,
    *,
    chunk: int = 0,
    disk_share: float = 0.0,
    vram_bytes: float = 0.0,
    record: bool = False,
) -> Outcome:
    """Simulates a workload of equal sequences, in as many batches as needed.

    All layers of a pass repeat, so a few are simulated and the rest follow from the last two.  Decode steps grow
    linearly with the context, so the mean step stands for all.

    Args:
        chunk: prompt tokens that a micro-batch reads at most, `CHUNKS_TOGETHER` of which share a pass; 0: all prompts
            are read in one.
        disk_share: share of the weights that is read from disk in every pass.
        vram_bytes: card memory of the policy, copied to the outcome.
    """
    prompt = workload.prompt_tokens
    width = policy.micro_batch * workload.beams
    kernels = (disk_share, system.expanded_attention, system.pinned, system.page_tokens, system.dense_stays)
    at_once = min(chunk or policy.micro_batch * prompt, policy.micro_batch * prompt)
    swept = min(policy.sequences * prompt, CHUNKS_TOGETHER * at_once) if chunk else policy.sequences * prompt
    reading = OffloadPolicy(-(-swept // at_once), 1, policy.resident, cached=policy.cached) if chunk else policy
    rows = swept / reading.micro_batches if chunk else width * prompt / workload.beams
    prefill = PassCosts(costs, rows, max(1.0, rows / prompt) if chunk else width, prompt, True, *kernels)
    decode = PassCosts(costs, width, width, workload.mean_context, False, *kernels)
    timeline = Timeline(record=record)
    passes = policy.sequences * prompt / swept
    first = passes * pass_seconds(timeline, system.prefill, prefill, reading, start_up=True)
    first += costs.gpu_head(policy.sequences)
    decoding = Timeline(record=record)
    step = pass_seconds(decoding, system.decode, decode, policy) + costs.gpu_head(policy.sequences * workload.beams)
    rounds = workload.sequences / policy.sequences
    seconds = rounds * (first + step * max(workload.generated_tokens - 1, 0))
    timeline.mark("prefill", 0.0, timeline.end, count=policy.sequences * prompt)
    decoding.mark("batch step", 0.0, decoding.end, step=0, count=policy.sequences * workload.beams)
    later = [replace(s, start=s.start + first, end=s.end + first, ready=s.ready + first) for s in decoding.spans]
    kept = costs.model.kv_bytes_per_token() * policy.sequences * (prompt + workload.generated_tokens)
    weights = costs.model.all_expert_bytes(costs.precision) + costs.model.non_expert_bytes()
    return Outcome(
        policy=name,
        seconds=seconds,
        ttft_s=first,
        tpot_s=step,
        tokens_out=workload.tokens_out,
        vram_bytes=vram_bytes,
        ram_bytes=weights + kept * workload.beams,
        utilisation=utilisation(decoding),
        spans=(*timeline.spans, *later),
        batch=policy,
    )


def pass_seconds(
    timeline: Timeline, schedule: Schedule, work: PassCosts, policy: OffloadPolicy, *, start_up: bool = False
) -> float:
    """One pass over all layers.

    Args:
        start_up: the pass is the first one and its first layers wait for an empty pipeline to fill; else it is in the
            steady state that consecutive passes reach.
    """
    layers = work.costs.model.layers
    drawn = min(layers, _DRAWN_LAYERS)
    card = SimulatedCard(timeline)
    times = work.times(policy)
    card.put(0, times)
    card.sweep(schedule, times, drawn)
    ends = card.ends
    if drawn < 2:
        return layers * ends[-1]
    # The last simulated layer has no successor whose micro-batches could start meanwhile.
    first, last = (1, drawn - 2) if drawn > 3 else (0, drawn - 1)
    period = (ends[last] - ends[first]) / (last - first)
    return ends[-1] + (layers - drawn) * period if start_up else layers * period


SWITCHYARD = "Switchyard"

BATCH_SYSTEMS = (DEEPSPEED, FLEXGEN_S4, FLEXGEN_S3, CGOPIPE, KLOTSKI)
"""Policies of many sequences."""

REQUEST_STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in (*PUBLISHED, *OWN)}
"""Schedules of single requests, by policy."""

POLICIES = (*REQUEST_STRATEGIES, *BATCH_SYSTEMS)
"""All policies."""
POLICY_NAMES = (SWITCHYARD, *POLICIES)


def run_policy(name: str, setting: Setting, *, record: bool = False) -> Outcome | None:
    """One policy at its best: the number of cache ways or the batch size that suits it best.

    Returns:
        None if the model does not fit under this policy.

    Raises:
        KeyError: no such policy.
    """
    if name == SWITCHYARD:
        return switchyard(run_all(setting), setting, record=record)
    tried = list(_candidates(name, setting, record=False))
    if not tried:
        return None
    best = max(range(len(tried)), key=lambda index: tried[index].tokens_per_s)
    if not record:
        return tried[best]
    return list(_candidates(name, setting, record=True))[best]


def run_all(setting: Setting, names: Iterable[str] | None = None) -> list[Outcome]:
    """Every policy that fits, or those of `names` that fit, the fastest first."""
    names = POLICIES if names is None else names
    outcomes = [run_policy(name, setting) for name in names]
    return sorted((outcome for outcome in outcomes if outcome), key=lambda outcome: -outcome.tokens_per_s)


def switchyard(outcomes: list[Outcome], setting: Setting, *, record: bool = False) -> Outcome | None:
    """Switchyard's choice: the fastest of all policies, published ones and its own.

    Args:
        outcomes: from `run_all`.
    """
    if not outcomes:
        return None
    best = outcomes[0]
    drawn = run_policy(best.policy, setting, record=True) if record else best
    assert drawn is not None
    return replace(drawn, policy=f"{SWITCHYARD}: {best.policy}")


def _candidates(name: str, setting: Setting, *, record: bool) -> Iterator[Outcome]:
    if name in REQUEST_STRATEGIES:
        strategy = REQUEST_STRATEGIES[name]
        ways = _ways(setting) if strategy.residency is Residency.CACHE else [0]
        for count in ways:
            outcome = run_requests(strategy, replace(setting, ways=count), record=record)
            if outcome is not None:
                yield outcome
        return
    if name not in BATCH_SYSTEMS:
        raise KeyError(name)
    yield from run_batches(name, setting, record=record)


def _ways(setting: Setting) -> list[int]:
    """Slots spread evenly over all layers, and fuller sets for the first layers only (CPU-GPU Collaborative, IV-C)."""
    if setting.ways or setting.even_only:
        return [setting.ways]
    model, experts = setting.costs.model, setting.costs.model.experts
    machine, precision = setting.costs.machine, setting.costs.precision
    if card_memory(machine, model, precision, cached_tokens=0, rule=setting.rule).for_experts >= (
        model.all_expert_bytes(setting.costs.precision) * 1.5
    ):
        return [0]
    return sorted({0, max(1, experts // 4), max(1, experts // 2), experts})


def bounds(setting: Setting) -> list[Outcome]:
    """The upper bound of a schedule that knows each layer's experts one layer ahead."""
    outcome = run_requests(IDEAL_PREFETCH, setting)
    return [outcome] if outcome else []
