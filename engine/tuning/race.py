"""The race: loads each contestant in turn, warms it up and times real tokens, forwards and then backwards."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.checkpoint.model_shape import ModelShape
from engine.common.choice import clearly_least
from engine.common.config import CACHE_FIELDS, EngineConfig
from engine.common.errors import EngineError, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.formats import AUTO, FORMATS, LADDER
from engine.hardware.cpu import compute_threads
from engine.hardware.machine import HardwareProfile
from engine.hardware.probe import Share
from engine.planner.plan import make_plan
from engine.planner.plan_parts import CHAT, Limits, Plan, worthwhile
from engine.planner.plan_search import ENGINE_SETTINGS
from engine.planner.predict import predict_decode
from engine.tuning.known_speed import corrected, corrected_plan, mechanism, with_decode
from engine.tuning.result import Contestant, Correction, DecodeRate, Timed

_MOST = 3
_HOPEFUL = 0.5
"""Fraction of the best prediction, weighted by quality: candidates below are not worth loading."""
_ON_CARD = ("Switchyard mixed", "Switchyard, misses on the CPU", "Switchyard mixed, static", "whole-layer prefetch")


@dataclass(frozen=True)
class Situation:
    """The input of a tuning run.

    Attributes:
        machine: the machine by precision of the experts, each with its own measured rates.
        model: its shape.
        asked: the user's settings; before: the settings currently in effect.
        has_card: whether a device other than the CPU is used.
        threads: CPU thread counts worth trying.
        others: limits, including the bytes that other programs use.
        corrections: from earlier timings.
    """

    machine: Callable[[str], HardwareProfile]
    model: ModelShape
    asked: EngineConfig
    before: EngineConfig
    has_card: bool
    threads: tuple[int, ...]
    others: Limits
    corrections: tuple[Correction, ...] = ()


@dataclass(frozen=True)
class Field:
    """The contestants.

    Attributes:
        plan: the planner's first choice, corrected.
        contestants: in order of timing.
        modelled: uncorrected predictions by name; 0 if there is none.
    """

    plan: Plan
    contestants: tuple[Contestant, ...]
    modelled: dict[str, float]


@dataclass(frozen=True)
class Candidate:
    """A predicted way to run the model.

    Attributes:
        contestant: with the corrected prediction.
        precision: of the experts, `auto` resolved.
        modelled: tokens/s by the machine model alone.
        on_card: whether a device is used.
    """

    contestant: Contestant
    precision: str
    modelled: float
    on_card: bool

    @property
    def mechanism(self) -> tuple[Any, ...]:
        """A key that differs between different ways to run."""
        config = self.contestant.config
        return mechanism(config, self.precision, on_card=self.on_card, threads=config.threads or compute_threads())

    @property
    def worth(self) -> float:
        """Predicted tokens/s, less what the precision has to be faster by than the best quality."""
        ladder = LADDER[: LADDER.index(self.precision) + 1] if self.precision in LADDER else ()
        return self.contestant.predicted_tokens_per_s / math.prod(FORMATS[each].worth for each in ladder)


def choose_contestants(situation: Situation) -> Field:
    """The plan, up to two alternatives that may be better, and the current settings unless they are one of these."""
    candidates = predicted(situation, every_config(situation))
    speeds: dict[str, float] = {}
    for one in candidates:
        speeds[one.precision] = max(speeds.get(one.precision, 0.0), one.contestant.predicted_tokens_per_s)
    asked = situation.asked.precision
    precision = (worthwhile(speeds) or asked) if asked == AUTO else asked
    plan = corrected_plan(_plan(situation, precision), situation.corrections)
    first = _predicted(situation, plan.policy, _from_plan(situation, plan))
    if first is not None:  # the plan and the first contestant are the same configuration, so they get the same figure
        same = first.contestant
        plan = with_decode(plan, same.predicted_tokens_per_s, same.low, same.high)
    # An explicitly requested card is used even if the plan would not use it.
    elsewhere = plan.card is None and situation.has_card and situation.asked.device != "auto"
    chosen = [first] if first is not None and not elsewhere else []
    ranked = sorted(candidates, key=lambda one: -one.worth)
    for one in ranked:
        hopeful = one.worth > _HOPEFUL * ranked[0].worth
        if len(chosen) < _MOST and hopeful and one.mechanism not in {other.mechanism for other in chosen}:
            chosen.append(one)
    before = _predicted(situation, "as it is now", situation.before)
    return _field(plan, chosen, before, situation)


def every_config(situation: Situation) -> list[tuple[str, EngineConfig]]:
    """(name, settings) of every allowed configuration; explicit settings stay unchanged."""
    asked, found = situation.asked, []
    precisions = situation.model.precisions if asked.precision == AUTO else (asked.precision,)
    for precision in precisions:
        base = replace(asked, precision=precision)
        for threads in situation.threads if asked.threads is None else (asked.threads,):
            if situation.has_card:
                found += [(how, replace(base, threads=threads, **ENGINE_SETTINGS[how])) for how in _on_card(asked)]
            if not situation.has_card or asked.device == "auto":
                found.append(("CPU only", replace(base, threads=threads, device="cpu")))
    return found


def predicted(situation: Situation, configs: Iterable[tuple[str, EngineConfig]]) -> list[Candidate]:
    return [one for how, config in configs if (one := _predicted(situation, how, config)) is not None]


def _on_card(asked: EngineConfig) -> Sequence[str]:
    plain = EngineConfig("")
    by_hand = any(getattr(asked, name) != getattr(plain, name) for name in CACHE_FIELDS)
    return _ON_CARD[:1] if by_hand else _ON_CARD


def _predicted(situation: Situation, how: str, config: EngineConfig) -> Candidate | None:
    on_cpu = replace(config, device="cpu") if not situation.has_card else config
    try:
        known = config.precision if config.precision != AUTO else situation.model.precisions[0]
        found = predict_decode(situation.machine(known), situation.model, on_cpu)
        if found.precision != known:
            found = predict_decode(situation.machine(found.precision), situation.model, on_cpu)
    except EngineError:
        return None
    on_card, rate = found.memory.card is not None, found.tokens_per_s
    threads = config.threads or compute_threads()
    modelled = rate, found.low, found.high
    rates = corrected(situation.corrections, found.precision, threads, modelled, on_card=on_card)
    ways = f", {config.cache_ways} ways" if on_card and config.cache_ways else ""
    how = (how if on_card else "CPU only") + ways
    name = f"{found.precision}, {how}, {threads} thread{'s' if threads > 1 else ''}"
    return Candidate(Contestant(name, config, *rates), found.precision, rate, on_card)


def _plan(situation: Situation, precision: str) -> Plan:
    asked = situation.asked
    others, use_card = situation.others, situation.has_card
    limits = Limits.of(
        replace(asked, precision=precision),
        use_card=use_card,
        vram_of_others=others.vram_of_others,
        ram_of_others=others.ram_of_others,
    )
    machine = situation.machine(precision if precision != AUTO else situation.model.precisions[0])
    return make_plan(machine, situation.model, CHAT, limits, measured=True)


def _from_plan(situation: Situation, plan: Plan) -> EngineConfig:
    """The plan's settings, overridden by explicit ones."""
    asked, plain = situation.asked, EngineConfig("")
    config = plan.engine_config(asked.model, asked.device)
    if asked.device != "auto":
        config = replace(config, device=asked.device)
    given = {name: value for name in CACHE_FIELDS if (value := getattr(asked, name)) != getattr(plain, name)}
    return replace(config, graphs=asked.graphs, speculation=asked.speculation, **given)


def _field(plan: Plan, chosen: list[Candidate], before: Candidate | None, situation: Situation) -> Field:
    now = before.mechanism if before is not None else None
    same = next((one for one in chosen if one.mechanism == now), None)
    found, modelled = [], {}
    for number, one in enumerate(chosen):
        name = one.contestant.name + (f" ({number + 1})" if one.contestant.name in modelled else "")
        found.append(replace(one.contestant, name=name, is_before=one is same, is_plan=number == 0))
        modelled[name] = one.modelled
    if same is None:
        present = Contestant("as it is now", situation.before, 0.0, 0.0, 0.0) if before is None else before.contestant
        name = present.name + (" (as it is now)" if present.name in modelled else "")
        modelled[name] = before.modelled if before is not None else 0.0
        found.insert(0, replace(present, name=name, is_before=True))
    return Field(plan, tuple(found), modelled)


_WARM_UP_TOKENS = 8
_WARM_UP_S = 3.0
_DRIFT = 0.15
_AS_GOOD = 0.03
"""Share of the time that another configuration in the same precision must save over the current settings."""


class RacedEngine(Protocol):
    """The engine as a race uses it; it holds one model at a time."""

    def load_exactly(
        self, config: EngineConfig, *, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> ModelInfo: ...

    def unload(self) -> None: ...

    def time_decode(
        self, tokens: int, seconds: float, on_token: Callable[[int, float], None], cancelled: Callable[[], bool]
    ) -> DecodeRate: ...


@dataclass(frozen=True, slots=True)
class RacePace:
    """The duration of a race.

    Attributes:
        tokens: of a repeat, or as many as fit into `seconds`.
        repeats: per load of a contestant.
        again_s: time available for a second round in reverse order, which treats all contestants alike if the machine
            slows down midway.
    """

    tokens: int
    seconds: float
    repeats: int
    again_s: float


QUICK_PACE = RacePace(32, 2.0, 3, 12.0)
THOROUGH_PACE = RacePace(96, 6.0, 5, 60.0)


@dataclass(frozen=True)
class RaceWatcher:
    """Callbacks of a race.

    Attributes:
        loading: contestant's name and 0 to 1.
        decoding: name, 0 to 1 of the whole race, tokens/s of this repeat so far; 0 before there is any.
        timed: a contestant's current timing.
        cancelled: polled for every token.
        watch: starts watching the CPU share of other programs; see `OtherPrograms.watch`.
    """

    loading: Callable[[str, float], None]
    decoding: Callable[[str, float, float], None]
    timed: Callable[[Timed], None]
    cancelled: Callable[[], bool]
    watch: Callable[[], Share] = lambda: lambda: 0.0


@dataclass
class _Entrant:
    contestant: Contestant
    rates: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    load_s: float = 0.0
    info: ModelInfo | None = None
    problem: str = ""

    def timed(self) -> Timed:
        info = self.info
        return Timed(
            contestant=self.contestant,
            tokens_per_s=statistics.median(self.rates) if self.rates and not self.problem else 0.0,
            rates=tuple(self.rates),
            ttft_s=statistics.median(self.ttfts) if self.ttfts else 0.0,
            load_s=self.load_s,
            device=info.device if info else "",
            precision=info.precision if info else "",
            threads=info.threads if info else 0,
            note=info.device_note if info else "",
            problem=self.problem,
            others=statistics.median(self.others) if self.others else 0.0,
        )


def race(engine: RacedEngine, contestants: Sequence[Contestant], pace: RacePace, watcher: RaceWatcher) -> list[Timed]:
    """Times all contestants; the fastest first, failed ones last.

    A failure of one contestant (no memory, a device error) does not affect the others. The last one stays loaded.

    Raises:
        RequestCancelled: soon after `cancelled()`.
    """
    return _Race(engine, [_Entrant(one) for one in contestants], pace, watcher).run()


class _Race:
    def __init__(self, engine: RacedEngine, entrants: list[_Entrant], pace: RacePace, watcher: RaceWatcher) -> None:
        self._engine, self._entrants, self._pace, self._watcher = engine, entrants, pace, watcher
        self._loaded: _Entrant | None = None
        self._visits, self._done = len(entrants), 0

    def run(self) -> list[Timed]:
        for entrant in self._entrants:
            self._visit(entrant)
        able = [entrant for entrant in self._entrants if not entrant.problem]
        if len(able) > 1 and sum(entrant.load_s for entrant in able[:-1]) <= self._pace.again_s:
            self._visits += len(able)
            for entrant in reversed(able):
                self._visit(entrant)
        return sorted((entrant.timed() for entrant in self._entrants), key=lambda one: -one.tokens_per_s)

    def _visit(self, entrant: _Entrant) -> None:
        try:
            if self._loaded is not entrant:
                self._load(entrant)
            self._time(entrant)
        except EngineError as error:
            self._failed(entrant, error.message)
        except (MemoryError, RuntimeError, OSError) as error:  # torch raises either when memory runs out
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._failed(entrant, text)
        self._done += 1
        self._watcher.timed(entrant.timed())

    def _failed(self, entrant: _Entrant, problem: str) -> None:
        entrant.problem = problem
        self._loaded = None
        self._engine.unload()

    def _load(self, entrant: _Entrant) -> None:
        self._check()
        name, begun = entrant.contestant.name, time.monotonic()
        self._loaded = None
        self._watcher.loading(name, 0.0)
        entrant.info = self._engine.load_exactly(
            entrant.contestant.config,
            on_progress=lambda done, total: self._watcher.loading(name, done / total if total else 0.0),
            cancelled=self._watcher.cancelled,
        )
        entrant.load_s = entrant.load_s or time.monotonic() - begun
        self._loaded = entrant
        # It fell back to another configuration than the one to be timed.
        if entrant.info.device == "cpu" and not entrant.contestant.is_before and _wants_card(entrant.contestant):
            raise RuntimeError(entrant.info.device_note or "It ran on the CPU instead.")

    def _time(self, entrant: _Entrant) -> None:
        pace, name = self._pace, entrant.contestant.name
        self._engine.time_decode(_WARM_UP_TOKENS, _WARM_UP_S, lambda _count, _rate: None, self._watcher.cancelled)
        for repeat in range(pace.repeats):
            self._check()

            def on_token(count: int, rate: float, repeat: int = repeat) -> None:
                visited = (repeat + min(1.0, count / pace.tokens)) / pace.repeats
                self._watcher.decoding(name, (self._done + visited) / self._visits, rate)

            others = self._watcher.watch()
            found = self._engine.time_decode(pace.tokens, pace.seconds, on_token, self._watcher.cancelled)
            self._check()
            if found.tokens_per_s <= 0:
                raise RuntimeError("It generated no tokens to time.")
            entrant.rates.append(found.tokens_per_s)
            entrant.ttfts.append(found.ttft_s)
            entrant.others.append(others())

    def _check(self) -> None:
        if self._watcher.cancelled():
            raise RequestCancelled


def drift_note(timed: Sequence[Timed]) -> str:
    """A note if all contestants changed speed in the second round (the median compensates); otherwise empty."""
    changes = []
    for one in timed:
        half = len(one.rates) // 2
        if half and not one.problem:
            changes.append(statistics.median(one.rates[half:]) / statistics.median(one.rates[:half]) - 1)
    changed = statistics.median(changes) if changes else 0.0
    if abs(changed) <= _DRIFT:
        return ""
    how = f"{changed:.0%} faster" if changed > 0 else f"{-changed:.0%} slower"
    return f"The machine became {how} while plans were timed (heat, battery or other programs): tune again at rest."


def winner_of(timed: Sequence[Timed]) -> Timed | None:
    """The winner: the fastest in the precision that is worth its loss of quality.

    The current settings stay unless something is faster by more than noise.  None if nothing ran.
    """
    able = [one for one in timed if not one.problem and one.tokens_per_s]
    best: dict[str, Timed] = {}
    for one in able:
        if one.precision not in best or one.tokens_per_s > best[one.precision].tokens_per_s:
            best[one.precision] = one
    precision = worthwhile({name: one.tokens_per_s for name, one in best.items()})
    if precision is None:
        return max(able, key=lambda one: one.tokens_per_s, default=None)
    before = next((one for one in able if one.contestant.is_before and one.precision == precision), None)
    return clearly_least(
        {one: 1 / one.tokens_per_s for one in filter(None, (best[precision], before))}, before, _AS_GOOD
    )


def _wants_card(contestant: Contestant) -> bool:
    return contestant.config.device != "cpu"
