"""How fast a job of many rows will be: rows share each sweep through the weights, here without a card.

On a card the simulated schedules say it (`plan_batch`); both become the same few figures for people.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.planner.costs import Costs
from engine.planner.simulator.batch_costs import distinct_experts

ROWS_TOGETHER = 256
"""Rows that are under way together at most, if nobody has planned it."""
SWEEP_TOKENS = 1024
"""Of prompts, read in one sweep through the layers beside the rows that decode."""
MEASURED_OFF, LOOKED_UP_OFF = 0.25, 0.5
"""How far a prediction may be off, as a share: on a machine that was measured, and on one that was not."""
_SEEN = 0.5
"""Of its prompt, what a token sees on average."""


class Bottleneck(StrEnum):
    """What a sweep spends most of its time on."""

    ARITHMETIC = "arithmetic"
    WEIGHTS = "weights"
    """Reading weights from RAM."""
    ATTENTION = "attention"
    DISK = "disk"
    LINK = "link"
    CARD = "card"


@dataclass(frozen=True, slots=True)
class JobRows:
    """What is known of a job's rows before it runs.

    Attributes:
        rows: how many.
        prompt_tokens, generated_tokens: of a row, on average; what is generated is a guess, or a limit.
    """

    rows: int
    prompt_tokens: float
    generated_tokens: float


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """A job before it has run.

    Attributes:
        job: what it was predicted for.
        rows_together: N, rows that share each weight load.
        micro_batches: n, the pieces that they go through a layer in.
        schedule: whose order of a layer's work; empty on the CPU.
        tokens_per_s: generated, prompts counted in the time; `low` and `high` are its range.
        seconds_low, seconds_high: for all rows, if answers are as long as was assumed.
        bottleneck: what limits it.
        is_measured: whether answers of the job have been timed for it.
    """

    job: JobRows
    rows_together: int
    micro_batches: int
    schedule: str
    tokens_per_s: float
    low: float
    high: float
    seconds_low: float
    seconds_high: float
    bottleneck: Bottleneck
    is_measured: bool = False

    def corrected(self, factor: float, off: float) -> JobPrediction:
        """The same where a few real rows were so many times as fast as predicted.

        A few rows spend their time on reading weights, many on arithmetic: how wrong the one was predicted says only in
        part how wrong the other was.  So the range reaches from the lower of both, less `off`, a share, to what was
        predicted at most or to what was seen and `off` more; the rate is between them.
        """
        seen = self.tokens_per_s * factor
        low, high = min(self.tokens_per_s, seen) * (1 - off), max(self.high, seen * (1 + off))
        tokens = self.job.rows * self.job.generated_tokens
        return replace(
            self,
            tokens_per_s=(self.tokens_per_s * seen) ** 0.5,
            low=low,
            high=high,
            seconds_low=tokens / high,
            seconds_high=tokens / low,
            is_measured=True,
        )


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Seconds of one sweep, by what takes them."""

    parts: dict[Bottleneck, float]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def times(self, count: float) -> _Sweep:
        return _Sweep({name: count * value for name, value in self.parts.items()})

    def plus(self, other: _Sweep) -> _Sweep:
        return _Sweep({name: value + other.parts[name] for name, value in self.parts.items()})


def predict_on_cpu(
    costs: Costs, job: JobRows, rows_together: int, *, sweep_tokens: int, disk_share: float = 0.0, off: float = 0.4
) -> JobPrediction:
    """Continuous batching without a card: weights are read once for all rows of a sweep.

    Args:
        rows_together: at most; no more than there are rows.
        sweep_tokens: of prompts, read in one sweep.
        disk_share: of the experts, read again in each sweep.
        off: how far a prediction may be off, as a share.

    Raises:
        ValueError: there is no row, or a row without a token.
    """
    together = min(rows_together, job.rows)
    if together < 1 or job.prompt_tokens <= 0 or job.generated_tokens <= 0:
        raise ValueError(f"no rows to predict: {job}")
    piece = min(float(sweep_tokens), job.prompt_tokens * job.rows)
    prompts = max(1.0, piece / job.prompt_tokens)
    reading = _sweep(costs, piece, job.prompt_tokens * _SEEN, prompts, prompts, disk_share)
    context = job.prompt_tokens + (job.generated_tokens + 1) / 2
    decoding = _sweep(costs, together, context, 0.0, together, disk_share)
    sweeps = max(0.0, job.generated_tokens - 1) * job.rows / together
    whole = reading.times(job.rows * job.prompt_tokens / piece).plus(decoding.times(sweeps))
    worst = max(whole.parts, key=lambda name: whole.parts[name])
    return _told(job, together, 1, "", job.rows * job.generated_tokens / whole.seconds, off, worst)


def predicted_on_card(
    job: JobRows, rows_together: int, micro_batches: int, schedule: str, tokens_per_s: float, lane: str, off: float
) -> JobPrediction:
    """What a simulated schedule says of a job.

    Args:
        lane: the busiest one of `engine.planner.simulator.timeline.LANES`.
    """
    by_lane = {
        "h2d": Bottleneck.LINK,
        "d2h": Bottleneck.LINK,
        "disk": Bottleneck.DISK,
        "cpu_attention": Bottleneck.ATTENTION,
        "cpu_experts": Bottleneck.WEIGHTS,
    }
    bottleneck = by_lane.get(lane, Bottleneck.CARD)
    return _told(job, min(rows_together, job.rows), micro_batches, schedule, tokens_per_s, off, bottleneck)


def _told(
    job: JobRows, together: int, count: int, schedule: str, rate: float, off: float, bottleneck: Bottleneck
) -> JobPrediction:
    low, high = rate * (1 - off), rate * (1 + off)
    tokens = job.rows * job.generated_tokens
    return JobPrediction(job, together, count, schedule, rate, low, high, tokens / high, tokens / low, bottleneck)


def _sweep(costs: Costs, tokens: float, context: float, prompts: float, sequences: float, disk_share: float) -> _Sweep:
    """`tokens` through all layers: of `prompts` prompts, or the next ones of as many sequences if that is 0.

    Args:
        sequences: whose next token is chosen at the end.
    """
    model = costs.model
    used = distinct_experts(model.experts, model.experts_per_token, tokens)
    experts = model.moe_layers * costs.cpu_experts(tokens * model.experts_per_token, used)
    layer, dense = costs.cpu_layer(tokens, 0), costs.cpu_layer(tokens, 0, dense=True)
    rest = model.moe_layers * layer + model.dense_layers * dense + costs.cpu_head(sequences)
    attention = model.layers * (costs.cpu_layer(tokens, context, prompts=prompts) - layer)
    brought = model.moe_layers * used * costs.expert_bytes
    reading = min(brought / costs.cpu_bytes_per_s, experts) + min(costs.host_dense_bytes / costs.cpu_bytes_per_s, rest)
    return _Sweep(
        {
            Bottleneck.WEIGHTS: reading,
            Bottleneck.ARITHMETIC: experts + rest - reading,
            Bottleneck.ATTENTION: max(0.0, attention),
            Bottleneck.DISK: costs.disk(brought * disk_share) if disk_share else 0.0,
        }
    )
