"""Klotski's planner (its section 7): the fewest batches that hide the transfer of experts to the card."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planner.costs import Costs
from engine.planner.plan_parts import Workload


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Seconds of one MoE block for one batch, measured or modelled.

    Attributes:
        attention, gate: t_c_A, t_c_G, compute time.
        hot: t_c_topk-E, compute time of the K hot experts for one batch.
        cold: sum of t_c_E over the other activated experts, for one batch.
        load_attention, load_gate, load_expert: t_I/O.
        prefetched: K.
        queued: len(Q), activated experts other than the hot ones.
    """

    attention: float
    gate: float
    hot: float
    cold: float
    load_attention: float
    load_gate: float
    load_expert: float
    prefetched: int
    queued: int

    def inequalities(self, batches: int) -> tuple[bool, bool, bool, bool]:
        """(4), (5), (6), (7): whether the weights of each point in the pipeline arrive in time."""
        gated = batches * (self.attention + self.gate)
        hot = self.load_gate + self.prefetched * self.load_expert
        cold = hot + self.load_expert
        everything = self.load_gate + (self.prefetched + self.queued) * self.load_expert + self.load_attention
        return (
            batches * self.attention >= self.load_gate,
            gated >= hot,
            gated + batches * self.hot >= cold,
            gated + batches * (self.hot + self.cold) >= everything,
        )


def fewest_batches(times: BlockTimes, *, at_most: int = 4096) -> int | None:
    """n, the smallest number of batches that satisfies (4) to (7); None if `at_most` are not enough."""
    low, high = 1, at_most
    if not all(times.inequalities(high)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if all(times.inequalities(middle)) else (middle + 1, high)
    return low


def block_times(costs: Costs, workload: Workload, micro_batch: int, resident: float = 0.0) -> BlockTimes:
    """Modelled times of one MoE block in a decode step, for batches of `micro_batch` sequences; K is top-k.

    Args:
        resident: share of each expert that stays on the card.
    """
    model, rows = costs.model, micro_batch * workload.beams
    used = max(1.0, costs.used_experts(rows))
    hot = min(model.experts_per_token, round(used))
    # With skewed popularity, the hot experts get about twice their share of the rows (Klotski, figure 4).
    share = min(1.0, 2.0 * hot / used)
    of_experts = rows * model.experts_per_token
    gate = model.hidden * model.experts
    return BlockTimes(
        attention=costs.gpu_layer(rows, workload.mean_context),
        gate=2.0 * costs.efficiency.operator_s,
        hot=costs.gpu_experts(of_experts * share, hot),
        cold=costs.gpu_experts(of_experts * (1 - share), max(used - hot, 0.0)),
        load_attention=costs.h2d(costs.card_layer_bytes * (1 - gate / model.layer_weights)),
        load_gate=costs.h2d(2.0 * gate),
        load_expert=costs.h2d(costs.expert_bytes * (1 - resident)),
        prefetched=hot,
        queued=max(round(used) - hot, 0),
    )
