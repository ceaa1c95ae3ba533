"""Predicts how a job would run and how fast, before its first answer and without a loaded model."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.library import resolve
from engine.checkpoint.model_shape import ModelShape
from engine.common.config import BatchJob, EngineConfig, Sharing
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.planner.batch_plan import best_batch, question_of
from engine.planner.batch_prediction import (
    BATCH_ROWS,
    LOOKED_UP_OFF,
    MEASURED_OFF,
    SWEEP_TOKENS,
    JobPrediction,
    JobRows,
    first_rows,
    predict_on_cpu,
    predicted_on_card,
)
from engine.planner.costs import Costs, engine_costs
from engine.planner.engine_memory import engine_memory, from_disk
from engine.tuning.machine_state import MachineLook, look_at_machine, machine_for

_BYTES_PER_TOKEN = 4
_TOKENS_PER_TURN = 5
_KV_SHARE = 0.5
"""Fraction of free RAM for keys and values."""


@dataclass(frozen=True, slots=True)
class ForecastQuestion:
    """The input of a prediction.

    Attributes:
        model: the model; config: the requested settings.
        total: rows of the input; None if not counted.
    """

    job: BatchJob
    model: ModelInfo
    config: EngineConfig | None
    total: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a job.

    Attributes:
        plan: with answers of maximum length.
        alone_tokens_per_s: one row at a time; 0 if not predicted.
    """

    plan: JobPrediction
    alone_tokens_per_s: float = 0.0


def sharing_for(prepared: PreparedJob, config: EngineConfig) -> Sharing:
    """How several cards are to share the model that answers this job; as it was asked for, if it was."""
    machine = machine_for(config) if config.sharing == "auto" and config.device != "cpu" else None
    if machine is None or machine.gpu is None or machine.gpu.count < 2:
        return config.sharing
    rows = _rows(prepared, None)
    shape = _shape(str(resolve(config.model)))
    limits = look_at_machine(config.device).limits(config)
    best = best_batch(question_of(machine, shape, limits, shape.precisions[-1], rows)) if rows is not None else None
    return "auto" if best is None else best[0].sharing


def forecast_of(question: ForecastQuestion) -> Forecast | None:
    """What the planner says of this job; None where nothing is known of the model or the card.

    Takes tens of milliseconds.  Prompts are counted by their bytes: the range of a prediction is wider than what that
    is off by.
    """
    model, config = question.model, question.config
    try:
        prepared = prepare(replace(question.job, start="resume"))
        rows = _rows(prepared, question.total)
        shape = _shape(model.path)
    except (EngineError, OSError):
        return None
    look = look_at_machine(config.device if config is not None else "auto")
    if rows is None:
        return None
    off = LOOKED_UP_OFF if look.measurements is None else MEASURED_OFF
    machine = look.machine(shape.measured_as(model.precision))
    if model.device == "cpu":
        costs = engine_costs(machine, shape, model.precision, model.threads)
        if config is not None:
            limits = look.limits(config)
            others = max(0, limits.ram_of_others - model.weights_bytes - model.experts_bytes)
            alone = replace(limits, ram_of_others=others)
            held = replace(costs, model=alone.held(shape, machine))
            costs = from_disk(costs, engine_memory(held, alone, on_card=False))
        return _on_cpu(look, costs, rows, off)
    if machine.gpu is None or config is None:
        return None
    best = best_batch(question_of(machine, shape, look.limits(config), model.precision, rows))
    if best is None:
        return None
    plan, lane = best
    prediction = predicted_on_card(rows, plan.sequences, plan.batches, plan.schedule, plan.tokens_per_s, lane, off)
    return Forecast(prediction)


def _on_cpu(look: MachineLook, costs: Costs, rows: JobRows, off: float) -> Forecast:
    each = costs.model.context_bytes(rows.prompt_tokens + rows.generated_tokens, in_pages=True)
    room = max(1, int(_KV_SHARE * look.probe.ram_available_bytes // max(each, 1.0)))
    prediction = predict_on_cpu(costs, rows, min(BATCH_ROWS, room), sweep_tokens=SWEEP_TOKENS, off=off)
    alone = predict_on_cpu(costs, rows, 1, sweep_tokens=round(rows.prompt_tokens) or 1, off=off)
    return Forecast(prediction, alone.tokens_per_s)


def _rows(prepared: PreparedJob, total: int | None) -> JobRows | None:
    """What the first rows say of all; None if none of them can be asked."""
    prompts: list[float] = []
    limits: list[int] = []
    first, guessed = first_rows(prepared.asked())
    for asked in first:
        if not isinstance(asked, Answer):
            texts = (len(message.content.encode("utf-8", "replace")) for message in asked.messages)
            prompts.append(sum(size / _BYTES_PER_TOKEN + _TOKENS_PER_TURN for size in texts))
            limits.append(asked.sampling.max_tokens)
    if not prompts:
        return None
    generated = statistics.fmean(limits)
    choices = prepared.job.choices
    if choices:  # an answer is one of them
        generated = min(generated, max(len(choice.encode()) for choice in choices) / _BYTES_PER_TOKEN + 1)
    return JobRows(total or guessed, statistics.fmean(prompts), max(1.0, generated))


@lru_cache(maxsize=4)
def _shape(model: str) -> ModelShape:
    return find_shape(model)
