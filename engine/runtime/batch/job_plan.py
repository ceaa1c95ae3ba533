"""How to run a job with a loaded model, and its speed: from the job's first rows and the planner."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import Answer, RowRequest
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.model_shape import ModelShape
from engine.common.config import BatchJob, Sharing
from engine.common.costs import Cost, CostModel, Source
from engine.common.errors import EngineError
from engine.common.falls import FALLS
from engine.experts.dispatch import BANK_LAYER
from engine.experts.latency import LatencyModel
from engine.experts.shared import parts_of
from engine.hardware.machine import HardwareProfile, LinkProfile
from engine.hardware.measured import load_measurements, machine_profile
from engine.hardware.probe import Probe, probe
from engine.hardware.profiles import EMULATED, with_emulated
from engine.kernels.native.paged_attention import KvType
from engine.planner.batch_plan import GIVEN, best_batch, is_overtaken, policy_of, question_of
from engine.planner.batch_prediction import (
    LOOKED_UP_OFF,
    MEASURED_OFF,
    JobPrediction,
    JobRows,
    first_rows,
    predict_on_cpu,
    predicted_on_card,
    shared_length,
)
from engine.planner.costs import Cards, Costs, Observed, engine_costs
from engine.planner.plan_parts import BatchPlan, Limits
from engine.planner.plan_search import Question
from engine.runtime.batch.policy import BatchPolicy, can_pack, policy_for
from engine.runtime.decode.prompt import chat_prompt
from engine.runtime.kv.reuse import together_tokens
from engine.runtime.loaded_model import LoadedModel

_IS_OFF = 1.5
"""What was observed counts from so many times what is known: single times scatter."""
_IS_BETTER = 1.2
"""Another plan is taken if it is so many times as fast: rows under way begin again by it."""
_READ_BYTES = 2**28
"""Read from disk before that says how fast it is."""
_OF_SWEEPS = 0.3
"""Weight of one observation of a sweep's parts, which are few and long."""
_SINKS = 4
"""First tokens that a sliding window keeps visible (Xiao et al. 2024, section 3.2)."""
_TIMED = 0.25
"""Expected relative error of a prediction once answers were timed."""
_MOST_FACTOR = 8.0
"""A larger deviation from the prediction has other causes than the machine's speed."""


@dataclass(frozen=True, slots=True)
class SampleTime:
    """The time that a few rows took.

    Attributes:
        seconds: total, without the time of requests with priority.
        sweep_rows, sweep_s: rows that shared a sweep, and the seconds of a decoding one; 0 if no complete one was
            timed.
    """

    seconds: float
    sweep_rows: int = 0
    sweep_s: float = 0.0


class SweepClock:
    """Times warm sweeps, from the progress of the rows; called between layers.

    The first sweeps read prompts, and weights that are cold after loading.  Later ones do neither, so only sweeps count
    in which exactly the same rows get one more token each.

    Args:
        under_way: (rows, tokens generated for them), as in `BatchExecutor.under_way`.
    """

    def __init__(
        self, under_way: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._under_way, self._clock = under_way, clock
        self._begun_s = clock()
        self._away_s = 0.0
        self._last = (0, 0)
        self._last_s: float | None = None
        self._sweeps: list[tuple[int, float]] = []

    def look(self) -> None:
        """Call this between layers."""
        now = self._under_way()
        if now == self._last:
            return
        at = self._clock()
        rows, tokens = now
        decoded = rows == self._last[0] and tokens == self._last[1] + rows
        if decoded and self._last_s is not None:
            self._sweeps.append((rows, at - self._last_s))
        # Every row has its first token: from here on no prompt is read.
        self._last, self._last_s = now, at if tokens >= rows else None

    def leave(self, others: Callable[[], None]) -> None:
        """Calls `others`, whose time does not count; the current sweep is not timed."""
        begun_s = self._clock()
        try:
            others()
        finally:
            self._away_s += self._clock() - begun_s
            self._last_s = None

    def time(self) -> SampleTime:
        """The result: the median over the sweeps with the most rows."""
        seconds = self._clock() - self._begun_s - self._away_s
        if not self._sweeps:
            return SampleTime(seconds)
        (rows, _count), *_ = Counter(rows for rows, _ in self._sweeps).most_common(1)
        return SampleTime(seconds, rows, statistics.median(took for shared, took in self._sweeps if shared == rows))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The result of `plan_job`.

    Attributes:
        policy: the executor's policy.
        rows: what is known about the job's rows.
        prediction: None if this model's speed cannot be predicted.
        batch: the plan behind the policy, on a card.
    """

    policy: BatchPolicy
    rows: JobRows
    prediction: JobPrediction | None
    batch: BatchPlan | None = None


def plan_job(prepared: PreparedJob, loaded: LoadedModel, generated_tokens: float | None = None) -> JobPlan:
    """Reads the job's first rows and plans for all of them.

    Args:
        generated_tokens: per row, if known from answers; else the limit is assumed.
    """
    return plan_asked(prepared.job, prepared.asked(), loaded, generated_tokens)


def plan_asked(
    job: BatchJob,
    asked: Iterable[tuple[float, RowRequest | Answer]],
    loaded: LoadedModel,
    generated_tokens: float | None = None,
) -> JobPlan:
    """As `plan_job`, for a job whose rows are read by somebody else.

    Args:
        asked: its first rows, as `PreparedJob.asked` gives them.
    """
    rows = job_rows(asked, loaded, generated_tokens)
    try:
        given = policy_of(json.loads(job.policy)) if job.policy else None
        plan = plan_rows(rows, loaded, find_shape(loaded.info.path), given=given)
    except EngineError:  # the job runs without a prediction
        plan = JobPlan(policy_for(loaded), rows, None)
    kv_type = loaded.kv_type if job.kv_precision == "auto" else KvType[job.kv_precision.upper()]
    kept = _SINKS if job.attention_window else 0
    return replace(plan, policy=replace(plan.policy, kv_type=kv_type, window=job.attention_window, kept=kept))


def predicted_after(
    prepared: PreparedJob, loaded: LoadedModel, answers: Sequence[Answer], taken: SampleTime
) -> JobPrediction | None:
    """The speed of the whole job, after some of its rows were answered.

    On the CPU the timed sweeps correct the prediction; on a card a few rows say little about many.  Without a complete
    sweep, as when rows are answered one by one, their total time corrects it, which includes cold weights.
    """
    answered = [answer for answer in answers if answer.generated_tokens]
    if not answered:
        return plan_job(prepared, loaded).prediction
    generated = statistics.fmean(answer.generated_tokens for answer in answered)
    plan = plan_job(prepared, loaded, generated)
    if plan.prediction is None or plan.prediction.schedule or taken.seconds <= 0:
        return plan.prediction
    prompt = statistics.fmean(answer.prompt_tokens for answer in answered)
    shape = find_shape(loaded.info.path)

    def predicted_s(rows: int, tokens: float) -> float:
        found = plan_rows(JobRows(rows, max(1.0, prompt), tokens), loaded, shape).prediction
        assert found is not None
        return rows * tokens / found.tokens_per_s

    if taken.sweep_rows and generated > 1:
        # A row's first token comes from reading its prompt, every other one from a sweep.
        decoding_s = predicted_s(taken.sweep_rows, generated) - predicted_s(taken.sweep_rows, 1.0)
        factor = decoding_s / (generated - 1) / taken.sweep_s
    else:
        factor = predicted_s(len(answered), generated) / taken.seconds
    return plan.prediction.corrected(min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR), _TIMED)


def plan_rows(
    rows: JobRows,
    loaded: LoadedModel,
    shape: ModelShape,
    *,
    given: BatchPlan | None = None,
) -> JobPlan:
    """As `plan_job`, for rows whose lengths are known, and by a policy by hand if it fits."""
    cards = loaded.devices.devices if loaded.devices is not None else ()
    is_shared = loaded.devices is not None and bool(loaded.devices.experts.ways)
    card = cards[0] if len(cards) == 1 or is_shared else None
    precision = loaded.info.precision
    machine, is_measured = _machine_of(loaded, shape, probe())
    off = MEASURED_OFF if is_measured else LOOKED_UP_OFF
    if given is not None and card is None:
        why = "the cards share layers" if cards else "the model is on no graphics card"
        FALLS.say(GIVEN, "the engine's own sizes", why)
    if loaded.devices is None:
        policy = policy_for(loaded)
        costs = _from_disk(engine_costs(machine, shape, precision, loaded.info.threads), loaded)
        held = loaded.disk_backed
        disk_share = 0.0 if held is None else max(0.0, 1 - held.nbytes / held.disk.table.nbytes)
        share = rows.prompt_tokens + rows.generated_tokens <= together_tokens(loaded.model) and can_pack(loaded.model)
        together = min(policy.rows, _rows_that_fit(policy, rows, shape)) if share else 1
        predicted = predict_on_cpu(
            costs, rows, together, sweep_tokens=policy.sweep_tokens, disk_share=disk_share, off=off
        )
        return JobPlan(policy, rows, predicted)
    if card is None or machine.gpu is None:
        return JobPlan(policy_for(loaded), rows, None)
    best = best_batch(_question(rows, loaded, shape, machine), given)
    if best is None:
        return JobPlan(policy_for(loaded), rows, None)
    plan, lane = best
    predicted = predicted_on_card(rows, plan, lane, off, shape)
    return JobPlan(policy_for(loaded, plan=plan), rows, predicted, plan)


def _question(rows: JobRows, loaded: LoadedModel, shape: ModelShape, machine: HardwareProfile) -> Question:
    """How these rows are best run on the model's cards, by what is known of them and what the run has found."""
    assert loaded.devices is not None
    assert machine.gpu is not None
    cards, precision = loaded.devices.devices, loaded.info.precision
    is_shared = bool(loaded.devices.experts.ways)
    machine = replace(machine, gpu=replace(machine.gpu, count=len(cards)), link=_as_observed(machine.link, loaded))
    memory = min(each.memory.total for each in cards)
    sharing: Sharing = "experts" if is_shared else "auto"
    limits = Limits(
        vram_bytes=memory,
        ram_bytes=_ram_beside_disk(rows, loaded, shape),
        threads=loaded.info.threads,
        precision=precision,
        sharing=sharing,
    )
    known = engine_costs(machine, shape, precision, limits.threads, cards=Cards.EXPERTS if is_shared else Cards.LAYERS)
    return question_of(machine, shape, limits, precision, rows, observed_of(loaded, known))


def _ram_beside_disk(rows: JobRows, loaded: LoadedModel, shape: ModelShape) -> int | None:
    """Bytes for experts and for keys and values of these rows; None if all experts are in RAM."""
    if loaded.disk_backed is None:
        return None
    each = shape.context_bytes(rows.prompt_tokens + rows.generated_tokens, in_pages=True)
    return loaded.disk_backed.nbytes + round(min(policy_for(loaded).kv_bytes, rows.rows * each))


_WATCHED = {
    Cost.H2D: "Copies to the graphics card take {} times as long as",
    Cost.CARD_LAYER: "Layers take {} times as long on the graphics card as",
    Cost.CARD_ATTENTION: "Attention takes {} times as long on the graphics card as",
    Cost.CARD_EXPERT: "Experts take {} times as long on the graphics card as",
    Cost.CPU_ATTENTION: "Attention takes {} times as long on the processor as",
    Cost.CPU_PROMPT_EXPERT: "Experts take {} times as long on the processor as",
    Cost.DISK: "Reads from disk take {} times as long as",
    Cost.DISTINCT: "Rows use {} times as many experts as",
}


class PlanWatch:
    """Whether the rows of a job should be planned again: what the run finds of the machine may speak for another plan.

    Args:
        plan: by which rows are answered; `rows` is what it was made for.
    """

    def __init__(self, plan: BatchPlan, rows: JobRows, loaded: LoadedModel) -> None:
        self._plan, self._rows, self._loaded = plan, rows, loaded
        self._shape = find_shape(loaded.info.path)
        self._machine, _ = _machine_of(loaded, self._shape, probe())
        self._latencies = _latencies(loaded)
        self._then = self._seen()

    def __call__(self) -> str:
        """What has changed since the plan was made, as a sentence, if another one is clearly better now."""
        seen = self._seen()
        changes = {kind: factor / self._then[kind] for kind, factor in seen.items()}
        most = max(changes, key=lambda kind: abs(math.log(changes[kind])), default=None)
        if most is None or 1 / _IS_OFF < changes[most] < _IS_OFF:
            return ""
        self._then = seen
        question = _question(self._rows, self._loaded, self._shape, self._machine)
        if not is_overtaken(question, self._plan, _IS_BETTER):
            return ""
        times = f"{changes[most]:.2g}" if changes[most] < 100 else f"{changes[most]:.0f}"
        return f"{_WATCHED[most].format(times)} the plan for rows had, so these are planned again."

    def _seen(self) -> dict[Cost, float]:
        """What was found, over what had been known; nothing where all experts are on the card."""
        if not self._latencies:
            return {}
        found = {kind: max(each.costs.factor(kind) for each in self._latencies) for kind in _WATCHED}
        return found | {Cost.DISTINCT: _evenness(self._latencies), Cost.DISK: _disk(self._loaded, self._machine)}


def _machine_of(loaded: LoadedModel, shape: ModelShape, found: Probe) -> tuple[HardwareProfile, bool]:
    """The machine with the model's card, as measured or by data sheets, and whether it was measured."""
    cards = loaded.devices.devices if loaded.devices is not None else ()
    is_shared = loaded.devices is not None and bool(loaded.devices.experts.ways)
    name = cards[0].name.partition("#")[0] if len(cards) == 1 or (cards and is_shared) else ""
    measured = load_measurements(found, name)
    machine = machine_profile(found, measured, precision=shape.measured_as(loaded.info.precision))
    if machine.gpu is None and name.startswith(EMULATED):  # not measured: values of its profile
        meter = cards[0].meter
        host = "?host=fixed" if meter is not None and meter.clock.is_fixed else ""
        machine = with_emulated(machine, name + host, min(each.memory.total for each in cards))
    return machine, measured is not None


def costs_of(loaded: LoadedModel) -> CostModel:
    """What the planner knows of work with this model on this machine; the run goes on to correct it."""
    shape = find_shape(loaded.info.path)
    machine, _ = _machine_of(loaded, shape, probe())
    return engine_costs(machine, shape, loaded.info.precision, loaded.info.threads).by_kind


def observed(loaded: LoadedModel) -> LatencyModel | None:
    """What is known of experts on the card with the slowest link, as measured and as the run has found since."""
    return max(_latencies(loaded), key=lambda each: each.transfer_s, default=None)


def observed_of(loaded: LoadedModel, known: Costs) -> Observed:
    """What earlier jobs have found to be clearly otherwise than predicted; from now on they compare with `known`."""
    latencies = _latencies(loaded)
    if not latencies:
        return Observed()
    found = [each.costs for each in latencies]
    each_token, launch_s = max(known.kv_read_bytes(1, 1), 1.0), known.efficiency.operator_s
    call_s = known.machine.calls.native_s
    for kind, seconds in (
        (Cost.CARD_LAYER, partial(known.gpu_layer, context=0, cached=False)),
        (Cost.CARD_ATTENTION, lambda nbytes: known.card_attention(1, nbytes / each_token) + launch_s),
        (Cost.CPU_ATTENTION, lambda nbytes: known.cpu_attention(1, nbytes / each_token) + call_s),
    ):
        if not found[0].knows(kind):
            found[0].know(kind, seconds, Source.DATA_SHEET, weight=_OF_SWEEPS)

    def factor(kind: Cost) -> float:
        seen = max(each.factor(kind) for each in found)
        return seen if max(seen, 1 / seen) > _IS_OFF else 1.0

    disk = _disk(loaded, known.machine)
    return Observed(
        _evenness(latencies),
        factor(Cost.CARD_LAYER),
        factor(Cost.CARD_ATTENTION),
        factor(Cost.CARD_EXPERT),
        factor(Cost.CPU_ATTENTION),
        factor(Cost.CPU_PROMPT_EXPERT),
        disk if max(disk, 1 / disk) > _IS_OFF else 1.0,
    )


def _evenness(latencies: Sequence[LatencyModel]) -> float:
    return max(each.costs.predict(Cost.DISTINCT) for each in latencies) or 1.0


def _disk(loaded: LoadedModel, machine: HardwareProfile) -> float:
    """What reading experts takes, over what was known of the disk."""
    disk = loaded.disk_backed.disk if loaded.disk_backed is not None else None
    if disk is None or disk.bytes_read < _READ_BYTES:
        return 1.0
    return disk.busy_s * machine.disk_bytes_per_s / disk.bytes_read


def _latencies(loaded: LoadedModel) -> list[LatencyModel]:
    """Of each card."""
    if loaded.devices is None:
        return []
    held = (module.__dict__[BANK_LAYER][1] for module in loaded.model.modules() if BANK_LAYER in module.__dict__)
    return [part.latency for part in next(filter(None, map(parts_of, held)), ())]


def _as_observed(link: LinkProfile, loaded: LoadedModel) -> LinkProfile:
    """The link as it was found to be, if it is clearly another than was said."""
    found = observed(loaded)
    if found is None:
        return link
    measured_s = found.link_latency_s + found.record_nbytes / found.link_bytes_per_s
    bytes_per_s = found.link_bytes_per_s * measured_s / found.transfer_s
    factor = bytes_per_s / link.h2d
    if 1 / _IS_OFF < factor < _IS_OFF:
        return link
    latency_s = link.latency_s * found.transfer_s / measured_s
    return replace(
        link, h2d=bytes_per_s, d2h=factor * link.d2h, h2d_pageable=factor * link.h2d_pageable, latency_s=latency_s
    )


def _from_disk(costs: Costs, loaded: LoadedModel) -> Costs:
    """With what each sweep reads there besides experts."""
    streamed = loaded.stream.nbytes if loaded.stream is not None else 0
    rows, row_bytes = loaded.tables.per_token if loaded.tables is not None else (0, 0)
    return replace(costs, streamed_bytes=float(streamed), rows=rows, row_bytes=row_bytes)


def job_rows(
    asked_rows: Iterable[tuple[float, RowRequest | Answer]], loaded: LoadedModel, generated_tokens: float | None = None
) -> JobRows:
    """Estimates all rows from the first ones; their number from the share of the input they take."""
    prompts, limits = list[Sequence[int]](), list[float]()
    first, total = first_rows(asked_rows)
    for asked in first:
        if isinstance(asked, Answer) or not asked.messages:
            continue
        try:
            prompts.append(chat_prompt(loaded.tokenizer, asked.messages, sight=loaded.sight))
        except EngineError:  # the row itself will report it
            continue
        limits.append(min(asked.sampling.max_tokens, max(1, loaded.context_tokens - len(prompts[-1]))))
    return JobRows(
        max(1, total),
        max(1.0, statistics.fmean(map(len, prompts))) if prompts else 1.0,
        max(1.0, generated_tokens or (statistics.fmean(limits) if limits else 1.0)),
        shared_length(prompts),
    )


def _rows_that_fit(policy: BatchPolicy, rows: JobRows, shape: ModelShape) -> int:
    """Rows whose keys and values fit into memory together."""
    each = shape.context_bytes(rows.prompt_tokens + rows.generated_tokens, in_pages=True)
    return max(1, int(policy.kv_bytes // max(each, 1.0)))
