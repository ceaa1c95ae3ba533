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
    shared_length,
)
from engine.planner.costs import engine_costs
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
        return _on_cpu(question, look, shape, rows, off)
    if machine.gpu is None or config is None:
        return None
    best = best_batch(question_of(machine, shape, look.limits(config), model.precision, rows))
    return None if best is None else Forecast(predicted_on_card(rows, *best, off, shape))


def _on_cpu(question: ForecastQuestion, look: MachineLook, shape: ModelShape, rows: JobRows, off: float) -> Forecast:
    model, config = question.model, question.config
    machine = look.machine(shape.measured_as(model.precision))
    costs, disk_share = engine_costs(machine, shape, model.precision, model.threads), 0.0
    if config is not None:
        limits = look.limits(config)
        others = max(0, limits.ram_of_others - model.weights_bytes - model.experts_bytes)
        alone = replace(limits, ram_of_others=others)
        costs = replace(costs, model=alone.held(shape, machine))
        memory = engine_memory(costs, alone, on_card=False)
        costs, disk_share = from_disk(costs, memory), 0.0 if memory is None else memory.disk_share
    each = costs.model.context_bytes(rows.prompt_tokens + rows.generated_tokens, in_pages=True)
    room = max(1, int(_KV_SHARE * look.probe.ram_available_bytes // max(each, 1.0)))
    together, one = (
        predict_on_cpu(costs, rows, count, sweep_tokens=sweep, disk_share=disk_share, off=off)
        for count, sweep in ((min(BATCH_ROWS, room), SWEEP_TOKENS), (1, round(rows.own_tokens)))
    )
    return Forecast(together, one.tokens_per_s)


def _rows(prepared: PreparedJob, total: int | None) -> JobRows | None:
    """What the first rows say of all; None if none of them can be asked."""
    prompts, turns, limits = list[bytes](), list[int](), list[int]()
    first, guessed = first_rows(prepared.asked())
    for asked in first:
        if not isinstance(asked, Answer):
            texts = [message.content.encode("utf-8", "replace") for message in asked.messages]
            prompts.append(b"".join(texts))
            turns.append(_TOKENS_PER_TURN * len(texts))
            limits.append(asked.sampling.max_tokens)
    if not prompts:
        return None
    prompt = statistics.fmean(map(len, prompts)) / _BYTES_PER_TOKEN + statistics.fmean(turns)
    generated = statistics.fmean(limits)
    choices = prepared.job.choices
    if choices:  # an answer is one of them
        generated = min(generated, max(len(choice.encode()) for choice in choices) / _BYTES_PER_TOKEN + 1)
    return JobRows(total or guessed, prompt, max(1.0, generated), shared_length(prompts) / _BYTES_PER_TOKEN)


@lru_cache(maxsize=4)
def _shape(model: str) -> ModelShape:
    return find_shape(model)
