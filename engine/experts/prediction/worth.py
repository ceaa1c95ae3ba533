"""What a prefetch is worth now, whoever predicted it: what it saves, what it wastes, whether it finds a place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.experts.prediction.aging import Aging
from engine.experts.prediction.target import PrefetchTimes

_PULL = 0.02
_CONTENTION = 0.25
"""Of its time that a copy takes from others who use the same memory meanwhile: RAM is a few times as fast as a link."""
_FADING = 0.98
_ASSUMED_CALL_S = 10e-6
_MEMORY = 1000.0


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the worth of a prefetch depends on besides the predictor.

    Attributes:
        saved_s: what the first, second... prefetch for a layer saves if its expert is wanted, as things have been.
        waste_s: what one for nothing costs: urgent copies that it delays, somebody wanted whom it drives out.
        call_s: of asking the target, for each layer.
        placed: share of the prefetches asked for that found a slot.
        layers: of a step.
    """

    saved_s: tuple[float, ...]
    waste_s: float
    call_s: float
    placed: float
    layers: int


class Worth:
    """Follows how prefetches fare.

    Args:
        times: what they take and save if nothing else is on its way.
        places: most prefetches for a layer.
    """

    def __init__(self, times: Callable[[], PrefetchTimes], places: int) -> None:
        self._measure = times
        self.times = times()
        self._saved_s: list[float] | None = None
        self._places = places
        self._call_s = _ASSUMED_CALL_S
        self._asked = self._begun = 1.0

    def look(self, lead_s: float, backlog_bytes: int) -> None:
        """So much is on its way at this moment, `lead_s` before a layer."""
        saved_s = [self.times.saved_s(place, lead_s, backlog_bytes) for place in range(self._places)]
        if self._saved_s is None:
            self._saved_s = saved_s
        self._saved_s = [old + _PULL * (new - old) for old, new in zip(self._saved_s, saved_s, strict=True)]

    def asked(self, asked: int, begun: int) -> None:
        """So many of the prefetches that were asked for have begun."""
        self._asked += asked
        self._begun += begun
        if self._asked > _MEMORY:
            self._asked, self._begun = self._asked / 2, self._begun / 2

    def called(self, took_s: float) -> None:
        """What a layer's prefetches took of the step's time."""
        self._call_s += _PULL * (min(took_s, 4 * self._call_s) - self._call_s)

    def doubt(self) -> None:
        """Nobody prefetches: it may be that there are places again."""
        self._asked, self._begun = (1 + _FADING * (count - 1) for count in (self._asked, self._begun))

    def changed(self) -> None:
        """What was seen holds for another distance."""
        self._saved_s = None

    def now(self, missing: float, layer_s: float, layers: int, aging: Aging) -> Circumstances:
        """
        Args:
            missing: experts that a layer wants and that are not there, on average.
            layer_s: of one layer.
            layers: of a step.
            aging: knows who was driven out in error.
        """
        times = self.times = self._measure()
        # An urgent copy that finds a wasted one on the link waits for it: as often as the link has urgent copies.
        busy = min(1.0, missing * times.urgent_share * times.arrival_s / layer_s) if layer_s else 0.0
        return Circumstances(
            saved_s=tuple(self._saved_s or [0.0] * self._places),
            waste_s=max(busy, _CONTENTION) * times.arrival_s + aging.regret * times.miss_s,
            call_s=self._call_s,
            placed=self._begun / self._asked,
            layers=layers,
        )
