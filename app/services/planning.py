"""Plans made off the GUI thread: the last question asked is the one that is answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from app.services.machine_look import MachineLook
from engine.checkpoint.find_shape import find_shape
from engine.checkpoint.model_shape import ModelShape
from engine.checkpoint.names import resolve
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.formats import measured_as
from engine.hardware.machine import HardwareProfile
from engine.hardware.measurement_files import described
from engine.planner.planned import Plan
from engine.planner.what_helps import Change, what_if
from engine.tuning.keeping import kept_corrections, model_mark
from engine.tuning.result import Correction, TuningResult
from engine.tuning.settled import best_settled, results_here

_DEBOUNCE_MS = 150


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is to be planned.

    Attributes:
        config: the model, and the settings that hold.
        change: other hardware; None for the machine as it is.
    """

    look: MachineLook
    config: EngineConfig
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """A plan, or the sentence why there is none."""

    question: PlanQuestion
    plan: Plan | None
    problem: str = ""


class Planning(QObject):
    """Answers questions one after the other, and leaves out those that newer ones have overtaken.

    Signals: `planned(PlanAnswer)`.
    """

    planned = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._task = LatestTask(self, after_ms=_DEBOUNCE_MS)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._task.is_busy

    def ask(self, question: PlanQuestion) -> None:
        """Plans a moment later, so that who types or drags asks once."""
        told = self.planned.emit
        self._task.ask(lambda: answer(question), told, lambda error: told(PlanAnswer(question, None, str(error))))

    def close(self) -> None:
        """Asks no more, and waits for what is under way."""
        self._task.close()


def answer(question: PlanQuestion) -> PlanAnswer:
    """The plan that the engine would choose: each precision with the rates that were measured for it.

    Where this model was timed on this machine, what came out is its figure, and other predictions are corrected by it.
    """
    config = question.config
    try:
        corrections, timed = _corrections(config.model, question.look), _timed(question)
        return PlanAnswer(question, _best(question, _shape(config.model), corrections, timed))
    except EngineError as error:
        return PlanAnswer(question, None, error.message)


def _best(
    question: PlanQuestion, shape: ModelShape, corrections: tuple[Correction, ...], timed: tuple[TuningResult, ...]
) -> Plan:
    limits = question.look.limits(question.config)
    if question.change is not None and question.change.gpu is not None:
        limits = replace(limits, use_card=True, vram_of_others=0)
    return best_settled(
        lambda precision: _machine(question, shape, precision),
        shape,
        limits,
        measured=question.look.measurements is not None and question.change is None,
        corrections=corrections,
        results=timed,
    )


def _machine(question: PlanQuestion, shape: ModelShape, precision: str) -> HardwareProfile:
    known = measured_as(precision)
    machine = question.look.machine(known, shape.expert_bytes(known))
    return machine if question.change is None else what_if(machine, question.change)


def _corrections(model: str, look: MachineLook) -> tuple[Correction, ...]:
    try:
        return kept_corrections(model_mark(resolve(model)), described(look.probe))
    except EngineError:  # it is not here: nothing of it was ever timed
        return ()


def _timed(question: PlanQuestion) -> tuple[TuningResult, ...]:
    """What was timed of this very model on this very machine; nothing of another."""
    if question.change is not None:
        return ()
    try:
        mark = model_mark(resolve(question.config.model))
    except EngineError:
        return ()
    return results_here(mark, question.look.probe, question.config)


@lru_cache(maxsize=16)
def _shape(model: str) -> ModelShape:
    """Headers are read once, those on the hub above all."""
    return find_shape(model)
