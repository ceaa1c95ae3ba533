"""Predicts the speed of a job of many rows that share each sweep through the weights, without a card.

With a card the simulated schedules predict it (`plan_batch`); both end up as a `JobPrediction`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from engine.common.footprint import PAGE_TOKENS, round_up

if TYPE_CHECKING:
    from engine.checkpoint.model_shape import ModelShape
    from engine.planner.costs import Costs
    from engine.planner.plan_parts import BatchPlan

BATCH_ROWS = 256
"""Most rows in progress at once when there is no plan."""
SWEEP_TOKENS = 1024
"""Prompt tokens that one sweep through the layers reads, in addition to the rows that decode."""
MEASURED_OFF, LOOKED_UP_OFF = 0.25, 0.5
"""Expected relative error of a prediction: on a measured machine, and on one known from data sheets."""
_ATTENDED = 0.5
"""Share of its prompt that a prompt token attends to on average."""


_READ_ROWS = 48
"""Rows that say what a job's rows are like: enough for a mean, and quick."""
_COUNTED_ROWS = 4096
"""Rows that are counted at most until the next piece: a piece of text is 8 KiB."""


class Bottleneck(StrEnum):
    """What takes most of a sweep's time."""

    ARITHMETIC = "arithmetic"
    WEIGHTS = "weights"
    """Reading weights from RAM."""
    ATTENTION = "attention"
    DISK = "disk"
    LINK = "link"
    CARD = "card"


@dataclass(frozen=True, slots=True)
class JobRows:
    """What is known about a job's rows before it runs.

    Attributes:
        rows: number of rows.
        prompt_tokens, generated_tokens: mean per row; generated tokens are an estimate, or the limit.
        shared_tokens: with which all prompts begin: they are read, and held, once.
    """

    rows: int
    prompt_tokens: float
    generated_tokens: float
    shared_tokens: float = 0.0

    @property
    def own_tokens(self) -> float:
        """Prompt tokens that are read for each row."""
        return max(1.0, self.prompt_tokens - self.shared_tokens)


_Row = TypeVar("_Row")


def first_rows(read: Iterable[tuple[float, _Row]]) -> tuple[list[_Row], int]:
    """(a job's first rows, how many there seem to be in all), from rows and the share of the input that was read by
    then.

    A file is read piece by piece, so rows are counted until its next piece.
    """
    found, count, reached = list[_Row](), 0, 0.0
    for share, row in read:
        if len(found) < _READ_ROWS:
            found.append(row)
        elif share != reached or not share or count == _COUNTED_ROWS:
            break
        count, reached = count + 1, share
    is_all = count < _READ_ROWS or reached <= 0
    return found, count if is_all else max(count, round(count / reached))


def shared_length(prompts: Sequence[Any]) -> int:
    """With how many items all of these texts, or lists of tokens, begin; none of a single one."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    return next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """A job's predicted speed.

    Attributes:
        job: the rows it was predicted for.
        batch_rows: N, rows that share each weight load.
        micro_batches: n, micro-batches that go through a layer one after the other.
        schedule: name of the schedule; empty on the CPU.
        tokens_per_s: generated tokens over the whole time, prompts included; `low` and `high` are its range.
        seconds_low, seconds_high: for all rows, if answers are as long as assumed.
        bottleneck: what limits the speed.
        is_measured: whether it was corrected by timed answers of this job.
        kv_bytes: what rows under way hold of their context, once they are all at their end.
    """

    job: JobRows
    batch_rows: int
    micro_batches: int
    schedule: str
    tokens_per_s: float
    low: float
    high: float
    seconds_low: float
    seconds_high: float
    bottleneck: Bottleneck
    is_measured: bool = False
    kv_bytes: int = 0

    def corrected(self, factor: float, off: float) -> JobPrediction:
        """This prediction, corrected by a few real rows that ran `factor` times as fast as predicted.

        A few rows spend their time on reading weights, many rows on arithmetic, so the error of the one says only in
        part how large the error of the other is.  The range therefore starts at the lower of the predicted and the
        measured rate, less `off`, a share, and ends at the higher of the predicted upper bound and the measured rate
        plus `off`.  The rate is the geometric mean of both.
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


def predict_on_cpu(
    costs: Costs, job: JobRows, batch_rows: int, *, sweep_tokens: int, disk_share: float = 0.0, off: float = 0.4
) -> JobPrediction:
    """Continuous batching without a card: each sweep reads the weights once for all its rows.

    Args:
        batch_rows: upper limit; there may be fewer rows.
        sweep_tokens: prompt tokens that one sweep reads.
        disk_share: share of the experts that every sweep reads again.
        off: expected relative error of the prediction.

    Raises:
        ValueError: there are no rows, or rows without tokens.
    """
    together = min(batch_rows, job.rows)
    if together < 1 or job.prompt_tokens <= 0 or job.generated_tokens <= 0:
        raise ValueError(f"no rows to predict: {job}")
    own = job.own_tokens
    piece = min(float(sweep_tokens), own * job.rows)
    prompts = max(1.0, piece / own)
    attended = job.prompt_tokens - own + own * _ATTENDED
    reading = _sweep(costs, piece, attended, prompts, prompts, disk_share)
    context = job.prompt_tokens + (job.generated_tokens + 1) / 2
    decoding = _sweep(costs, together, context, 0.0, together, disk_share)
    sweeps = max(0.0, job.generated_tokens - 1) * job.rows / together
    begun = min(float(job.rows), max(1.0, sweep_tokens / job.prompt_tokens))  # with none read that they could share
    reads = (job.rows * own + begun * (job.prompt_tokens - own)) / piece
    whole = {name: reads * reading[name] + sweeps * decoding[name] for name in reading}
    rate = job.rows * job.generated_tokens / sum(whole.values())
    limit = max(whole, key=lambda name: whole[name])
    tokens = job.prompt_tokens + job.generated_tokens
    held = costs.model.context_bytes(tokens, in_pages=True)
    held += (together - 1) * costs.model.context_bytes(own + job.generated_tokens, in_pages=True)
    return _prediction(job, together, 1, "", rate, off, limit, held)


def predicted_on_card(job: JobRows, plan: BatchPlan, lane: str, off: float, model: ModelShape) -> JobPrediction:
    """The prediction of a simulated schedule.

    Args:
        lane: the busiest of `engine.planner.simulator.sweeps.LANES`.
    """
    by_lane = {
        "h2d": Bottleneck.LINK,
        "d2h": Bottleneck.LINK,
        "disk": Bottleneck.DISK,
        "cpu_attention": Bottleneck.ATTENTION,
        "cpu_experts": Bottleneck.WEIGHTS,
    }
    bottleneck, together = by_lane.get(lane, Bottleneck.CARD), min(plan.sequences, job.rows)
    held = together * model.context_bytes(round_up(plan.row_tokens, PAGE_TOKENS))
    return _prediction(job, together, plan.batches, plan.schedule, plan.tokens_per_s, off, bottleneck, held)


def _prediction(
    job: JobRows, together: int, count: int, schedule: str, rate: float, off: float, limit: Bottleneck, held: float
) -> JobPrediction:
    low, high = rate * (1 - off), rate * (1 + off)
    tokens = job.rows * job.generated_tokens
    return JobPrediction(
        job, together, count, schedule, rate, low, high, tokens / high, tokens / low, limit, kv_bytes=round(held)
    )


def _sweep(
    costs: Costs, tokens: float, context: float, prompts: float, sequences: float, disk_share: float
) -> dict[Bottleneck, float]:
    """Seconds, by cause, of `tokens` through all layers: of `prompts` prompts, or one decode step each if it is 0.

    Args:
        sequences: sequences whose next token is sampled at the end.
    """
    model = costs.model
    used = costs.used_experts(tokens)
    experts = model.moe_layers * costs.cpu_experts(tokens * model.experts_per_token, used)
    layer, dense = costs.cpu_layer(tokens, 0), costs.cpu_layer(tokens, 0, dense=True)
    rest = model.moe_layers * layer + model.dense_layers * dense + costs.cpu_head(sequences)
    attention = model.layers * (costs.cpu_layer(tokens, context, prompts=prompts) - layer)
    brought = model.moe_layers * used * costs.expert_bytes
    reading = min(brought / costs.cpu_bytes_per_s, experts) + min(costs.host_dense_bytes / costs.cpu_bytes_per_s, rest)
    computing = {
        Bottleneck.WEIGHTS: reading,
        Bottleneck.ARITHMETIC: experts + rest - reading,
        Bottleneck.ATTENTION: max(0.0, attention),
    }
    waiting = costs.look_up(tokens) + (costs.disk(brought * disk_share) if disk_share else 0.0)
    layers = costs.disk(costs.streamed_bytes)  # read while others are computed: one of both takes no time of its own
    if layers > sum(computing.values()):
        return {**dict.fromkeys(computing, 0.0), Bottleneck.DISK: waiting + layers}
    return {**computing, Bottleneck.DISK: waiting}
