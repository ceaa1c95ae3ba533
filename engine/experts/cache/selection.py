"""Online policy selection: every candidate is simulated on the live routing, and the best is adopted.

No single policy is right for all models: expert popularity is stable in one and useless in another.  A shadow is a
pool without bytes.  Adoption has hysteresis, because switching evicts residents that the new policy would not keep.

A step through all shadows takes tens of microseconds, so a whole tier is judged by a sample: first a sample of its
layers (as in SHARDS, Waldspurger et al. 2015: a fraction of the keys in a cache of that fraction of the size has the
same hit rate), and if that is still too slow, bursts of consecutive steps, since recency is meaningless unless every
use within a burst is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from engine.common.choice import clearly_least
from engine.common.clock import read
from engine.experts.cache.policies import CANDIDATES, Key, Policy, Pool, make_policy

SAMPLED_LAYERS = 4
"""At most, and one in `LAYERS_PER_SAMPLE`, but always one."""
LAYERS_PER_SAMPLE = 8
BURST_STEPS = 256
BUDGET_S = 1e-6
"""Average cost allowed per layer and step."""


@dataclass(slots=True)
class _Shadow:
    name: str
    pool: Pool
    hits: float = 0.0
    copies: float = 0.0

    def worth(self, copy_price: float) -> float:
        return self.hits - copy_price * self.copies


def step_pool(pool: Pool, keys: Sequence[Key]) -> tuple[int, int]:
    """One step of an idealised cache: looks up all keys, then post-fetches the misses.

    A key used in a step is never evicted in that step.
    """
    pinned: list[Key] = []
    missed: list[Key] = []
    for key in keys:
        if pool.use(key) is None:
            missed.append(key)
        else:
            pool.pin(key)
            pinned.append(key)
    hits = len(pinned)
    for key in missed:
        if pool.reserve(key) is not None:
            pool.arrived(key)
            pool.pin(key)
            pinned.append(key)
    for key in pinned:
        pool.unpin(key)
    return hits, len(pinned) - hits


class PolicySelector:
    """Shadow pools of every candidate policy for one real pool, and the choice which to adopt.

    Args:
        capacity: slots of the real pool.
        candidates: names of the policies to simulate.
        popularity: from a calibration; adds `static` to the candidates.
        half_life: accesses after which a hit counts half in the choice.
        margin: by how much a candidate's hit rate, less what its copies cost, must be higher to be adopted.
        adopted: the initial policy; the first candidate if None.
    """

    def __init__(
        self,
        capacity: int,
        candidates: Iterable[str] = CANDIDATES,
        popularity: Mapping[Key, float] | None = None,
        half_life: float | None = None,
        margin: float = 0.01,
        adopted: str | None = None,
    ) -> None:
        names = [*candidates, *(["static"] if popularity is not None else [])]
        self._shadows = [
            _Shadow(name, Pool(range(capacity), make_policy(name, capacity, popularity))) for name in names
        ]
        self._margin = margin
        self._decay = 2.0 ** (-1.0 / (half_life or max(64.0 * capacity, 2000.0)))
        self._accesses = 0.0
        self._patience = 4.0 * capacity
        self._copy_price = 0.0
        self.adopted = adopted if adopted is not None else names[0]

    @property
    def copy_price(self) -> float:
        return self._copy_price

    @copy_price.setter
    def copy_price(self, hits: float) -> None:
        self._copy_price = hits
        for shadow in self._shadows:
            shadow.pool.policy.copy_price = hits

    def observe(self, keys: Sequence[Key]) -> Policy | None:
        """Feeds one step's experts to all shadows."""
        fade = self._decay ** len(keys)
        self._accesses = self._accesses * fade + len(keys)
        for shadow in self._shadows:
            hits, copies = step_pool(shadow.pool, keys)
            shadow.hits, shadow.copies = shadow.hits * fade + hits, shadow.copies * fade + copies
        if self._accesses < self._patience:
            return None
        costs = {shadow.name: -shadow.worth(self._copy_price) for shadow in self._shadows}
        best = clearly_least(costs, self.adopted, least=self._margin * self._accesses)
        if best == self.adopted:
            return None
        self.adopted = best
        return next(shadow for shadow in self._shadows if shadow.name == best).pool.policy.without_residents()

    def hit_rates(self) -> dict[str, float]:
        return {shadow.name: shadow.hits / self._accesses if self._accesses else 0.0 for shadow in self._shadows}


class PolicySampler:
    """Feeds the steps of some layers to shadows, and says which policy the tier should adopt."""

    def __init__(
        self,
        layers: Sequence[int],
        slots: int,
        ways: int | None,
        popularity: Mapping[Key, float] | None = None,
        adopted: str = CANDIDATES[0],
        clock: Callable[[], float] = read,
    ) -> None:
        self.adopted = adopted
        self._layers = len(layers)
        self._clock = clock
        # The middle layer of each part: the first and last layers route differently from the others.
        parts = max(1, min(SAMPLED_LAYERS, self._layers // LAYERS_PER_SAMPLE))
        sampled = [layers[(2 * part + 1) * self._layers // (2 * parts)] for part in range(parts)]
        candidates = [adopted, *(name for name in CANDIDATES if name != adopted)]
        if adopted == "static":
            candidates.remove("static")

        def selector(capacity: int) -> PolicySelector:
            return PolicySelector(max(capacity, 1), candidates, popularity, adopted=adopted)

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
    def layers(self) -> Set[int]:
        return self._selectors.keys()

    def rests(self) -> bool:
        """Whether the next step of all layers need not be observed, which then counts as one that was."""
        if self._is_watching or self._steps_left <= 1:
            return False
        self._steps_left -= 1
        return True

    def hit_rates(self) -> dict[str, float]:
        """Recent hit rate of every candidate's shadow, averaged over the sampled layers if each has its own slots."""
        rates = [selector.hit_rates() for selector in dict.fromkeys(self._selectors.values())]
        return {name: sum(rate[name] for rate in rates) / len(rates) for name in rates[0]} if rates else {}

    def price_copies(self, hits: float) -> None:
        for selector in dict.fromkeys(self._selectors.values()):
            selector.copy_price = hits

    def observe(self, layer: int, keys: Sequence[Key]) -> str | None:
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
        """The policy adopted by most of the sampled selectors, if that changes the tier's."""
        selectors = list(self._selectors.values())
        name, votes = Counter(selector.adopted for selector in selectors).most_common(1)[0]
        if name == self.adopted or 2 * votes <= len(selectors):
            return None
        self.adopted = name
        return name
