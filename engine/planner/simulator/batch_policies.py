"""The sizes that each batch schedule is run with: MoE-Lightning's search, Klotski's fewest batches, plain grids."""

from __future__ import annotations

from collections.abc import Iterator

from engine.formats import format_of
from engine.planner import schedules
from engine.planner.klotski import block_times, fewest_batches
from engine.planner.memory import share_on_disk, usual_rule
from engine.planner.policy_search import PerformanceModel, SearchedPolicy, best_of, policies
from engine.planner.simulator.batch import BatchSystem, run_batch
from engine.planner.simulator.batch_costs import BatchPolicy
from engine.planner.simulator.outcome import Outcome
from engine.planner.simulator.requests import Setting

DEEPSPEED, FLEXGEN_S4, FLEXGEN_S3 = "DeepSpeed", "FlexGen (S4)", "FlexGen, CPU attention (S3)"
CGOPIPE, KLOTSKI = "MoE-Lightning (CGOPipe)", "Klotski"
_CPU_ATTENTION = (FLEXGEN_S3, CGOPIPE)
_MOST_KLOTSKI_BATCHES = 15
"""Where its inequalities ask for fewer, as many as its authors ran are tried too."""


def run_batches(name: str, setting: Setting, *, record: bool = False) -> Iterator[Outcome]:
    """A workload by one schedule with each policy that is worth a try and fits."""
    costs, work = setting.costs, setting.workload
    machine, model = costs.machine, costs.model
    if machine.gpu is None:
        return
    performance = PerformanceModel(machine, model, work, format_of(costs.precision).bytes_per_weight, setting.rule)
    rule = setting.rule or usual_rule(machine)
    for policy in policies_to_try(name, performance, setting):
        kv = performance.kv_bytes() * policy.sequences
        in_ram = kv * (1 - policy.cached)
        if in_ram > rule.ram:
            continue
        prefill = performance.prefill_bytes_per_token() * work.prompt_tokens * work.beams
        on_card = prefill * policy.micro_batch + kv * policy.cached
        yield run_batch(
            name,
            system_of(name, policy),
            costs,
            work,
            policy,
            disk_share=share_on_disk(machine, model, costs.precision, kv_bytes=in_ram, rule=rule),
            vram_bytes=rule.card - performance.card_room(policy.resident) + on_card,
            record=record,
        )


def system_of(name: str, policy: BatchPolicy) -> BatchSystem:
    """What runs a policy: the simulator by its schedules, and the executor, which is given the same."""
    if name == FLEXGEN_S3:
        return BatchSystem(schedules.S4, schedules.S3, expanded_attention=True)
    if name == KLOTSKI:
        return BatchSystem(schedules.KLOTSKI_ON_CARD, schedules.KLOTSKI_ON_CARD)
    if name == CGOPIPE and policy.cpu_experts:
        order = schedules.CPU_EXPERTS if policy.cpu_attention else schedules.CPU_EXPERTS_ON_CARD
        return BatchSystem(schedules.S4, order)
    return BatchSystem(schedules.S4, schedules.CGOPIPE if policy.cpu_attention else schedules.S4)


def policies_to_try(name: str, performance: PerformanceModel, setting: Setting) -> list[BatchPolicy]:
    """Without repetitions; none if not even one sequence fits on the card."""
    tried = [] if setting.even_only else list(_searched(name, performance, cache_in_ram=setting.cache_in_ram))
    for share in sorted({0.0, *(policy.resident for policy in tried)}):
        tried += _grid(name, performance, setting, share)
    return list(dict.fromkeys(tried))


def _searched(name: str, performance: PerformanceModel, *, cache_in_ram: bool) -> Iterator[BatchPolicy]:
    """What eqs. 12 to 14 find best, for every place of attention and experts that the schedule knows."""
    if name == DEEPSPEED:
        return
    places = [(name not in _CPU_ATTENTION, True)]
    if name == CGOPIPE:
        places = [(False, True), (True, True), (False, False), (True, False)]
    for attention_on_card, experts_on_card in places:
        found = best_of(list(policies(performance, attention_on_card, experts_on_card, cache_in_ram=cache_in_ram)))
        if found is not None:
            yield _as_run(found)


def _as_run(found: SearchedPolicy) -> BatchPolicy:
    return BatchPolicy(
        found.sequences,
        found.micro_batch,
        found.weights_on_card,
        cpu_attention=not found.attention_on_card,
        cpu_experts=not found.experts_on_card,
        cached=found.cache_on_card,
    )


def _grid(name: str, performance: PerformanceModel, setting: Setting, share: float) -> Iterator[BatchPolicy]:
    """The largest micro-batch, and several numbers of them."""
    work = performance.workload
    # DeepSpeed's cache is on the card.
    kept = performance.kv_bytes() if name == DEEPSPEED else 0.0
    per_sequence = performance.prefill_bytes_per_token() * work.prompt_tokens * work.beams + kept
    largest = int(max(performance.card_room(share), 0.0) // per_sequence)
    if largest < 1:
        return
    micro_batch = min(largest, work.sequences)
    for count in _counts(name, setting, micro_batch, share):
        yield BatchPolicy(
            min(micro_batch * count, work.sequences),
            micro_batch,
            share,
            cpu_attention=name in _CPU_ATTENTION,
            cached=1.0 if name == DEEPSPEED else 0.0,
        )


def _counts(name: str, setting: Setting, micro_batch: int, share: float) -> list[int]:
    """Numbers of micro-batches."""
    most = -(-setting.workload.sequences // micro_batch)
    if name == DEEPSPEED:
        return [1]
    if name == KLOTSKI:
        hiding = fewest_batches(block_times(setting.costs, setting.workload, micro_batch, share))
        return sorted({1, min(most, hiding or most), min(most, _MOST_KLOTSKI_BATCHES)})
    return sorted({1, min(most, 4), min(most, 15), most})
