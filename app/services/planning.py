"""Plans made off the GUI thread; only the latest question is answered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask
from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.model_shape import ModelShape
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.planner.plan_parts import Plan
from engine.planner.plan_words import Change
from engine.tuning.machine_state import MachineLook, plan_here

_DEBOUNCE_MS = 150


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What to plan for.

    Attributes:
        config: the model and its settings.
        change: other hardware; None for the actual machine.
    """

    look: MachineLook
    config: EngineConfig
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    question: PlanQuestion
    plan: Plan | None
    problem: str = ""


class Planning(QObject):
    """Answers the latest question; superseded ones are dropped.

    Signals: `planned(PlanAnswer)`.
    """

    planned = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._task = LatestTask(self, after_ms=_DEBOUNCE_MS)

    @property
    def is_busy(self) -> bool:
        return self._task.is_busy

    def ask(self, question: PlanQuestion) -> None:
        planned = self.planned.emit
        self._task.ask(lambda: answer(question), planned, lambda error: planned(PlanAnswer(question, None, str(error))))

    def close(self) -> None:
        self._task.close()


def answer(question: PlanQuestion) -> PlanAnswer:
    look, config = question.look, question.config
    try:
        plan = plan_here(look, _shape(config.model), config, look.limits(config), question.change)
    except EngineError as error:
        return PlanAnswer(question, None, error.message)
    return PlanAnswer(question, plan)


@lru_cache(maxsize=16)
def _shape(model: str) -> ModelShape:
    """Cached: headers are read once, above all those on the hub."""
    return find_shape(model)
