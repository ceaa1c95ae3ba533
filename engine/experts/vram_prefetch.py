"""Predicted experts on their way to the devices: from RAM into free or dead slots, from disk into RAM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import VramCache


@dataclass(frozen=True)
class Place:
    """Where a layer of the model is kept: its number in the cache of its device, and its records."""

    cache: VramCache
    layer: int
    source: RecordSource


class VramPrefetch:
    """An `engine.experts.prediction.target.PrefetchTarget` over the caches of all devices.

    Args:
        places: of each layer of the model that has experts, in their order: its numbers are what callers give.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._caches = list({id(place.cache): place.cache for place in places}.values())

    @property
    def backlog_bytes(self) -> int:
        """On its way to any device."""
        return sum(cache.backlog_bytes for cache in self._caches)

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of `experts` that are neither on the layer's device nor on their way, in the same order."""
        place = self._places[layer]
        return place.cache.absent(place.layer, experts)

    def prefetch(self, layer: int, experts: Iterable[int], dead: Iterable[tuple[int, int]] = ()) -> int:
        """Begins to bring experts, in this order, as far as that costs nobody a place who is not dead.

        One that is on disk is read into RAM, and comes to the device when it is asked for again.

        Args:
            dead: (layer, expert) pairs that may leave for them.

        Returns:
            How many have been begun: the first ones of those that were absent.
        """
        place, begun = self._places[layer], 0
        dying = iter(dead)
        ours = (
            (there.layer, expert) for number, expert in dying if (there := self._places[number]).cache is place.cache
        )
        for expert in self.absent(layer, dict.fromkeys(experts)):
            if not (
                place.cache.arrivals.prefetch(place.layer, expert, ours, place.source)
                or place.source.prefetch([expert])
            ):
                break
            begun += 1
        return begun
