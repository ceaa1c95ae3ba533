"""Which experts will be needed: how often each was used in earlier sessions, and what predicts the next ones.

Only counts are kept, nothing of what was said.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.cache.policies import Key
from engine.experts.dispatch import ExpertsSite
from engine.experts.executor import StepObserver
from engine.experts.prediction.predictors import Gate
from engine.experts.prediction.prefetcher import Prefetcher

_log = logging.getLogger(__name__)

_VERSION = 1
_DECAY = 0.5
"""Weight of earlier sessions relative to the last one: what a model is used for changes."""
_WORTH_KEEPING = 32
"""Uses of a layer below which a session says too little."""
_NAMES = ("gate", "router")


class Popularity:
    """Counts by layer and expert, [layers][experts]; layers may differ in their number of experts.

    How popular an expert is counts as its share of its layer's uses: of a prompt the last layer computes one row only.
    """

    def __init__(self, counts: list[list[float]], totals: list[float] | None = None) -> None:
        self.counts, self._totals = counts, totals or [max(sum(layer), 1.0) for layer in counts]

    def of(self, numbers: Sequence[int]) -> dict[Key, float]:
        experts = max(len(self.counts[number]) for number in numbers)
        return {
            layer * experts + expert: count / self._totals[number]
            for layer, number in enumerate(numbers)
            for expert, count in enumerate(self.counts[number])
        }

    def part(self, numbers: Sequence[int], experts: Sequence[range]) -> Popularity:
        return Popularity(
            [self.counts[number][own.start : own.stop] for number, own in zip(numbers, experts, strict=True)],
            [self._totals[number] for number in numbers],
        )

    def ranked(self) -> Iterator[tuple[int, int]]:
        everyone = [
            (-count / total, number, expert)
            for number, (counts, total) in enumerate(zip(self.counts, self._totals, strict=True))
            for expert, count in enumerate(counts)
            if count
        ]
        return ((number, expert) for _, number, expert in sorted(everyone))


class UseCounts:
    def __init__(self, experts: Sequence[int], following: StepObserver | None = None) -> None:
        self._counts = [[0] * count for count in experts]
        self._of_tokens = np.zeros((len(experts), max(experts, default=0)), np.int64)
        self._rows = np.arange(len(experts))[:, None]
        self._following = following

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        counts = self._counts[layer]
        for expert in experts:
            counts[expert] += 1
        if self._following is not None:
            self._following.observe(layer, experts, hidden)

    def observe_all(self, experts: NDArray[np.int64]) -> None:
        """A token has used these experts, [layers, n], each layer different ones; not passed on."""
        self._of_tokens[self._rows, experts] += 1

    def added_to(self, earlier: Popularity | None) -> Popularity | None:
        """With the counts of earlier sessions; None if there is nothing new worth keeping."""
        for counts, more in zip(self._counts, self._of_tokens.tolist(), strict=True):
            for expert in range(len(counts)):
                counts[expert] += more[expert]
        self._of_tokens[:] = 0
        if not self._counts or min(map(sum, self._counts)) < _WORTH_KEEPING:
            return None
        if earlier is None:
            return Popularity([[float(count) for count in counts] for counts in self._counts])
        return Popularity(
            [
                [new + _DECAY * old for new, old in zip(counts, before, strict=True)]
                for counts, before in zip(self._counts, earlier.counts, strict=True)
            ]
        )


def popularity_file(model_key: str) -> Path:
    return cache_dir() / "popularity" / f"{sha256(model_key.encode()).hexdigest()[:32]}.json"


def load_popularity(model_key: str, experts: Sequence[int]) -> Popularity | None:
    """The counts of a model with so many experts in its layers; None if there are none that can be read."""
    try:
        content = json.loads(popularity_file(model_key).read_text(encoding="utf-8"))
        counts = [[float(count) for count in layer] for layer in content["counts"]]
        known = content["version"] == _VERSION and [len(layer) for layer in counts] == list(experts)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return Popularity(counts) if known and all(c >= 0 for layer in counts for c in layer) else None


def save_popularity(model_key: str, popularity: Popularity) -> None:
    try:
        write_private(popularity_file(model_key), json.dumps({"version": _VERSION, "counts": popularity.counts}))
    except OSError as error:
        _log.warning("the uses of experts could not be kept: %s", error)


class Foresight:
    """Belongs to a loaded model.

    Args:
        learns_always: not only if predicting has proved to pay here.

    Attributes:
        prefetcher: brings experts before they are wanted, if anybody can predict them.
    """

    def __init__(self, *, learns_always: bool = False) -> None:
        self._learns_always = learns_always
        self.prefetcher: Prefetcher | None = None
        self._uses: tuple[str, UseCounts, Popularity | None] | None = None

    def keep_uses(self, model_key: str, uses: UseCounts, earlier: Popularity | None) -> None:
        self._uses = model_key, uses, earlier

    def forget_uses(self) -> None:
        self._uses = None

    def learn_while_idle(self) -> None:
        prefetcher = self.prefetcher
        if prefetcher is not None and (self._learns_always or prefetcher.adopted is not None):
            prefetcher.learn_while_idle()

    def close(self) -> None:
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None
        if self._uses is not None:
            model_key, uses, earlier = self._uses
            self._uses = None
            merged = uses.added_to(earlier)
            if merged is not None:
                save_popularity(model_key, merged)


def find_gates(model: Any, sites: Sequence[ExpertsSite]) -> list[Gate | None]:
    """The router beside each experts module, once the model's weights are loaded.

    Returns:
        For each of them a function as `engine.experts.prediction.predictors.Gate` says, or None where the router wants
        other things than the hidden states that enter the experts, or answers in another way than (logits, weights,
        chosen experts).
    """
    return [_gate_beside(model, site) for site in sites]


def _gate_beside(model: Any, site: ExpertsSite) -> Gate | None:
    width = next((part.shape[0] for part in site.layout.unquantised.parts if part.name == "down_proj"), None)
    parent = model.get_submodule(site.name.rpartition(".")[0])
    for name in _NAMES:
        router = getattr(parent, name, None)
        if isinstance(router, torch.nn.Module) and _wants_hidden_states_only(router):
            matrix = next((weight for weight in router.parameters() if weight.dim() == 2), None)
            if matrix is None or matrix.is_meta or matrix.shape[-1] != width:
                continue
            gate = RouterGate(router, matrix, site.num_experts)
            if gate.answers():
                return gate
    return None


def _wants_hidden_states_only(router: torch.nn.Module) -> bool:
    parameters = list(inspect.signature(type(router).forward).parameters.values())[1:]
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters) == 1


class RouterGate:
    """Calls a router of the library without triggering its hooks.

    Args:
        matrix: the parameter that says of which type and on which device its input is, [any, H].
        experts: E, that have records; a router may choose others besides, such as LongCat-Flash's zero experts.
    """

    def __init__(self, router: torch.nn.Module, matrix: torch.Tensor, experts: int) -> None:
        self._router, self._experts = router, experts
        # The class's own: no hook is called, no recorder that has been put in its place.
        self._forward = type(router).forward
        self._matrix = matrix

    @torch.no_grad()
    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states [T, H] -> (logits [T, E], chosen experts [T, k])."""
        logits, _, index = self._forward(self._router, hidden_states.to(self._matrix))
        return logits[:, : self._experts], index

    def answers(self) -> bool:
        hidden = torch.linspace(-1, 1, self._matrix.shape[-1])[None]
        try:
            logits, index = self(hidden)
            return (
                logits.shape[0] == index.shape[0] == 1
                and logits.dim() == index.dim() == 2
                and logits.is_floating_point()
                and not index.is_floating_point()
                and logits.shape[1] == self._experts
                and index.shape[1] > 0
            )
        except Exception:  # whatever a router makes of an input that it was not made for
            return False
