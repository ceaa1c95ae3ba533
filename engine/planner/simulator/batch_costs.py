"""Modelled times of a layer of a batch, the input of every batch schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.planner.costs import Cards, Costs, most_on_one
from engine.planner.simulator.sweeps import CopyCost, LayerTimes

_ROUTED_BYTES = 8
"""Of a row's choice of an expert: its number and its share."""


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """MoE-Lightning's policy (table 1), which also fixes Klotski's n.

    Attributes:
        sequences: N, sequences of one batch.
        micro_batch: mu, sequences of one kernel launch.
        resident: r_w, share of each layer's weights that stays on the card.
        cpu_attention: A_g = 0.
        cpu_experts: F_g = 0.
        cached: r_c, share of the keys and values that stays on the card.
    """

    sequences: int
    micro_batch: int
    resident: float = 0.0
    cpu_attention: bool = True
    cpu_experts: bool = False
    cached: float = 0.0

    @property
    def micro_batches(self) -> int:
        return -(-self.sequences // self.micro_batch)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """One pass of a batch over one layer.

    Attributes:
        costs: costs of single operations.
        rows: tokens of one micro-batch: its sequences in decode, sequences x prompt in prefill.
        sequences: sequences of one micro-batch.
        context: context tokens of each row.
        prefill: whether rows are prompt tokens.
        disk_share: share of the weights that is read from disk in every pass.
        expanded_attention: CPU attention repeats keys and values for every query head (`Costs.cpu_attention`).
        pinned: weights are in pinned memory.
        page_tokens: of a page of keys and values, which moves as a whole.
        dense_stays: all weights but the experts stay on the card.
    """

    costs: Costs
    rows: float
    sequences: float
    context: float
    prefill: bool
    disk_share: float = 0.0
    expanded_attention: bool = False
    pinned: bool = True
    page_tokens: int = 1
    dense_stays: bool = False

    def times(self, policy: OffloadPolicy) -> LayerTimes:
        costs, model, count = self.costs, self.costs.model, policy.micro_batches
        used = costs.used_experts(self.rows)
        wanted = max(1, round(costs.used_experts(self.rows * count)))
        brought = wanted
        if costs.cards is Cards.EXPERTS:  # as if all cards had as many as the busiest one
            cards = costs.expert_cards
            brought = min(model.experts, round(cards * most_on_one(wanted, cards, model.experts)))
        visits = self.rows * model.experts_per_token
        projections = costs.gpu_layer(self.rows, 0, cached=False)
        states = model.attention.heads * model.attention.head_dim + model.attention.kv_elements
        moved, page = self.context, self.page_tokens
        if page > 1:  # the token's own is new
            moved = math.ceil((moved - 1) / page) * page
        cached = 0.0 if self.prefill else costs.kv_read_bytes(self.sequences, moved)
        leaving, away = costs.kv_read_bytes(self.rows, 1) * (1 - policy.cached), 1 - policy.resident
        hidden, attended = 2.0 * model.hidden, 2.0 * model.attention.heads * model.attention.head_dim
        on_host = visits * away
        # Cards that share experts share heads of keys and values, too.
        is_cut = costs.cards is Cards.EXPERTS and not model.attention.latent
        heads = min(costs.expert_cards, model.attention.kv_heads) if is_cut else 1
        return LayerTimes(
            count,
            before_s=projections,
            attention_s=costs.cpu_attention(self.sequences, self.context, expanded=self.expanded_attention),
            card_attention_s=self._attention() / heads + costs.together(self.rows, heads),
            experts_s=costs.gpu_experts(visits, used),
            expert_s=self._one_of(costs.gpu_experts(visits * count / wanted)),
            host_experts_s=costs.cpu_experts(on_host, used * away),
            host_disk_s=costs.disk(used * costs.expert_bytes * self.disk_share) if self.disk_share else 0.0,
            queries=_to_ram(costs, 2.0 * self.rows * states),
            attended=_to_card(costs, self.rows * attended),
            hidden=_to_ram(costs, self.rows * hidden + visits * _ROUTED_BYTES),
            outputs=_to_card(costs, on_host * hidden),
            cache=_to_card(costs, cached * (1 - policy.cached) / heads),
            new_cache=_to_ram(costs, leaving / heads),
            dense=CopyCost() if self.dense_stays else self._weights(costs.card_layer_bytes * away),
            expert=self._weights(costs.expert_bytes * away, costs.h2d_of_experts),
            experts=model.experts,
            wanted=brought,
            hot=min(model.experts_per_token, brought),
        )

    def _attention(self) -> float:
        if self.prefill:
            # Causal: on average a row attends to half of the prompt.
            return self.costs.card_attention(self.rows, self.context / 2, prompts=self.sequences)
        return self.costs.card_attention(self.rows, self.context)

    def _one_of(self, seconds: float) -> float:
        """Of one expert after another, where each card computes its own."""
        return seconds / self.costs.expert_cards if self.costs.cards is Cards.EXPERTS else seconds

    def _weights(self, nbytes: float, copied: Callable[..., float] | None = None) -> CopyCost:
        disk_s = self.costs.disk(nbytes * self.disk_share) if self.disk_share else 0.0
        copied = copied or self.costs.h2d
        return CopyCost(copied(nbytes, pinned=self.pinned), nbytes, disk_s) if nbytes else CopyCost()


def _to_card(costs: Costs, nbytes: float) -> CopyCost:
    return CopyCost(costs.h2d(nbytes), nbytes) if nbytes else CopyCost()


def _to_ram(costs: Costs, nbytes: float) -> CopyCost:
    return CopyCost(costs.d2h(nbytes), nbytes) if nbytes else CopyCost()
