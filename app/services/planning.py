"""Plans made off the GUI thread: the last question asked is the one that is answered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.checkpoint.find_shape import find_shape
from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.planner.plan_parts import Plan
from engine.planner.what_helps import Change
from engine.tuning.machine_look import MachineLook, plan_here

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
    """The plan that the engine would choose, as `engine.tuning.machine_look.plan_here`."""
    look, config = question.look, question.config
    try:
        plan = plan_here(look, _shape(config.model), config, look.limits(config), question.change)
    except EngineError as error:
        return PlanAnswer(question, None, error.message)
    return PlanAnswer(question, plan)


@lru_cache(maxsize=16)
def _shape(model: str) -> ModelShape:
    """Headers are read once, those on the hub above all."""
    return find_shape(model)
