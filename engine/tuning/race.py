"""The race: loads each contestant in turn, warms it up and times real tokens, forwards and then backwards."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.common.choice import clearly_least
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, RequestCancelled
from engine.common.model_info import ModelInfo
from engine.hardware.other_programs import Share
from engine.planner.precision import worthwhile
from engine.tuning.result import Contestant, DecodeRate, Timed

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


def race(
    engine: RacedEngine,
    contestants: Sequence[Contestant],
    pace: RacePace,
    watcher: RaceWatcher,
    clock: Callable[[], float] = time.monotonic,
) -> list[Timed]:
    """Times all contestants; the fastest first, failed ones last.

    A failure of one contestant (no memory, a device error) does not affect the others. The last one stays loaded.

    Raises:
        RequestCancelled: soon after `cancelled()`.
    """
    return _Race(engine, [_Entrant(one) for one in contestants], pace, watcher, clock).run()


class _Race:
    def __init__(
        self,
        engine: RacedEngine,
        entrants: list[_Entrant],
        pace: RacePace,
        watcher: RaceWatcher,
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._entrants, self._pace, self._watcher = engine, entrants, pace, watcher
        self._clock = clock
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
        name, begun = entrant.contestant.name, self._clock()
        self._loaded = None
        self._watcher.loading(name, 0.0)
        entrant.info = self._engine.load_exactly(
            entrant.contestant.config,
            on_progress=lambda done, total: self._watcher.loading(name, done / total if total else 0.0),
            cancelled=self._watcher.cancelled,
        )
        entrant.load_s = entrant.load_s or self._clock() - begun
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
