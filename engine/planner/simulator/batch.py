"""A batch workload by one schedule: prefill and decode, a few layers span by span and the rest by their period."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.planner.costs import Costs
from engine.planner.schedules import Schedule
from engine.planner.simulator.batch_costs import BatchPolicy, PassCosts
from engine.planner.simulator.outcome import Outcome, utilisation
from engine.planner.simulator.sweeps import SimulatedCard
from engine.planner.simulator.timeline import Timeline
from engine.planner.workload import Workload

_DRAWN_LAYERS = 6


@dataclass(frozen=True, slots=True)
class BatchSystem:
    """How a system runs batches.

    Attributes:
        prefill, decode: its schedules.
        expanded_attention, pinned: see `PassCosts`.
    """

    prefill: Schedule
    decode: Schedule
    expanded_attention: bool = False
    pinned: bool = True


def run_batch(
    name: str,
    system: BatchSystem,
    costs: Costs,
    workload: Workload,
    policy: BatchPolicy,
    *,
    disk_share: float = 0.0,
    vram_bytes: float = 0.0,
    record: bool = False,
) -> Outcome:
    """Simulates a workload of equal sequences, in as many batches as it takes.

    Every layer of a pass repeats the one before, so a few are simulated and the rest follow from the last two; decode
    steps grow evenly with the context, so the mean one stands for all.

    Args:
        disk_share: share of the weights that comes from disk in every pass.
        vram_bytes: that the policy takes on the card, passed on to the outcome.
    """
    prompt = workload.prompt_tokens
    width = policy.micro_batch * workload.beams
    kernels = (disk_share, system.expanded_attention, system.pinned)
    prefill = PassCosts(costs, width * prompt / workload.beams, width, prompt, True, *kernels)
    decode = PassCosts(costs, width, width, workload.mean_context, False, *kernels)
    timeline = Timeline(record=record)
    first = pass_seconds(timeline, system.prefill, prefill, policy, start_up=True) + costs.gpu_head(policy.sequences)
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
    timeline: Timeline, schedule: Schedule, work: PassCosts, policy: BatchPolicy, *, start_up: bool = False
) -> float:
    """One pass over all layers.

    Args:
        start_up: the pass is the first one, and its first layers wait for a pipeline that is still empty; else it is
            in the steady state that consecutive passes reach.
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
    # The last of the drawn layers has no successor whose micro-batches begin meanwhile.
    first, last = (1, drawn - 2) if drawn > 3 else (0, drawn - 1)
    period = (ends[last] - ends[first]) / (last - first)
    return ends[-1] + (layers - drawn) * period if start_up else layers * period
