"""A model that fits nowhere on a machine: what is the nearest that would."""

from __future__ import annotations

from dataclasses import replace

from engine.common import footprint
from engine.common.errors import EngineError, ErrorCode
from engine.common.sizes import rounded_down, rounded_up
from engine.formats import LADDER
from engine.planner.costs import Costs
from engine.planner.engine_memory import dense_in_ram, engine_memory, ram_usable, sizes_of
from engine.planner.placement import least_ram
from engine.planner.plan_search import Question


def does_not_fit(question: Question) -> EngineError:
    """`NOT_ENOUGH_MEMORY`: a lower precision if one would do, else how much memory would."""
    model, limits = question.model, question.limits
    here = f"{model.name} does not fit on {question.machine.name}"
    asked = LADDER.index(question.precision) if question.precision in LADDER else 0
    for precision in LADDER[asked + 1 :]:
        costs = question.setting().costs
        lower = Costs(costs.machine, model, precision)
        if engine_memory(lower, limits, on_card=False) is not None:
            return _error(f"{here} at {question.precision}: the nearest that fits is {precision}.")
    lowest = LADDER[-1] if limits.precision == "auto" else question.precision
    costs = Costs(question.machine, model, lowest)
    least = least_ram(sizes_of(costs, limits, [lowest]))
    usable = ram_usable(costs, limits)
    needed = _ram_for(question, least)
    on_card = dense_in_ram(model, lowest) + footprint.CARD_HEADROOM_BYTES
    return _error(
        f"{here}, even at {lowest} with its experts read from disk: that needs {rounded_up(least)} of RAM that may be "
        f"used, and there are {rounded_down(usable)}; nearest would be {rounded_up(needed)} of RAM in all, or a "
        f"graphics card with {rounded_up(on_card)} for all but the experts."
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


def _error(sentence: str) -> EngineError:
    return EngineError(ErrorCode.NOT_ENOUGH_MEMORY, sentence)
