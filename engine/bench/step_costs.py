"""Times the parts of a decode step separately: the constants for predicting strategies."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.bench.forced_text import ForcedText, decode_seconds
from engine.bench.step_records import hybrid_layers, replaced_kernels

if TYPE_CHECKING:
    from engine.experts.dispatcher import HybridExperts
    from engine.runtime.loaded_model import LoadedModel

_CALLS = 40
_MOST_S = 3.0

Choice = Callable[[int, "HybridExperts"], Sequence[int] | None]
"""(layer number in its cache, its experts) -> experts to request, or None to skip the layer."""


def rest_seconds(loaded: LoadedModel, text: ForcedText) -> float:
    """Mean seconds of a decode step without its expert layers."""
    with replaced_kernels(loaded.model, lambda _experts: lambda hidden, _index, _weights: torch.zeros_like(hidden)):
        return statistics.fmean(decode_seconds(loaded, text, at_most_s=_MOST_S)[1:])


def layer_seconds(loaded: LoadedModel, choose: Choice) -> float | None:
    """Mean seconds of a single-token expert layer with the experts of `choose`; None if it skips all layers."""
    layers = _numbered([experts for _, experts in hybrid_layers(loaded.model)])
    width, top_k = loaded.model.config.get_text_config().hidden_size, loaded.info.experts_per_token
    dtype = next(loaded.model.parameters()).dtype
    hidden = torch.randn(1, width, dtype=dtype, device=loaded.device)
    weights = torch.full((1, top_k), 1 / top_k, device=loaded.device)
    spans: list[float] = []
    until_s = time.perf_counter() + _MOST_S
    with torch.inference_mode(), loaded.token_by_token():
        for number, experts in itertools.islice(itertools.cycle(layers), 4 * _CALLS):
            chosen = choose(number, experts)
            if chosen is None:
                continue
            # Invalid ids are skipped, so fewer experts can be requested than a token uses.
            ids = [*chosen, *[loaded.info.experts] * (top_k - len(chosen))]
            index = torch.tensor([ids], device=loaded.device)
            begun_s = time.perf_counter()
            experts(hidden, index, weights)
            spans.append(time.perf_counter() - begun_s)
            if len(spans) >= _CALLS or time.perf_counter() > until_s:
                break
    return statistics.fmean(spans[len(spans) // 10 :]) if spans else None


def no_expert(_number: int, _experts: HybridExperts) -> Sequence[int]:
    """Requests none: what remains is copying the routing to the CPU, and the sum."""
    return []


def residents(count: int) -> Choice:
    """Asks for so many that are on the device now."""

    def choose(number: int, experts: HybridExperts) -> Sequence[int] | None:
        there = sorted(experts.cache.residents(number))
        return random.sample(there, count) if len(there) >= count else None

    return choose


def absent(total: int) -> Callable[[int], Choice]:
    """Asks for so many of `total` that are not on the device now."""

    def choice(count: int) -> Choice:
        def choose(number: int, experts: HybridExperts) -> Sequence[int] | None:
            missing = sorted(set(range(total)) - experts.cache.residents(number).keys())
            return random.sample(missing, count) if len(missing) >= count else None

        return choose

    return choice


def any_of(total: int, count: int) -> Choice:
    """Asks for so many of `total`, wherever they are."""
    return lambda _number, _experts: random.sample(range(total), count)


def _numbered(layers: Sequence[HybridExperts]) -> list[tuple[int, HybridExperts]]:
    """Layers of one cache are numbered in the order of the model."""
    counters: dict[int, itertools.count[int]] = {}
    return [(next(counters.setdefault(id(experts.cache), itertools.count())), experts) for experts in layers]
