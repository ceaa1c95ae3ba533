"""Which way the next token goes: as one that the device computes by itself, or layer by layer by the dispatcher.

A token of the device's own leaves all misses to the CPU, and hands over by flags.  The dispatcher divides misses
between the CPU and the link, which can be sooner where many miss, and takes more of the host's time for every layer.
So the price of the whole token decides, at the share of experts that miss these days: what the layers take by the
measured latencies, as in `engine.planner.step_time`, and what tokens of each way were found to take over that.

How many misses are copied to a device after a token: as many as its hits pay for, twice over.

A copy reads the same memory as the CPU that computes misses, and on an emulated card it also takes a core.  What a copy
costs, and what a hit gains over a miss, is read from the tokens themselves: their times are explained by how many
experts they missed and how many copies were started before them, by least squares in which old tokens count less and
less (Ljung 1999, section 11.2, as sums).  Before there are tokens enough, what was measured of single experts counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine.common.choice import Choice, clearly_least
from engine.common.costs import DISPATCHED_LAYER_S, FLAGS_LAYER_S, drawn
from engine.experts.latency import LatencyModel

_REMEMBERED = 256
"""Tokens after which one counts by 1/e."""
_PRIOR = 32.0
"""The estimate beforehand counts as so many tokens, each an expert or a copy away from the mean."""
_SHARE = 0.5
"""Part of what hits gain that copies may cost."""
_TRIALS = 0.01
"""Part of the time that copies may take even if hits gain nothing: otherwise nobody would see when they do."""
_DEAREST = 16.0
"""The most hits that are asked for a copy."""
_OUTLIER = 2.0
"""A token counts as no longer than so many usual ones: something else has run meanwhile."""


class CopyPace:
    """The price of copies, and how many are due.

    Args:
        hit_s: seconds that a hit gains over a miss, as estimated beforehand.
        copy_s: seconds that a copy costs the tokens meanwhile, as estimated beforehand.

    Attributes:
        hit_s, copy_s: the same as of now.
        token_s: of late.
    """

    def __init__(self, hit_s: float, copy_s: float) -> None:
        self.hit_s, self.copy_s, self.token_s = hit_s, copy_s, 0.0
        self._prior = (hit_s, copy_s)
        self._weight, self._missed, self._copies = 0.0, 0.0, 0.0
        self._mm = self._mc = self._cc = self._mt = self._ct = 0.0
        self._due = 0.0

    def observe(self, token_s: float, missed: int, copies: int) -> None:
        """A token took so long, with so many experts missed, and copies started before it."""
        if self._weight:
            token_s = min(token_s, _OUTLIER * self.token_s)
        keep = 1 - 1 / _REMEMBERED
        self._weight = keep * self._weight + 1
        share = 1 / self._weight
        m, c, t = missed - self._missed, copies - self._copies, token_s - self.token_s
        self._missed, self._copies, self.token_s = (
            self._missed + share * m,
            self._copies + share * c,
            self.token_s + share * t,
        )
        rest = 1 - share  # the sums are about the means, which have moved (West 1979)
        self._mm, self._mc = keep * self._mm + rest * m * m, keep * self._mc + rest * m * c
        self._cc, self._mt = keep * self._cc + rest * c * c, keep * self._mt + rest * m * t
        self._ct = keep * self._ct + rest * c * t
        mm, cc = self._mm + _PRIOR, self._cc + _PRIOR
        mt, ct = self._mt + _PRIOR * self._prior[0], self._ct + _PRIOR * self._prior[1]
        determinant = mm * cc - self._mc * self._mc
        self.hit_s = (mt * cc - ct * self._mc) / determinant
        self.copy_s = (ct * mm - mt * self._mc) / determinant

    @property
    def price(self) -> float:
        """Hits that pay for a copy, twice over: a policy that brings experts for fewer costs more than it gains."""
        asked = self.copy_s / (_SHARE * self.hit_s) if self.hit_s > 0 else _DEAREST
        return min(max(asked, 0.0), _DEAREST)

    def due(self, hits: int, most: int) -> int:
        """How many copies to start after a token with so many hits, up to `most`."""
        worth_s = max(_SHARE * self.hit_s * hits, _TRIALS * self.token_s)
        self._due = min(self._due + worth_s / self.copy_s, most) if self.copy_s > 0 else float(most)
        return int(self._due)

    def started(self, copies: int) -> None:
        """So many of those due."""
        self._due -= copies


_AGAIN: Final = 32
"""Tokens between two looks, at which what they took is learnt."""
_WORTH: Final = 0.1
"""The other way is taken if it takes less by this share: changing costs a capture."""
_FIRST: Final = 4
"""Tokens after a change that say little: graphs are captured, and kernels met for the first time."""
_WEIGHT: Final = 0.05
"""Of the newest token in the share that misses."""


class PathChoice:
    """Which execution path single tokens take on one device.

    Args:
        latency: of the experts.
        layers: that have experts.
        per_token: experts of a token in each of them.
        miss_ratio: share of a token's experts that will miss, as far as that is known.
        is_busy: see `Choice`.

    Attributes:
        by_itself: whether the device computes the next token by itself.
        miss_ratio: of late, as of the last look.
    """

    def __init__(
        self,
        latency: LatencyModel,
        layers: int,
        per_token: int,
        miss_ratio: float,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._latency, self._layers, self._per_token = latency, layers, per_token
        self.miss_ratio = miss_ratio
        self._new: list[tuple[float, int]] = []
        self._priced_at, self._took_s = self._rates(), self._tables()
        self._choice = Choice((True, False), margin=_WORTH, warm=_FIRST, run=_FIRST, is_busy=is_busy)
        self.by_itself = self._choice.take(self._prices_s(miss_ratio))

    def is_worth_it(self, miss_ratio: float) -> bool:
        """Whether tokens of the device's own are clearly better at this share of misses, before there are any."""
        return clearly_least(self._prices_s(miss_ratio), False, _WORTH)

    def observe(self, seconds: float, missed: int) -> None:
        """A token of the present way took so long, with so many experts missed in all layers."""
        # Code that runs once a token has left the processor's caches, and takes long: all are learnt at once.
        self._new.append((seconds, missed))
        if len(self._new) == _AGAIN or self._choice.is_trying:
            for token in self._new:
                self._learn(*token)
            if (rates := self._rates()) != self._priced_at:
                self._priced_at, self._took_s = rates, self._tables()
            self.by_itself = self._choice.take(self._prices_s(self.miss_ratio), steps=len(self._new))
            self._new.clear()

    def _learn(self, seconds: float, missed: int) -> None:
        ratio = missed / (self._layers * self._per_token)
        self.miss_ratio += _WEIGHT * (ratio - self.miss_ratio)
        self._choice.observe(self.by_itself, seconds, self._price_s(ratio, self.by_itself))

    def _prices_s(self, miss_ratio: float) -> dict[bool, float]:
        return {way: self._price_s(miss_ratio, way) for way in (True, False)}

    def _price_s(self, miss_ratio: float, by_itself: bool) -> float:
        """Seconds of a token, as predicted."""
        beside_s = FLAGS_LAYER_S if by_itself else DISPATCHED_LAYER_S
        return self._layers * beside_s + self._layers_s(miss_ratio, by_itself)

    def _layers_s(self, miss_ratio: float, by_itself: bool) -> float:
        """Seconds of the experts of all layers, whose misses are a binomial draw."""
        took_s = zip(drawn(self._per_token, miss_ratio), self._took_s[by_itself], strict=True)
        return self._layers * sum(share * seconds for share, seconds in took_s)

    def _rates(self) -> tuple[float, float, float]:
        """What the tables depend on, which changes only while the dispatcher computes."""
        return self._latency.cpu_s(1), self._latency.gpu_s(1), self._latency.transfer_s

    def _tables(self) -> dict[bool, list[float]]:
        """Of both ways, seconds of a layer by its number of misses, of which one way fetches as many as is best."""
        counts = range(self._per_token + 1)
        return {
            True: [self._layer_s(misses, range(1)) for misses in counts],
            False: [self._layer_s(misses, range(misses + 1)) for misses in counts],
        }

    def _layer_s(self, misses: int, fetched: Sequence[int]) -> float:
        """Seconds of a layer with so many misses, of which as many are fetched as is best of `fetched`."""
        latency, hits = self._latency, self._per_token - misses
        hits_s, cpu_s, copy_s = latency.hits_s([1] * hits), latency.cpu_s(1), latency.transfer_s

        def ends_s(count: int) -> float:
            card_s = max(hits_s, count * copy_s) + latency.gpu_s(1) if count else hits_s
            return max(card_s, (misses - count) * cpu_s)

        return min(map(ends_s, fetched))
