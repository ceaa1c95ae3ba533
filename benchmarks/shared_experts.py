"""Models whose experts a device and the CPU share: opened with a cache for a quarter of them, and their steps noted.

Noted is what each expert layer of each decode step needed and how it was met.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.bench.opened import hybrid_layers, opened
from engine.checkpoint.profile import read_profile
from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.devices.opening import card_count
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.hardware.profiles import EMULATED, emulated_cards
from engine.kernels.interface import ExpertKernel

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.runtime.loaded_model import LoadedModel

_RESIDENT_SHARE = 0.25


@contextmanager
def opened_with_cache(config: EngineConfig) -> Iterator[LoadedModel]:
    with opened(config) as loaded:
        if not hybrid_layers(loaded.model):
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{loaded.info.name} on {loaded.info.device} has no experts that a device and the CPU share: choose "
                "--device cuda or emulated:NAME, and less --vram than all experts need.",
            )
        yield loaded


def with_quarter_resident(config: EngineConfig) -> EngineConfig:
    """A cache for a quarter of the experts, unless `config` sets it; with one CPU thread on an emulated device, which
    computes on the other core.
    """
    if config.cache_slots is None:
        profile = read_profile(Path(config.model))
        share = _RESIDENT_SHARE / _device_count(config.device)
        config = replace(config, cache_slots=max(1, round(share * profile.layers * profile.experts)))
    if config.threads is None and config.device.startswith("emulated:"):
        config = replace(config, threads=1)
    return config


def _device_count(spec: str) -> int:
    if spec.startswith(EMULATED):
        return max(1, emulated_cards(spec)[1])
    return card_count(spec)


def without_cache(config: EngineConfig) -> EngineConfig:
    return replace(config, cache_slots=0)


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One expert layer of one decode step.

    Attributes:
        needed: experts that the token chose; hits, on_cpu and fetched are how many of them were met in which way.
        backlog: records that were still on their way to the device when the layer began.
        took_s: what the layer took, by the caller's clock.
    """

    needed: int
    hits: int
    on_cpu: int
    fetched: int
    backlog: int
    took_s: float


@contextmanager
def recorded_steps(model: Any) -> Iterator[list[LayerStep]]:
    """Notes the layers of all single-token steps that run inside."""
    steps: list[LayerStep] = []
    with replaced_kernels(model, lambda experts: _Noting(experts, steps)):
        yield steps


@contextmanager
def replaced_kernels(model: Any, make: Any) -> Iterator[None]:
    """Lets `make(experts)` stand in for each `HybridExperts` inside."""
    layers = [(module, module.__dict__[BANK_LAYER]) for module, _ in hybrid_layers(model)]
    try:
        for module, (place, experts) in layers:
            setattr(module, BANK_LAYER, (place, make(experts)))
        yield
    finally:
        for module, bound in layers:
            setattr(module, BANK_LAYER, bound)


class _Noting:
    """Passes on to the real one and notes what its cache counted."""

    def __init__(self, experts: HybridExperts, steps: list[LayerStep]) -> None:
        self._experts: ExpertKernel = experts
        self._cache = experts.cache
        self._steps = steps

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        counters, cache = self._cache.counters, self._cache
        hits, on_cpu, fetched = counters.hits, counters.on_cpu, counters.fetched
        backlog = cache.backlog_bytes // cache.layout.nbytes
        begun_s = clock.now()
        result = self._experts(hidden_states, top_k_index, top_k_weights)
        took_s = clock.now() - begun_s
        if len(top_k_index) == 1:
            self._steps.append(
                LayerStep(
                    top_k_index.shape[1],
                    counters.hits - hits,
                    counters.on_cpu - on_cpu,
                    counters.fetched - fetched,
                    backlog,
                    took_s,
                )
            )
        return result


class RoutingOfSteps:
    """What the expert layers of single-token steps were asked for, in the order in which they were called."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._calls: list[torch.Tensor] = []

    def note(self, index: torch.Tensor) -> None:
        self._calls.append(index.cpu())

    def chosen(self) -> NDArray[np.int16] | None:
        """int16 [tokens, layers, k]; None without layers, or where nothing was noted."""
        steps = len(self._calls) // self._layers if self._layers else 0
        if not steps:
            return None
        whole = torch.cat(self._calls[: steps * self._layers]).view(steps, self._layers, -1)
        return np.asarray(whole.numpy(), dtype=np.int16)


@contextmanager
def recorded_routing(model: Any) -> Iterator[RoutingOfSteps]:
    """Notes the experts that all single-token steps use that run inside, where a device and the CPU share them."""
    routing = RoutingOfSteps(len(hybrid_layers(model)))

    def noting(experts: ExpertKernel) -> ExpertKernel:
        def call(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
            if len(top_k_index) == 1:
                routing.note(top_k_index)
            return experts(hidden_states, top_k_index, top_k_weights)

        return call

    with replaced_kernels(model, noting):
        yield routing
