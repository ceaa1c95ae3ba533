"""A tuning run: probe, measure, plan, time real tokens, save the winner; then reload the earlier model.

Timings spoiled by other programs would mislead forever: a run waits for these for a moment, watches them throughout,
and does not save its result if they were busy, unless told to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from engine.checkpoint.catalogue import find_shape
from engine.checkpoint.names import resolve
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.formats import LADDER
from engine.hardware.gpu_info import CARD_NAMES
from engine.hardware.measured import Measurements, described, machine_profile, save_measurements
from engine.hardware.probe import OtherPrograms, Probe, Share, is_busy
from engine.hardware.probe import probe as probe_machine
from engine.planner.plan_parts import Limits
from engine.protocol import (
    Stage,
    StartTuning,
    TuningFinished,
    TuningMeasured,
    TuningNumber,
    TuningPlans,
    TuningProgress,
    TuningTimed,
)
from engine.tuning.known_speed import corrections_from
from engine.tuning.measuring import MeasuredMachine, measured_machine
from engine.tuning.race import (
    QUICK_PACE,
    THOROUGH_PACE,
    Field,
    RacedEngine,
    RacePace,
    RaceWatcher,
    Situation,
    choose_contestants,
    drift_note,
    race,
    winner_of,
)
from engine.tuning.result import Timed, TuningKind, TuningResult, busy_note
from engine.tuning.saved_results import apply_tuning, facts, kept_corrections, model_mark, save_result

_LOOK_S = 0.5
_LOOKS = {"quick": 20, "thorough": 60}
"""Checks for busy programs before starting anyway: for 10 and for 30 seconds."""

TuningEvent = TuningProgress | TuningMeasured | TuningPlans | TuningTimed
_PACES = {"quick": QUICK_PACE, "thorough": THOROUGH_PACE}


class TunedEngine(RacedEngine, Protocol):
    @property
    def asked(self) -> EngineConfig | None: ...

    @property
    def info(self) -> ModelInfo | None: ...

    def load(
        self, config: EngineConfig, *, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> ModelInfo: ...


@dataclass(frozen=True)
class TuningSurroundings:
    """A run's access to the machine; replaced in tests.

    Attributes:
        look: the probe.
        measure: see `measured_machine`.
        paces: of the race, by kind.
        now: ISO 8601, UTC.
        watch: see `OtherPrograms.watch`.
        pause: sleeps for some seconds.
    """

    look: Callable[[], Probe] = probe_machine
    measure: Callable[..., MeasuredMachine] = measured_machine
    paces: Callable[[str], RacePace] = lambda kind: _PACES[kind]
    now: Callable[[], str] = lambda: datetime.now(UTC).isoformat(timespec="seconds")
    watch: Callable[[], Share] = field(default_factory=lambda: OtherPrograms().watch)
    pause: Callable[[float], None] = time.sleep


def tune(
    engine: TunedEngine,
    request: StartTuning,
    tell: Callable[[TuningEvent], None],
    cancelled: Callable[[], bool],
    surroundings: TuningSurroundings | None = None,
) -> TuningFinished:
    """Performs `request`.

    Once started, cancellation and problems are reported in the ending; only unexpected errors are raised, after the
    earlier model has been reloaded. A result is saved only by a complete run, and not if other programs were busy,
    unless `request.even_if_busy`; `keeping.keep_anyway` can save it afterwards.

    Raises:
        EngineError: the model is not found or not understood; nothing has changed.
    """
    return _Tuning(engine, request, tell, cancelled, surroundings or TuningSurroundings()).run()


class _Tuning:
    def __init__(
        self,
        engine: TunedEngine,
        request: StartTuning,
        tell: Callable[[TuningEvent], None],
        cancelled: Callable[[], bool],
        surroundings: TuningSurroundings,
    ) -> None:
        self._engine, self._request, self._tell, self._cancelled = engine, request, tell, cancelled
        self._around = surroundings
        self._folder = resolve(request.config.model)
        self._config = replace(request.config, model=str(self._folder))
        self._shape = find_shape(str(self._folder))
        self._held = engine.asked
        self._touched = False
        self._notes: list[str] = []
        self._others = 0.0
        self._unsaved: Measurements | None = None
        self._saved = True

    def run(self) -> TuningFinished:
        result, problem, finished = None, "", False
        try:
            result = self._stages()
            finished = True
        except RequestCancelled:
            pass
        except EngineError as error:
            problem = error.message
        except BaseException:  # an internal error, reported by the caller: restore the user's model first
            self._restore()
            raise
        note = self._restore()
        loaded = self._engine.info if self._touched else None
        ending = TuningFinished(self._request.request_id, finished, result, self._touched, loaded, note, problem)
        if not finished:
            return ending
        return replace(ending, saved=self._saved, others=self._others, unsaved=self._unsaved)

    def _stages(self) -> TuningResult | None:
        self._progress("probing", "", 0.0)
        probe = self._around.look()
        self._check()
        self._wait_for_others()
        measured = self._measure(probe)
        if self._request.until == "measured":
            return None
        self._progress("planning", "", 0.0)
        field = self._plan(probe, measured)
        self._check()
        self._tell(TuningPlans(self._request.request_id, field.plan, field.contestants))
        if self._request.until == "planned":
            return None
        return self._time(probe, field)

    def _wait_for_others(self) -> None:
        """Waits for busy programs to finish, unless the result is wanted in any case."""
        looks = 0 if self._request.even_if_busy else _LOOKS[self._request.kind]
        for number in range(looks):
            taken = self._around.watch()
            self._around.pause(_LOOK_S)
            self._check()
            if not is_busy(others := taken()):
                return
            self._progress("waiting", f"{others:.0%}", number / looks)

    def _note_others(self, others: float) -> None:
        self._others = max(self._others, others)

    @property
    def _may_save(self) -> bool:
        return self._request.even_if_busy or not is_busy(self._others)

    def _measure(self, probe: Probe) -> MeasuredMachine:
        request = self._request
        self._progress("measuring", "", 0.0)
        taken = self._around.watch()
        found = self._around.measure(
            probe,
            self._config,
            request.kind,
            again=request.measure_again,
            before_measuring=self._free,
            on_progress=lambda name, done, number: self._progress("measuring", name, done, number),
            cancelled=self._cancelled,
        )
        self._check()
        others = 0.0 if found.kept else taken()
        self._note_others(others)
        if not found.kept:
            found = replace(found, measurements=replace(found.measurements, others=others))
        kept = found.measurements
        notes = kept.notes
        busy = (busy_note(others),) if is_busy(others) else ()
        if not found.kept and not self._may_save:
            self._unsaved, self._saved = kept, False
        elif not found.kept:
            try:
                save_measurements(kept)
            except OSError as error:
                notes = (*notes, f"Could not save the measurements: {error.strerror or error}.")
        self._notes += notes
        notes = (*notes, *busy)
        skipped = tuple(f"{name}: {reason}" for name, reason in kept.skipped.items())
        kind: TuningKind = "thorough" if kept.kind == "thorough" else "quick"
        self._tell(
            TuningMeasured(
                request.request_id, found.device, kind, kept.taken_at, found.kept, tuple(notes), skipped, others
            )
        )
        return found

    def _plan(self, probe: Probe, measured: MeasuredMachine) -> Field:
        mark = model_mark(self._folder)
        applied = apply_tuning(self._config, self._folder, lambda: probe)
        return choose_contestants(
            Situation(
                machine=lambda precision: machine_profile(
                    probe,
                    measured.measurements,
                    precision=self._shape.measured_as(precision),
                    expert_bytes=self._shape.expert_bytes(precision),
                ),
                model=self._shape,
                asked=self._config,
                before=applied.config,
                has_card=bool(measured.device),
                threads=_threads(probe, measured.measurements),
                others=_others(probe, measured.device),
                corrections=kept_corrections(mark, described(probe)),
            )
        )

    def _time(self, probe: Probe, field: Field) -> TuningResult:
        request_id = self._request.request_id
        self._free()
        watcher = RaceWatcher(
            loading=lambda name, done: self._progress("loading", name, done),
            decoding=self._decoding,
            timed=lambda timed: self._tell(TuningTimed(request_id, timed)),
            cancelled=self._cancelled,
            watch=self._around.watch,
        )
        timed = race(self._engine, field.contestants, self._around.paces(self._request.kind), watcher)
        self._check()
        self._note_others(max((one.others for one in timed if not one.problem), default=0.0))
        result = self._result(probe, field, timed)
        if not self._may_save:
            self._saved = False
        elif result.winner:
            try:
                save_result(result)
            except OSError as error:
                self._saved = False
                result = replace(
                    result, notes=(*result.notes, f"Could not save the result: {error.strerror or error}.")
                )
        return result

    def _result(self, probe: Probe, field: Field, timed: list[Timed]) -> TuningResult:
        won = winner_of(timed)
        busy = busy_note(self._others) if is_busy(self._others) else ""
        return TuningResult(
            model=self._shape.name,
            model_mark=model_mark(self._folder),
            asked=self._config,
            kind=self._request.kind,
            taken_at=self._around.now(),
            machine=facts(described(probe)),
            timed=tuple(timed),
            winner=won.contestant.name if won is not None else "",
            corrections=corrections_from(timed, field.modelled),
            notes=tuple(filter(None, (*self._notes, busy, drift_note(timed)))),
            others=self._others,
        )

    def _free(self) -> None:
        """Unloads the current model, to free its memory."""
        self._touched = True
        self._engine.unload()

    def _restore(self) -> str:
        """Reloads the earlier model, uncancellably; returns why that failed, or an empty text."""
        if not self._touched:
            return ""
        held = self._held
        try:
            self._engine.unload()
            if held is None:
                return ""
            name = Path(held.model).name
            self._progress("restoring", name, 0.0)
            self._engine.load(
                held,
                on_progress=lambda done, total: self._progress("restoring", name, done / total if total else 0.0),
                cancelled=lambda: False,
            )
        except (EngineError, MemoryError, RuntimeError, OSError) as error:
            reason = error.message if isinstance(error, EngineError) else str(error).partition("\n")[0]
            name = Path(held.model).name if held is not None else "The model"
            return f"{name} could not be reloaded: {reason}"
        return ""

    def _decoding(self, name: str, done: float, rate: float) -> None:
        self._progress("timing", name, done, TuningNumber("decode", name, rate, "tokens/s") if rate else None)

    def _progress(self, stage: Stage, name: str, done: float, number: TuningNumber | None = None) -> None:
        self._tell(TuningProgress(self._request.request_id, stage, name, min(1.0, max(0.0, done)), number))

    def _check(self) -> None:
        if self._cancelled():
            raise RequestCancelled


def _threads(probe: Probe, measurements: Measurements) -> tuple[int, ...]:
    """All cores, and the thread count with the fastest weight reads if it differs, or nearly as fast ones."""
    most = max(1, min(probe.physical_cores or probe.usable_cpus, probe.usable_cpus))
    found = {most}
    for precision in LADDER:
        by_threads = measurements.weights_bytes_per_s(precision)
        if by_threads:
            best = max(by_threads.values())
            found.add(min(count for count, rate in by_threads.items() if rate >= 0.97 * best))
    return tuple(sorted(found))


def _others(probe: Probe, device: str) -> Limits:
    """Memory used by other programs; an emulated device is not shared."""
    vram = probe.vram_in_use if device.startswith(CARD_NAMES) else 0
    return Limits(vram_of_others=vram, ram_of_others=probe.ram_in_use)
