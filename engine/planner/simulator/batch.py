"""A batch workload by one schedule: prefill and decode, a few layers span by span and the rest by their period."""

from __future__ import annotations

from dataclasses import replace

from engine.planner.costs import Costs
from engine.planner.simulator.batch_costs import BatchPolicy, PassCosts
from engine.planner.simulator.batch_schedules import LayerState, Schedule
from engine.planner.simulator.outcome import Outcome, utilisation
from engine.planner.simulator.timeline import Timeline
from engine.planner.workload import Workload

_DRAWN_LAYERS = 6


def run_batch(
    name: str,
    schedule: Schedule,
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
    prefill = PassCosts(costs, width * prompt / workload.beams, width, prompt, prefill=True, disk_share=disk_share)
    decode = PassCosts(costs, width, width, workload.mean_context, prefill=False, disk_share=disk_share)
    timeline = Timeline(record=record)
    first = pass_seconds(timeline, schedule, prefill, policy, start_up=True) + costs.gpu_head(policy.sequences)
    decoding = Timeline(record=record)
    step = pass_seconds(decoding, schedule, decode, policy) + costs.gpu_head(policy.sequences * workload.beams)
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
    state = LayerState.beginning(policy)
    ends = []
    for layer in range(drawn):
        state = schedule(timeline, work, policy, state, layer)
        ends.append(state.done)
    settled = min(2, drawn - 1)
    period = (ends[-1] - ends[settled - 1]) / (drawn - settled) if drawn > 1 else ends[0]
    return ends[-1] + (layers - drawn) * period if start_up else layers * period
