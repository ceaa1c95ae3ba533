"""Times of a micro-batch's parts, and of a layer's weights on their way: what every batch schedule is made of."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planner.costs import Costs
from engine.planner.simulator.timeline import Timeline


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """MoE-Lightning's policy (table 1), Klotski's n with it.

    Attributes:
        sequences: N, of one batch.
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


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Experts of a layer that `tokens` tokens use between them, if all are alike."""
    if tokens <= 0:
        return 0.0
    unused: float = (1.0 - per_token / experts) ** tokens
    return experts * (1.0 - unused)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """One pass of a batch over one layer.

    Attributes:
        costs: of single operations.
        rows: tokens of one micro-batch: its sequences in decode, sequences x prompt in prefill.
        sequences: of one micro-batch.
        context: tokens that each row sees.
        prefill: whether rows are prompts.
        disk_share: share of the weights that comes from disk in every pass.
    """

    costs: Costs
    rows: float
    sequences: float
    context: float
    prefill: bool
    disk_share: float = 0.0

    def fetch(self, timeline: Timeline, nbytes: float, name: str, after: float, layer: int) -> float:
        """Issues weights on their way to the card: from disk as far as they lie there, then over the link."""
        there = after
        if self.disk_share:
            there = timeline.run("disk", self.costs.disk(nbytes * self.disk_share), name, layer=layer, nbytes=nbytes)
        return timeline.run("h2d", self.costs.h2d(nbytes), name, max(there, after), layer=layer, nbytes=nbytes)

    def layer_bytes(self) -> float:
        """All weights of one layer."""
        model = self.costs.model
        return model.experts * self.costs.expert_bytes + 2.0 * model.layer_weights

    def fetch_cache(self, timeline: Timeline, policy: BatchPolicy, after: float, layer: int) -> float:
        """Issues one micro-batch's keys and values on their way to the card, as far as they are not there."""
        nbytes = self.cached() * (1 - policy.cached)
        seconds = self.costs.h2d(nbytes) if nbytes else 0.0
        return timeline.run("h2d", seconds, "kv", after, layer=layer, nbytes=nbytes)

    def store_cache(self, timeline: Timeline, policy: BatchPolicy, after: float, layer: int) -> None:
        """Issues its new keys and values on their way into RAM."""
        nbytes = self.new_cache() * (1 - policy.cached)
        seconds = self.costs.d2h(nbytes) if nbytes else 0.0
        timeline.run("d2h", seconds, "kv", after, layer=layer, nbytes=nbytes)

    def used(self) -> float:
        """Experts that one micro-batch uses."""
        model = self.costs.model
        return distinct_experts(model.experts, model.experts_per_token, self.rows)

    def experts(self) -> float:
        """The feed-forward part of one micro-batch on the card."""
        return self.costs.gpu_experts(self.rows * self.costs.model.experts_per_token, self.used())

    def cpu_experts(self) -> float:
        """The same on the CPU."""
        return self.costs.cpu_experts(self.rows * self.costs.model.experts_per_token, self.used())

    def attention(self) -> float:
        """Projections, attention and router of one micro-batch on the card."""
        if self.prefill:
            # Causal: a row sees half of the prompt on average.
            return self.costs.gpu_layer(self.rows, self.context / 2, prompts=self.sequences)
        return self.costs.gpu_layer(self.rows, self.context)

    def projections(self) -> float:
        """The same without attention itself."""
        return self.costs.gpu_layer(self.rows, 0, cached=False)

    def cached(self) -> float:
        """Bytes of one layer's cache of one micro-batch."""
        return self.costs.kv_read_bytes(self.sequences, self.context)

    def new_cache(self) -> float:
        """Bytes that one micro-batch adds to it."""
        return self.costs.kv_read_bytes(self.rows, 1)

    def queries(self) -> float:
        """Bytes of one micro-batch's queries, keys and values."""
        attention = self.costs.model.attention
        return self.rows * 2.0 * (attention.heads * attention.head_dim + attention.kv_elements)

    def hidden(self) -> float:
        return 2.0 * self.rows * self.costs.model.hidden
