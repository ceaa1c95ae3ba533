"""Which way the next token goes: as one that the device computes by itself, or layer by layer by the dispatcher.

A token of the device's own leaves all misses to the CPU, and hands over by flags.  The dispatcher divides misses
between the CPU and the link, which can be sooner where many miss, and takes more of the host's time for every layer.
So the price of the whole token decides, at the share of experts that miss these days: what the layers take by the
measured latencies, as in `engine.planner.step_time`, and what tokens took beyond that, which each way learns from its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Final

from engine.experts.latency import LatencyModel

_FLAGS_S: Final = 20e-6
_DISPATCH_S: Final = 150e-6
"""What a layer takes beside its experts in each way, before there are tokens: `docs/step-time.md`."""
_AGAIN: Final = 32
"""Tokens between two looks, at which what they took is learnt."""
_WORTH: Final = 0.9
"""The other way is taken if it takes no more than this part of what the present one takes: changing costs a capture."""
_FIRST: Final = 4
"""Tokens after a change that say little: graphs are captured, and kernels met for the first time."""
_WEIGHT: Final = 0.05
"""Of the newest token in an average."""
_FORGOTTEN: Final = 0.998
"""At each look the way that is not taken is thought a little more of what was thought of it at first: what happened to
it once, perhaps while the machine was busy, must not rule it out for ever."""
_LONGEST: Final = 2.0
"""A token counts as no longer than so many usual ones: something else has run meanwhile."""


class TokenChoice:
    """The way of single tokens on one device.

    Args:
        latency: of the experts.
        layers: that have experts.
        per_token: experts of a token in each of them.
        miss_ratio: share of a token's experts that will miss, as far as that is known.

    Attributes:
        by_itself: whether the device computes the next token by itself.
        miss_ratio: of late, as of the last look.
    """

    def __init__(self, latency: LatencyModel, layers: int, per_token: int, miss_ratio: float) -> None:
        self._latency, self._layers, self._per_token = latency, layers, per_token
        self.miss_ratio = miss_ratio
        self._beyond_s = {True: layers * _FLAGS_S, False: layers * _DISPATCH_S}
        self._first_s = dict(self._beyond_s)
        self._usual_s = {True: 0.0, False: 0.0}
        self._tokens = 0
        self._new: list[tuple[float, int]] = []
        self._chosen = [comb(per_token, misses) for misses in range(per_token + 1)]
        self._priced_at, self._took_s = self._rates(), self._tables()
        self._price_s: dict[int, float] = {}
        """Of the present way's layers, by misses."""
        self.by_itself = self.price_s(by_itself=True) <= self.price_s(by_itself=False)

    def price_s(self, *, by_itself: bool) -> float:
        """Seconds of a token now."""
        return self._layers_s(self.miss_ratio, by_itself) + self._beyond_s[by_itself]

    def is_worth_it(self, miss_ratio: float) -> bool:
        """Whether tokens of the device's own are clearly better at this share of misses, before there are any."""
        own_s, dispatched_s = (self._layers_s(miss_ratio, way) + self._first_s[way] for way in (True, False))
        return own_s <= _WORTH * dispatched_s

    def observe(self, seconds: float, missed: int) -> None:
        """A token of the present way took so long, with so many experts missed in all layers."""
        # Code that runs once a token has left the processor's caches, and takes long: all are learnt at once.
        self._new.append((seconds, missed))
        if len(self._new) == _AGAIN:
            for token in self._new:
                self._learn(*token)
            self._new.clear()
            self._look()

    def _learn(self, seconds: float, missed: int) -> None:
        ratio, way = missed / (self._layers * self._per_token), self.by_itself
        if (price_s := self._price_s.get(missed)) is None:
            price_s = self._price_s[missed] = self._layers_s(ratio, way)
        self.miss_ratio += _WEIGHT * (ratio - self.miss_ratio)
        self._tokens += 1
        if self._tokens > _FIRST:
            usual_s = self._usual_s[way]
            seconds = min(seconds, _LONGEST * usual_s) if usual_s else seconds
            weight = max(_WEIGHT, 1 / (self._tokens - _FIRST))
            self._usual_s[way] += weight * (seconds - usual_s)
            beyond_s = seconds - price_s
            self._beyond_s[way] += weight * (beyond_s - self._beyond_s[way])

    def _look(self) -> None:
        other = not self.by_itself
        if (rates := self._rates()) != self._priced_at:
            self._priced_at, self._took_s, self._price_s = rates, self._tables(), {}
        self._beyond_s[other] = self._first_s[other] + _FORGOTTEN * (self._beyond_s[other] - self._first_s[other])
        if self.price_s(by_itself=other) < _WORTH * self.price_s(by_itself=self.by_itself):
            self.by_itself, self._tokens, self._price_s = other, 0, {}
            self._usual_s[other] = 0.0

    def _layers_s(self, miss_ratio: float, by_itself: bool) -> float:
        """Seconds of the experts of all layers, whose misses are a binomial draw."""
        k, hit_ratio = self._per_token, 1 - miss_ratio
        drawn = (count * miss_ratio**misses * hit_ratio ** (k - misses) for misses, count in enumerate(self._chosen))
        return self._layers * sum(
            share * seconds for share, seconds in zip(drawn, self._took_s[by_itself], strict=True)
        )

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
