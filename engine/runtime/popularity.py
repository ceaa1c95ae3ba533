"""How often each expert of a model was used in earlier sessions: who is brought to a device first (Fiddler, 3.2).

Only counts are kept, nothing of what was said.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import torch

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.cache.policies import Key
from engine.experts.dispatcher import StepObserver

_log = logging.getLogger(__name__)

_VERSION = 1
_FADING = 0.5
"""What earlier sessions count beside the last one: what a model is used for changes."""
_WORTH_KEEPING = 32
"""Uses of a layer from which on a session says anything."""


class Popularity:
    """Counts by layer and expert.

    Args:
        counts: [layers][experts]; layers may differ in their number of experts.
    """

    def __init__(self, counts: list[list[float]]) -> None:
        self.counts = counts

    def of(self, numbers: Sequence[int]) -> dict[Key, float]:
        """The counts of these layers as keys of a cache that knows them as 0, 1, ..."""
        experts = max(len(self.counts[number]) for number in numbers)
        return {
            layer * experts + expert: count
            for layer, number in enumerate(numbers)
            for expert, count in enumerate(self.counts[number])
        }

    def ranked(self) -> Iterator[tuple[int, int]]:
        """(layer, expert), most used first."""
        everyone = [
            (-count, number, expert)
            for number, counts in enumerate(self.counts)
            for expert, count in enumerate(counts)
            if count
        ]
        return ((number, expert) for _, number, expert in sorted(everyone))


class UseCounts:
    """Counts the uses of a session's decode steps, and passes them on.

    Args:
        experts: of each layer.
        following: hears the same.
    """

    def __init__(self, experts: Sequence[int], following: StepObserver | None = None) -> None:
        self._counts = [[0] * count for count in experts]
        self._following = following

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """See `StepObserver.observe`."""
        counts = self._counts[layer]
        for expert in experts:
            counts[expert] += 1
        if self._following is not None:
            self._following.observe(layer, experts, hidden)

    def added_to(self, earlier: Popularity | None) -> Popularity | None:
        """With the counts of earlier sessions; None if there is nothing new worth keeping."""
        if not self._counts or min(map(sum, self._counts)) < _WORTH_KEEPING:
            return None
        if earlier is None:
            return Popularity([[float(count) for count in counts] for counts in self._counts])
        return Popularity(
            [
                [new + _FADING * old for new, old in zip(counts, before, strict=True)]
                for counts, before in zip(self._counts, earlier.counts, strict=True)
            ]
        )


def popularity_file(model_key: str) -> Path:
    """Where a model's counts are kept."""
    return cache_dir() / "popularity" / f"{sha256(model_key.encode()).hexdigest()[:32]}.json"


def load_popularity(model_key: str, experts: Sequence[int]) -> Popularity | None:
    """What is known of a model with so many experts in its layers; None if nothing is, or it cannot be understood."""
    try:
        content = json.loads(popularity_file(model_key).read_text(encoding="utf-8"))
        counts = [[float(count) for count in layer] for layer in content["counts"]]
        known = content["version"] == _VERSION and [len(layer) for layer in counts] == list(experts)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Popularity(counts) if known and all(c >= 0 for layer in counts for c in layer) else None


def save_popularity(model_key: str, popularity: Popularity) -> None:
    """Keeps the counts; where that cannot be done they are counted again."""
    try:
        write_private(popularity_file(model_key), json.dumps({"version": _VERSION, "counts": popularity.counts}))
    except OSError as error:
        _log.warning("the uses of experts could not be kept: %s", error)
