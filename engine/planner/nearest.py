"""A model that fits nowhere on a machine: what is the nearest that would."""

from __future__ import annotations

from dataclasses import replace

from engine.errors import EngineError, ErrorCode
from engine.planner import footprint
from engine.planner.costs import Costs
from engine.planner.engine_memory import dense_in_ram, engine_memory, ram_usable, record_nbytes
from engine.planner.plan_search import PRECISIONS, Question


def does_not_fit(question: Question) -> EngineError:
    """`NOT_ENOUGH_MEMORY`: a lower precision if one would do, else how much memory would."""
    model, limits = question.model, question.limits
    here = f"{model.name} does not fit on {question.machine.name}"
    asked = PRECISIONS.index(question.precision) if question.precision in PRECISIONS else 0
    for precision in PRECISIONS[asked + 1 :]:
        costs = question.setting().costs
        lower = Costs(costs.machine, model, precision)
        if engine_memory(lower, limits, on_card=False) is not None:
            return _error(f"{here} at {question.precision}: the nearest that fits is {precision}.")
    lowest = PRECISIONS[-1] if limits.precision == "auto" else question.precision
    costs = Costs(question.machine, model, lowest)
    least = dense_in_ram(model, lowest) + max(model.experts_per_token, 1) * record_nbytes(model, lowest)
    usable = ram_usable(costs, limits)
    needed = _ram_for(question, least)
    on_card = dense_in_ram(model, lowest) + footprint.CARD_HEADROOM_BYTES
    return _error(
        f"{here}, even at {lowest} with its experts read from disk: that needs {_gb(least)} of RAM that may be used, "
        f"and there are {_gb(usable)}; nearest would be {_gb(needed)} of RAM in all, or a graphics card with "
        f"{_gb(on_card)} for all but the experts."
    )


def _ram_for(question: Question, least: int) -> int:
    """RAM in all with which `least` bytes may be used."""
    low, high = 0, 1 << 46
    while low < high:
        middle = (low + high) // 2
        machine = question.machine.with_memory(ram_bytes=middle)
        enough = ram_usable(Costs(machine, question.model), replace(question.limits, ram_bytes=None)) >= least
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _error(sentence: str) -> EngineError:
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, sentence)
