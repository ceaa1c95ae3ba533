"""Plans made off the GUI thread: the last question asked is the one that is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from PySide6.QtCore import QObject, QTimer, Signal

from app.services.background import BackgroundCall
from app.services.machine_look import MachineLook
from engine.checkpoint.model_shapes import find_shape
from engine.checkpoint.names import resolve
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.hardware.measurement_files import described
from engine.planner.machine import HardwareProfile
from engine.planner.model_shape import ModelShape
from engine.planner.plan import make_plan
from engine.planner.plan_parts import Alternative
from engine.planner.plan_search import PRECISIONS
from engine.planner.planned import Plan
from engine.planner.precision import worthwhile
from engine.planner.what_helps import Change, what_if
from engine.planner.workload import CHAT
from engine.tuning.corrections import corrected_plan
from engine.tuning.keeping import kept_corrections, model_mark
from engine.tuning.result import Correction

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
        self._next: PlanQuestion | None = None
        self._call: BackgroundCall | None = None
        self._soon = QTimer(self, singleShot=True, interval=_DEBOUNCE_MS)
        self._soon.timeout.connect(self._begin)

    @property
    def is_busy(self) -> bool:
        """Whether an answer is on its way."""
        return self._call is not None or self._next is not None

    def ask(self, question: PlanQuestion) -> None:
        """Plans a moment later, so that who types or drags asks once."""
        self._next = question
        self._soon.start()

    def close(self) -> None:
        """Asks no more, and waits for what is under way."""
        self._soon.stop()
        self._next = None
        if self._call is not None:
            self._call.wait()

    def _begin(self) -> None:
        if self._call is not None or self._next is None:
            return
        question, self._next = self._next, None
        self._call = BackgroundCall(lambda: answer(question), self)
        self._call.done.connect(self._on_answer)
        self._call.failed.connect(lambda error: self._on_answer(PlanAnswer(question, None, str(error))))
        self._call.start()

    def _on_answer(self, found: PlanAnswer) -> None:
        self._call = None
        if self._next is None:
            self.planned.emit(found)
        elif not self._soon.isActive():
            self._begin()


def answer(question: PlanQuestion) -> PlanAnswer:
    """The plan that the engine would choose: each precision with the rates that were measured for it.

    Where this model was timed on this machine, predictions are corrected by what came out.
    """
    config = question.config
    try:
        return PlanAnswer(question, _best(question, _shape(config.model), _corrections(config.model, question.look)))
    except EngineError as error:
        return PlanAnswer(question, None, error.message)


def _best(question: PlanQuestion, shape: ModelShape, corrections: tuple[Correction, ...]) -> Plan:
    limits = question.look.limits(question.config)
    if question.change is not None and question.change.gpu is not None:
        limits = replace(limits, use_card=True, vram_of_others=0)
    measured = question.look.measurements is not None and question.change is None
    if limits.precision != "auto":
        plan = make_plan(_machine(question, limits.precision), shape, CHAT, limits, measured=measured)
        return corrected_plan(plan, corrections)
    plans: dict[str, Plan] = {}
    problem: EngineError | None = None
    for precision in PRECISIONS:
        try:
            one = replace(limits, precision=precision)
            plan = make_plan(_machine(question, precision), shape, CHAT, one, measured=measured)
        except EngineError as error:
            problem = error
        else:
            plans[precision] = corrected_plan(plan, corrections)  # before choosing: what was timed decides
    chosen = worthwhile({name: plan.speed.decode_tokens_per_s for name, plan in plans.items()})
    if chosen is None:
        assert problem is not None
        raise problem
    return _with_others(plans[chosen], plans)


def _with_others(plan: Plan, plans: Mapping[str, Plan]) -> Plan:
    """The plan with those of other precisions as its alternatives: each with the rates that were measured for it."""
    same = [one for one in plan.alternatives if one.precision == plan.precision]
    others = [Alternative(one.policy, one.precision, one.speed, runs_here=True) for one in plans.values()]
    others = [one for one in others if one.precision != plan.precision]
    return replace(plan, alternatives=tuple(sorted([*same, *others], key=lambda one: -one.speed.tokens_per_s)))


def _machine(question: PlanQuestion, precision: str) -> HardwareProfile:
    machine = question.look.machine(precision if precision in PRECISIONS else PRECISIONS[0])
    return machine if question.change is None else what_if(machine, question.change)


def _corrections(model: str, look: MachineLook) -> tuple[Correction, ...]:
    try:
        return kept_corrections(model_mark(resolve(model)), described(look.probe))
    except EngineError:  # it is not here: nothing of it was ever timed
        return ()


@lru_cache(maxsize=16)
def _shape(model: str) -> ModelShape:
    """Headers are read once, those on the hub above all."""
    return find_shape(model)
