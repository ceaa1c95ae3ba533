"""What pieces of work take: from data sheets, then from the machine's measurements, then from the run itself.

A kind of work has a size (tokens, bytes).  Where something is known of it beforehand, the run corrects that by a
factor; where nothing is, its own times are averaged.  One time says little: a page fault is no trend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum, StrEnum
from typing import Final

OUTLIER: Final = 2.0
"""A time this much above or below what was expected counts as if it were only so much."""
_OF_ITS_OWN: Final = 4.0
"""Times of one size count half, when there were so many, as what those of all sizes say of it."""

FLAGS_LAYER_S, DISPATCHED_LAYER_S = 20e-6, 150e-6
"""What a layer takes beside its experts in a token that a card computes by itself, and in one of the dispatcher's: both
assumed; see `docs/step-time.md`."""


class Source(IntEnum):
    """Where an estimate comes from; the higher one counts."""

    ASSUMED = 0
    DATA_SHEET = 1
    MEASURED = 2
    OBSERVED = 3


class Cost(StrEnum):
    """Kinds of work, and what their size is."""

    CPU_EXPERT = "an expert on the CPU, by tokens"
    CPU_PROMPT_EXPERT = "one of many of a prompt, by tokens"
    CARD_EXPERT = "an expert on the card, by tokens"
    H2D = "a copy to the card, by bytes"
    H2D_PAGEABLE = "the same from memory that is not pinned"
    D2H = "a copy from the card, by bytes"
    DISK = "a read from disk, by bytes"
    CPU_LAYER = "a layer without its experts on the CPU, by tokens"
    CARD_LAYER = "the same on the card, by tokens"
    CPU_ATTENTION = "attention on the CPU, by bytes of keys and values"
    CARD_ATTENTION = "the same on the card"
    FETCHING = "letting an expert be fetched, which keeps a step"
    FETCHING_FOR_PROMPT = "the same in a prompt"
    ENTERING = "a prompt's way to the CPU and back, beside computing and copying"
    BETWEEN = "from experts that are brought ahead to the layer that they are for"
    CPU_PICTURE = "a picture through the tower on the CPU, by billions of operations"
    CARD_PICTURE = "the same on the card, its weights being copied there first"
    STEP = "a step of a chat, by tokens"
    TAKING_BACK = "forgetting the end of a step"
    TOKEN = "a token of each of those who are answered"
    DISTINCT = "distinct experts that tokens use, over those that even routing would"


class Corrected:
    """What was known beforehand, times what the run has found."""

    __slots__ = ("base", "factor", "source", "weight")

    def __init__(self, base: Callable[[float], float], source: Source, weight: float) -> None:
        self.base, self.source, self.weight, self.factor = base, source, weight, 1.0

    def seconds(self, size: float) -> float:
        return self.base(size) * self.factor

    def correct(self, observed_s: float, expected_s: float) -> None:
        """`expected_s` is without the factor."""
        off = observed_s / (expected_s * self.factor)
        self.factor *= min(max(off, 1 / OUTLIER), OUTLIER) ** self.weight


class _Seen:
    """Times of work of which nothing was known: of size 1, and of larger ones in terms of it.

    Args:
        weight: of the newest time; falling: the same if it is shorter.
        further: what each further unit of size is taken to cost, in work of size 1, before it was seen.
        raw: so many times are averaged as they are at first.
        fades: factor on it each time that it is asked for: what is thought dear must not be avoided for ever.
    """

    __slots__ = ("_each", "_own", "_raw", "_seen_larger", "count", "fades", "falling", "first", "weight")

    def __init__(self, weight: float, falling: float | None, further: float, fades: float, raw: int) -> None:
        self.weight, self.falling, self.fades = weight, weight if falling is None else falling, fades
        self.first, self.count, self._raw = 0.0, 0, raw
        self._each, self._seen_larger = further, 0
        self._own: dict[float, tuple[float, int]] = {}

    def seconds(self, size: float) -> float:
        self.first *= self.fades
        return self.first * self.ratio(size)

    def ratio(self, size: float) -> float:
        """Over work of size 1."""
        if size == 1:
            return 1.0
        from_all = 1 + max(0.0, self._each) * (size - 1)
        own, times = self._own.get(size, (from_all, 0))
        return (times * own + _OF_ITS_OWN * from_all) / (times + _OF_ITS_OWN)

    def see(self, size: float, seconds: float) -> None:
        if size == 1:
            self.count += 1
            if self.count <= self._raw or not self.first:
                self.first += (seconds - self.first) / self.count
            else:
                seconds = min(max(seconds, self.first / OUTLIER), OUTLIER * self.first)
                self.first += (self.falling if seconds < self.first else self.weight) * (seconds - self.first)
        elif self.first:
            usual, times = self._own.get(size, (self.ratio(size), 0))
            ratio = min(max(seconds / self.first, usual / OUTLIER), OUTLIER * usual)
            self._seen_larger += 1
            self._each += max(self.weight, 1 / self._seen_larger) * ((ratio - 1) / (size - 1) - self._each)
            self._own[size] = usual + max(self.weight, 1 / (times + 1)) * (ratio - usual), times + 1


class CostModel:
    """Seconds of each kind of work, by its size."""

    def __init__(self) -> None:
        self._known: dict[Cost, Corrected] = {}
        self._seen: dict[Cost, _Seen] = {}

    def know(
        self, kind: Cost, seconds: Callable[[float], float], source: Source = Source.MEASURED, *, weight: float = 0.05
    ) -> Corrected:
        """Seconds by size are known beforehand; what a better source says stays.

        Args:
            weight: of one observation in the factor that corrects them.

        Returns:
            what `predict` asks, for those who ask often.
        """
        known = self._known.get(kind)
        if known is None or known.source <= source:
            known = self._known[kind] = Corrected(seconds, source, weight)
        return known

    def learn(
        self,
        kind: Cost,
        *,
        weight: float = 0.05,
        falling: float | None = None,
        further: float = 1.0,
        fades: float = 1.0,
        raw: int = 8,
    ) -> None:
        """Nothing is known beforehand; how its times are averaged: see `_Seen`."""
        self._seen[kind] = _Seen(weight, falling, further, fades, raw)

    def source(self, kind: Cost) -> Source:
        if (known := self._known.get(kind)) is not None:
            return known.source if known.factor == 1.0 else Source.OBSERVED
        return Source.OBSERVED if kind in self._seen and self._seen[kind].count else Source.ASSUMED

    def knows(self, kind: Cost) -> bool:
        """Whether something is known of it beforehand."""
        return kind in self._known

    def factor(self, kind: Cost) -> float:
        """What the run has found, over what was known beforehand."""
        return self._known[kind].factor if kind in self._known else 1.0

    def predict(self, kind: Cost, size: float = 1) -> float:
        """Seconds; 0 of work of which nothing is known, and none of size 1 was observed."""
        if (known := self._known.get(kind)) is not None:
            return known.seconds(size)
        return self._seen[kind].seconds(size) if kind in self._seen else 0.0

    def ratio(self, kind: Cost, size: float) -> float:
        """Over work of size 1, also before any was observed."""
        known = self._known.get(kind)
        return known.base(size) / known.base(1) if known is not None else self._seen[kind].ratio(size)

    def observe(self, kind: Cost, size: float | Sequence[float], seconds: float) -> None:
        """Cost of this size, or of each of these sizes in turn, has taken so long.  Invalid times are ignored."""
        known = self._known.get(kind)
        if known is not None:
            sizes = size if isinstance(size, Sequence) else (size,)
            self.correct(kind, seconds, sum(map(known.base, sizes)))
        elif math.isfinite(seconds) and seconds >= 0 and not isinstance(size, Sequence):
            if kind not in self._seen:
                self.learn(kind)
            self._seen[kind].see(size, seconds)

    def correct(self, kind: Cost, seconds: float, expected_s: float) -> None:
        """Cost that had been known to take `expected_s` beforehand took so long: as `observe`."""
        if seconds > 0 and expected_s > 0 and math.isfinite(seconds):
            self._known[kind].correct(seconds, expected_s)


def prefers_cpu(costs: CostModel, record_nbytes: float, tokens: float = 1, *, pinned: bool = True) -> bool:
    """Fiddler's Algorithm 1 for an expert that is not on the card: cpu_lat(s) <= gpu_lat(s) + transfer_lat."""
    copied_s = costs.predict(Cost.H2D if pinned else Cost.H2D_PAGEABLE, record_nbytes)
    return costs.predict(Cost.CPU_EXPERT, tokens) <= costs.predict(Cost.CARD_EXPERT, tokens) + copied_s


def picture_on_card(costs: CostModel, gflops: float) -> bool:
    """Whether the card reads a picture: not where that is known to take longer than the CPU."""
    on_cpu_s, on_card_s = costs.predict(Cost.CPU_PICTURE, gflops), costs.predict(Cost.CARD_PICTURE, gflops)
    return not on_cpu_s or on_card_s <= on_cpu_s


def drawn(experts: int, miss_ratio: float) -> list[float]:
    """Probability of each number of misses among so many experts: a binomial draw."""
    hit_ratio = 1 - miss_ratio
    return [math.comb(experts, n) * miss_ratio**n * hit_ratio ** (experts - n) for n in range(experts + 1)]
