"""Gives the experts modules of a model their place on devices: slots over RAM, and who computes what is in neither."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError
from engine.errors import EngineError, ErrorCode
from engine.experts.activations import Activations
from engine.experts.bank import BankLayer
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts, Misses
from engine.experts.latency import LatencyModel, load_latency, save_latency
from engine.experts.latency_measurement import measure
from engine.experts.record import RecordLayout
from engine.experts.record_source import RamRecords
from engine.experts.sites import ExpertsSite
from engine.experts.slot_segments import KernelMaker
from engine.experts.vram_cache import VramCache
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.library import NativeKernels
from engine.runtime.layer_devices import LayerDevices

_log = logging.getLogger(__name__)

STAGED = 3
"""Slots for experts that are fetched to be computed at once: one computes, one arrives, one waits."""

_MODES = {
    "mixed": Misses.MIXED,
    "cpu": Misses.CPU_ONLY,
    "fetch": Misses.FETCH_ONLY,
    "off": Misses.CACHE_OFF,
}


@dataclass(frozen=True)
class ComputedOn:
    """Stands where other experts have their records: hidden states are brought to this device."""

    device: torch.device


@dataclass
class DeviceExperts:
    """The expert caches of a model, and what else was opened for them.

    Attributes:
        caches: of each device, one for each layout of records.
        notes: sentences for the user about what could not be had.
    """

    devices: Sequence[Device]
    caches: list[list[VramCache]] = field(init=False)
    activations: list[Activations] = field(default_factory=list)
    kernels: NativeKernels | None = None
    notes: list[str] = field(default_factory=list)
    _wanted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = [[] for _ in self.devices]

    @property
    def nbytes(self) -> int:
        """Memory of all devices that is held for experts, staging included."""
        return sum(
            cache.nbytes + (cache.staging.segment.records.records.nbytes if cache.staging is not None else 0)
            for caches in self.caches
            for cache in caches
        )

    @property
    def slots(self) -> int:
        """Experts that can be kept on the devices."""
        return sum(cache.slots for caches in self.caches for cache in caches)

    def add(self, index: int, cache: VramCache) -> None:
        """A cache of the device of this index."""
        self.caches[index].append(cache)
        self._wanted[id(cache)] = cache.slots

    def give_back(self, index: int, nbytes: int) -> int:
        """Makes the caches of a device smaller by at least so many bytes, if they have them.

        Returns:
            Bytes that are free now and were not before.
        """
        freed = 0
        for cache in sorted(self.caches[index], key=lambda cache: -cache.nbytes):
            if freed >= nbytes:
                break
            before = cache.nbytes
            fewer = -(-(nbytes - freed) // cache.layout.nbytes)
            cache.resize(max(0, cache.slots - fewer))
            freed += before - cache.nbytes
        return freed

    def take_back(self) -> None:
        """Lets caches that had to give memory back have it again, as far as it is free."""
        for device, caches in zip(self.devices, self.caches, strict=True):
            for cache in caches:
                missing = self._wanted[id(cache)] - cache.slots
                fitting = device.memory.free // cache.layout.nbytes
                if missing > 0 and fitting > 0:
                    cache.resize(cache.slots + min(missing, fitting))

    def settle_for_less(self) -> None:
        """From now on caches are wanted as small as they have become."""
        for caches in self.caches:
            for cache in caches:
                self._wanted[id(cache)] = cache.slots

    def close(self) -> None:
        """Frees all slots.  The devices are closed by whoever opened them.  Harmless if repeated."""
        for caches in self.caches:
            for cache in caches:
                cache.close()
        for activations in self.activations:
            with contextlib.suppress(EngineError):
                activations.close()
        self.caches, self.activations = [[] for _ in self.devices], []
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None


def bind_device_experts(
    held: DeviceExperts,
    sites: Sequence[ExpertsSite],
    banks: Mapping[str, BankLayer],
    layers: LayerDevices,
    config: EngineConfig,
    budgets: Sequence[int],
    kernels: NativeKernels | None,
    dtype: torch.dtype,
) -> None:
    """Makes the caches and binds every experts module of `sites`, whose records are all in RAM, to them.

    Args:
        held: of the devices; what is made here is added to it, and so is closed with it even if this fails.
        banks: records by the name of the module.
        budgets: bytes of each device for slots and staging.
        kernels: native ones for the CPU.

    Raises:
        EngineError: a device failed.
    """
    held.activations = [Activations(device) for device in held.devices]
    for index, device in enumerate(held.devices):
        mine = [site for site in sites if layers.of(site.name) == index]
        groups: dict[RecordLayout, list[ExpertsSite]] = {}
        for site in mine:
            groups.setdefault(site.layout, []).append(site)
        total = sum(site.nbytes for site in mine)
        for group in groups.values():
            share = sum(site.nbytes for site in group) / total
            cache = _open_cache(held, device, group, config, int(budgets[index] * share), share)
            held.add(index, cache)
            _bind_group(held, index, cache, group, banks, config, kernels, dtype)


def _open_cache(
    held: DeviceExperts, device: Device, group: list[ExpertsSite], config: EngineConfig, budget: int, share: float
) -> VramCache:
    """As many slots as the budget allows; where the device refuses them, fewer and fewer, which is said."""
    layout, layers = group[0].layout, len(group)
    experts = max(site.num_experts for site in group)
    staging = min(STAGED, budget // layout.nbytes)
    if config.misses == "cpu" and config.cache_slots == 0:
        staging = 0
    most = max(0, budget // layout.nbytes - staging)
    wanted = (
        layers * experts if config.cache_slots is None else min(round(config.cache_slots * share), layers * experts)
    )
    slots = min(wanted, most)
    if config.cache_slots and slots < wanted:
        held.notes.append(f"Only {slots} experts fit {device.name} beside the rest.")
    refused = False
    while True:
        try:
            cache = VramCache(
                device,
                layout,
                layers=layers,
                experts=experts,
                slots=slots,
                ways=config.cache_ways,
                policy=config.cache_policy if config.cache_policy != "static" else "auto",
                staging=staging,
            )
        except DeviceMemoryError as error:
            _log.warning("%s", error.message)
            refused = True
            if slots == 0 and staging == 0:
                raise
            slots, staging = slots // 2, staging if slots else staging - 1
            continue
        if refused:
            held.notes.append(f"{device.name} refused memory: it keeps only {cache.slots} experts.")
        return cache


def _bind_group(
    held: DeviceExperts,
    index: int,
    cache: VramCache,
    group: list[ExpertsSite],
    banks: Mapping[str, BankLayer],
    config: EngineConfig,
    kernels: NativeKernels | None,
    dtype: torch.dtype,
) -> None:
    device = held.devices[index]
    makers: dict[object, KernelMaker] = {}
    latency: LatencyModel | None = None
    for layer, site in enumerate(group):
        bank = banks[site.name]
        on_cpu = _kernel(site.module, bank, kernels)
        make = makers.setdefault(_likeness(site.module), _maker(site.module, held.kernels))
        if latency is None:
            latency = _latency(device, bank, on_cpu, make, kernels, dtype)
        source = RamRecords(bank, on_cpu)
        experts = HybridExperts(
            cache, layer, source, make, latency, held.activations[index], mode=_MODES[config.misses]
        )
        setattr(site.module, BANK_LAYER, (ComputedOn(device.torch_device), experts))


def _kernel(module: Any, records: LayerRecords, kernels: NativeKernels | None) -> ExpertKernel:
    kernel = choose_kernel(module, records, kernels)
    if kernel is None:
        raise EngineError(ErrorCode.INTERNAL, f"{type(module).__name__} computes its experts by itself.")
    return kernel


def _maker(module: Any, kernels: NativeKernels | None) -> KernelMaker:
    return lambda records: _kernel(module, records, kernels)


def _likeness(module: Any) -> object:
    """Equal for modules whose experts compute the same from their weights: these share kernels and what those keep."""
    if module.has_post_expert_norm:
        return id(module)
    plain = tuple(
        sorted((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | float | str))
    )
    numbered = tuple((name, value) for name, value in plain if "layer" not in name)
    return type(module), numbered


def _latency(
    device: Device,
    bank: BankLayer,
    on_cpu: ExpertKernel,
    make: KernelMaker,
    kernels: NativeKernels | None,
    dtype: torch.dtype,
) -> LatencyModel:
    """Measured at the first start with such experts on this machine, and kept."""
    threads = torch.get_num_threads()
    name = f"{device.name.partition('#')[0]} {threads} threads {kernels.isa.name if kernels is not None else 'torch'}"
    precision = str(dtype).removeprefix("torch.")
    known = load_latency(name, precision, bank.layout.nbytes)
    if known is not None:
        return known
    width = next(part.shape[0] for part in bank.layout.parts if part.name == "down_proj")
    found = measure(device, bank, on_cpu, make, width, dtype=dtype, precision=precision)
    try:
        save_latency(name, found)
    except OSError as error:  # it is measured again at the next start
        _log.warning("the measured latencies could not be kept: %s", error)
    return found
