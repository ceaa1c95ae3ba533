"""Opens models for benches, one configuration at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.bench.step_records import hybrid_layers
from engine.checkpoint.profile import read_profile
from engine.common.errors import EngineError, ErrorCode
from engine.devices.cuda import cuda_count
from engine.hardware.profiles import EMULATED, emulated_cards
from engine.runtime.load.model import load_model

if TYPE_CHECKING:
    from engine.common.config import EngineConfig
    from engine.experts.vram_cache import VramCache
    from engine.runtime.loaded_model import LoadedModel

RESIDENT_SHARE = 0.25


@contextmanager
def opened(config: EngineConfig) -> Iterator[LoadedModel]:
    """The model of `config`, closed at the end.

    Raises:
        EngineError: as `load_model`.
    """
    loaded = load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        yield loaded
    finally:
        loaded.close()


@contextmanager
def opened_with_cache(config: EngineConfig) -> Iterator[LoadedModel]:
    """The same, for a model whose experts a device and the CPU share.

    Raises:
        EngineError: also `INVALID_REQUEST` if there are none.
    """
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
        share = RESIDENT_SHARE / _device_count(config.device)
        config = replace(config, cache_slots=max(1, round(share * profile.layers * profile.experts)))
    if config.threads is None and config.device.startswith("emulated:"):
        config = replace(config, threads=1)
    return config


def _device_count(spec: str) -> int:
    if spec.startswith(EMULATED):
        return max(1, emulated_cards(spec)[1])
    return max(1, cuda_count()) if spec in ("cuda", "auto") else 1


def without_cache(config: EngineConfig) -> EngineConfig:
    """The configuration without an expert cache."""
    return replace(config, cache_slots=0)


def caches_of(loaded: LoadedModel) -> list[VramCache]:
    """The expert caches of all devices."""
    return list({id(experts.cache): experts.cache for _, experts in hybrid_layers(loaded.model)}.values())
