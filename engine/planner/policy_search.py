"""Search for MoE-Lightning's policy (N, mu, A_g, F_g, r_w, r_c) by its performance model (section 4.2, eqs. 12-14)."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from engine.checkpoint.model_shape import ModelShape
from engine.planner.costs import Costs
from engine.planner.plan_parts import CHUNKS_TOGETHER, MemoryRule, Workload, share_on_disk, usual_rule
from engine.planner.simulator.sweeps import OffloadPolicy

_CACHED = (0.0, 0.25, 0.5, 0.75, 1.0)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_PARTS, _MORE_PARTS = (1, 2, 4), (1, 2, 4, 8, 16)
"""Of the largest micro-batch, as published, and where the memory of prompts does not limit it."""
PLACES = 2
"""Micro-batches whose keys and values have room on the card: one computes while the next one's arrive."""
PAGE = 32
"""Tokens of a page of keys and values: pages move as a whole."""
_ENOUGH = 0.99


@dataclass(frozen=True, slots=True)
class SearchedPolicy:
    """A policy with its modelled speed.

    Attributes:
        layer_s: T, seconds per layer of a decode step.
        bottleneck: "link", "CPU", "GPU" or "disk".
    """

    policy: OffloadPolicy
    layer_s: float
    bottleneck: str

    @property
    def tokens_per_s_per_layer(self) -> float:
        return self.policy.sequences / self.layer_s


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """T = max(comm, T_cpu, T_gpu) of one layer of a decode step, and what there is memory for."""

    costs: Costs
    workload: Workload
    memory: MemoryRule | None = None

    @property
    def model(self) -> ModelShape:
        return self.costs.model

    @property
    def rule(self) -> MemoryRule:
        return self.memory or usual_rule(self.costs.machine)

    @property
    def layer_bytes(self) -> float:
        return self.model.experts * self.costs.expert_bytes + 2.0 * self.model.layer_weights

    def prefill_bytes_per_token(self) -> float:
        """Peak size of the intermediate tensors of an eager prefill.

        Hidden states, gate, up and down of k experts twice over, 32-bit logits, and the scores of each head in 32 bits
        and as 16-bit probabilities.
        """
        model = self.model
        widths = 6 * model.hidden + 3 * model.experts_per_token * model.expert_width
        scores = 6.0 * model.attention.heads * self.workload.prompt_tokens
        return 2.0 * (2.0 * widths + 2.0 * model.vocabulary) + scores

    @property
    def shares(self) -> list[float]:
        """r_w to try; the engine keeps whole experts of each layer."""
        if self.rule.record is None:
            return list(_SHARES)
        experts = self.model.experts
        return sorted({round(share * experts) / experts for share in _SHARES})

    def micro_batches(self, largest: int) -> list[int]:
        """mu to try."""
        return sorted({max(1, largest // part) for part in (_PARTS if self.rule.record is None else _MORE_PARTS)})

    def micro_batch_bytes(self, cached: float = 0.0) -> float:
        """Bytes on the card for each sequence of a micro-batch: of its prompt, or of keys and values in transfer."""
        if self.rule.record is None:
            return self.prefill_bytes_per_token() * self.workload.prompt_tokens * self.workload.beams
        return PLACES * self.kv_bytes() / self.model.layers * (1.0 - cached)

    def working_bytes(self, policy: OffloadPolicy) -> float:
        """Those of a whole micro-batch; where the CPU attends to answers, only pieces of prompts are sent there."""
        if self.rule.record is None or not policy.cpu_attention:
            return self.micro_batch_bytes(policy.cached) * policy.micro_batch
        prompt = self.workload.prompt_tokens
        at_once = min(self.rule.chunk or prompt, policy.micro_batch * prompt)
        swept = min(policy.sequences * prompt, CHUNKS_TOGETHER * at_once)
        rows = math.ceil(math.ceil(swept / prompt) / math.ceil(swept / at_once))
        pages = math.ceil(prompt / PAGE) * PAGE
        return PLACES * self.model.kv_bytes_per_token() / self.model.layers * pages * rows

    def card_room(self, share: float) -> float:
        """Bytes left on the card after weights (a share stays, the rest goes through two buffers) and the runtime."""
        rule = self.rule
        if rule.record is not None:
            slots = self.model.experts * (self.model.moe_layers * share + 2.0)
            waiting = 2.0 * CHUNKS_TOGETHER * rule.chunk * self.model.hidden
            return rule.card - rule.runtime - waiting - rule.staging - (rule.weights or 0.0) - slots * rule.record
        moving = 2.0 * self.layer_bytes * (1.0 - share) if share < 1 else 0.0
        staying = self.layer_bytes * self.model.layers * share + 2.0 * self.model.embedding_weights
        return rule.card - rule.runtime - staying - moving

    def largest_micro_batch(self, share: float, cached: float = 0.0, *, cpu_attention: bool = False) -> int:
        """The largest mu that fits next to its own share of keys and values."""
        each = self.micro_batch_bytes(cached)
        room = self.card_room(share) - cached * self.kv_bytes()
        many = OffloadPolicy(
            self.workload.sequences, self.workload.sequences, cpu_attention=cpu_attention, cached=cached
        )
        if self.rule.record is not None and self.working_bytes(many) <= room:
            return self.workload.sequences
        return max(0, int(room // each)) if each else 0

    @property
    def sequence_tokens(self) -> int:
        """Of one sequence at its end; where the engine has them in pages, whole ones."""
        tokens = self.workload.prompt_tokens + self.workload.generated_tokens * self.workload.beams
        return tokens if self.rule.record is None else -(-tokens // PAGE) * PAGE

    def kv_bytes(self) -> float:
        """Bytes of one sequence's keys and values at full length."""
        return self.model.context_bytes(self.sequence_tokens)

    def largest_batch(self, cache_on_card: float) -> int:
        """The largest N whose keys and values fit into RAM next to the weights, or in their place, where the engine
        reads experts from disk anyway."""
        weights = self.layer_bytes * self.model.layers
        room, share = self.rule.ram - weights, 1.0 - cache_on_card
        if room < 0 and self.rule.record is not None:
            room = self.rule.ram
        if room < 0:
            return 0
        return int(room / (self.kv_bytes() * share)) if share > 0 else 1 << 20

    def held_bytes(self, policy: OffloadPolicy) -> tuple[float, float]:
        """(bytes on the card beside weights, bytes of keys and values in RAM)."""
        kv = self.kv_bytes() * policy.sequences
        return self.working_bytes(policy) + kv * policy.cached, kv * (1.0 - policy.cached)

    def disk_share(self, policy: OffloadPolicy) -> float:
        """Share of the experts' bytes that has no room in RAM beside keys and values."""
        machine, precision, (_, kv) = self.costs.machine, self.costs.precision, self.held_bytes(policy)
        return share_on_disk(machine, self.model, precision, kv_bytes=kv, rule=self.rule)

    def layer_seconds(self, policy: OffloadPolicy) -> tuple[float, str]:
        """Eqs. 12-14, and the disk: (T, the name of its largest term)."""
        costs, model, sequences = self.costs, self.model, policy.sequences
        count, rows, context = policy.micro_batches, policy.micro_batch, self.workload.mean_context
        visits, used = rows * model.experts_per_token, costs.used_experts(rows)
        on_card = count * costs.gpu_layer(rows, context, cached=not policy.cpu_attention)
        moved = on_host = 0.0
        if policy.cpu_experts:
            on_host += costs.cpu_experts(count * visits, model.experts)
            read = count * used
        else:
            moved += self.layer_bytes * (1.0 - policy.resident)
            on_card += count * costs.gpu_experts(visits, used)
            read = model.experts * (1.0 - policy.resident)
        if policy.cpu_attention:
            moved += 2.0 * sequences * model.hidden
            on_host += count * costs.cpu_attention(rows, context)
        else:
            moved += costs.kv_read_bytes(sequences, context) * (1.0 - policy.cached)
        terms = {"link": costs.h2d(moved), "CPU": on_host, "GPU": on_card}
        terms["disk"] = costs.disk(read * costs.expert_bytes * self.disk_share(policy))
        worst = max(terms, key=lambda name: terms[name])
        return terms[worst], worst


def search_policy(
    costs: Costs, workload: Workload, *, cpu_experts: tuple[bool, ...] = (False, True)
) -> SearchedPolicy | None:
    """The policy of highest throughput; nearly equal ones are decided by the smallest batch, the balance point (eq.
    11).

    Args:
        cpu_experts: values of F_g = 0 to try.

    Returns:
        None if not even one sequence's prefill fits on the card, or the model does not fit into RAM.
    """
    if costs.machine.gpu is None:
        return None
    performance = PerformanceModel(costs, workload)
    places = itertools.product((True, False), cpu_experts)
    return best_of([found for attention, experts in places for found in policies(performance, attention, experts)])


def policies(performance: PerformanceModel, cpu_attention: bool, cpu_experts: bool) -> Iterator[SearchedPolicy]:
    """The grid of N, mu, r_w and, with attention on the card, r_c, as far as they fit."""
    work = performance.workload
    for resident, cached in itertools.product(performance.shares, (0.0,) if cpu_attention else _CACHED):
        kept = cached * performance.kv_bytes()
        largest = performance.largest_micro_batch(resident, cached, cpu_attention=cpu_attention)
        largest = min(largest, work.sequences)
        if largest < 1:
            continue
        for micro_batch in performance.micro_batches(largest):
            # The cache on the card limits how many sequences fit next to a micro-batch.
            room = performance.card_room(resident) - micro_batch * performance.micro_batch_bytes(cached)
            most = int(room // kept) if kept else work.sequences
            limit = min(performance.largest_batch(cached), work.sequences, most)
            count = 1
            while micro_batch * count <= limit:
                policy = OffloadPolicy(micro_batch * count, micro_batch, resident, cpu_attention, cpu_experts, cached)
                yield SearchedPolicy(policy, *performance.layer_seconds(policy))
                count = max(count + 1, int(count * 1.04))


def best_of(found: list[SearchedPolicy]) -> SearchedPolicy | None:
    """The fastest; nearly equal ones are decided by the smallest batch, then by the least memory on the card."""
    if not found:
        return None
    best = max(each.tokens_per_s_per_layer for each in found)
    good = [each for each in found if each.tokens_per_s_per_layer >= _ENOUGH * best]
    return min(good, key=lambda each: (each.policy.sequences, each.policy.resident, each.policy.cached))


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


def fewest_batches(times: BlockTimes) -> int | None:
    """n, the smallest number of batches that satisfies (4) to (7); None if thousands are not enough."""
    most = 4096
    enough = bisect_left(range(most + 1), True, lo=1, key=lambda batches: all(times.inequalities(batches)))
    return enough if enough <= most else None


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
