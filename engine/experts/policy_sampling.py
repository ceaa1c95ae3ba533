"""Choosing the policy of a whole tier from a sample of its layers, so that it costs next to nothing per layer.

A step through all shadow simulators takes some tens of microseconds.  What is sampled are layers (the idea of SHARDS,
Waldspurger et al. 2015: a fraction of the keys in a cache of that fraction of the size hits as often), and if that is
still too much, bursts of steps: within a burst every use is seen, or recency would mean nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from engine.experts.cache.policies import Key
from engine.experts.cache.selection import CANDIDATES, PolicySelector

SAMPLED_LAYERS = 4
BURST_STEPS = 256
BUDGET_S = 3e-6
"""For each layer of each step, on average."""


class PolicySampler:
    """Feeds shadows with the steps of some layers, and says which policy the tier should adopt.

    Args:
        layers: that have a share in the tier.
        slots: of the tier.
        ways: slots of each layer if each has its own, else None.
        popularity: of a calibration, which adds `static` to the candidates.
        adopted: the policy at the start.
        clock: for what the shadows cost.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        ways: int | None,
        popularity: Mapping[Key, float] | None = None,
        adopted: str = CANDIDATES[0],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.adopted = adopted
        self._layers = max(layers, 1)
        self._clock = clock
        # Spread from the middle of each part: first and last layers route unlike the others.
        parts = min(SAMPLED_LAYERS, self._layers)
        sampled = [(2 * part + 1) * self._layers // (2 * parts) for part in range(parts)]
        candidates = [adopted, *(name for name in CANDIDATES if name != adopted)]
        if adopted == "static":
            candidates.remove("static")

        def selector(capacity: int) -> PolicySelector:
            return PolicySelector(max(capacity, 1), candidates, popularity)

        if ways is None:
            shared = selector(slots * parts // self._layers)
            self._selectors = dict.fromkeys(sampled, shared)
        else:
            self._selectors = {layer: selector(ways) for layer in sampled}
        self._leader = sampled[0]
        self._cost_s = 0.0
        self._steps_left = BURST_STEPS
        self._is_watching = True

    @property
    def is_watching(self) -> bool:
        """Whether this is a burst, not the pause between two."""
        return self._is_watching

    def hit_rates(self) -> dict[str, float]:
        """Recent hit rate of every candidate, had it decided alone; the mean of layers with slots of their own."""
        rates = [selector.hit_rates() for selector in dict.fromkeys(self._selectors.values())]
        return {name: sum(rate[name] for rate in rates) / len(rates) for name in rates[0]} if rates else {}

    def observe(self, layer: int, keys: Sequence[Key]) -> str | None:
        """One layer's step; the name of the policy to adopt now, if that changes."""
        selector = self._selectors.get(layer)
        if selector is None:
            return None
        if layer == self._leader:
            self._count_step()
        if not self._is_watching:
            return None
        begun_s = self._clock()
        changed = selector.observe(keys) is not None
        took_s = self._clock() - begun_s
        self._cost_s = took_s if self._cost_s == 0 else self._cost_s + 0.05 * (took_s - self._cost_s)
        return self._verdict() if changed else None

    def _count_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        per_layer_s = self._cost_s * len(self._selectors) / self._layers
        pause = round(BURST_STEPS * (per_layer_s / BUDGET_S - 1)) if self._is_watching else 0
        self._is_watching = pause <= 0
        self._steps_left = pause if pause > 0 else BURST_STEPS

    def _verdict(self) -> str | None:
        """Layers with slots of their own vote; a tier changes its policy when most of them would."""
        selectors = list(self._selectors.values())
        name, votes = Counter(selector.adopted for selector in selectors).most_common(1)[0]
        if name == self.adopted or 2 * votes <= len(selectors):
            return None
        self.adopted = name
        return name
