"""Binds experts to the devices that compute them, layers to kernels, and predictors to routers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from engine.common.config import CacheSettings, Misses
from engine.common.footprint import KV_TOKENS
from engine.devices.device import Device
from engine.devices.memory_budget import with_room
from engine.experts.activations import Activations
from engine.experts.cache.policies import Key
from engine.experts.card_tokens import CardTokens, choice_for, tried_tokens
from engine.experts.dispatch import BANK_LAYER, ExpertsSite, bound_kernel
from engine.experts.dispatcher import HybridExperts
from engine.experts.executor import ExpertExecutor
from engine.experts.latency import LatencyModel, load_latency, measure, save_latency
from engine.experts.misses import MIXED, OnCpu
from engine.experts.prediction.mlp import Learning
from engine.experts.prediction.prefetcher import Prefetcher, make_prefetcher
from engine.experts.prediction.target import (
    Place,
    PrefetchTarget,
    PrefetchTimes,
    VramPrefetch,
    over_disk,
    over_link,
)
from engine.experts.ram_tier import RamTier
from engine.experts.record_source import PartOfRecords, RecordSource
from engine.experts.shared import Between, Part, SharedExperts, Ways
from engine.experts.vram_cache import KernelMaker, VramCache
from engine.experts.whole_layer import LayerBuffers, WholeLayerExperts
from engine.families import fast_path_of
from engine.formats.tiles import RecordLayout
from engine.kernels import choose_kernel
from engine.kernels.cuda.driver import nvidia_card
from engine.kernels.gpu.latents import speed_up_latents
from engine.kernels.gpu.modules import speed_up_angles, speed_up_layers, speed_up_norms
from engine.kernels.gpu.proof import kernels_of
from engine.kernels.gpu.rotations import TRIED_POSITIONS, speed_up_rotations
from engine.kernels.gpu.routers import speed_up_routers
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.library import NativeKernels, load_kernels
from engine.kernels.native.linear import speed_up_linears
from engine.planner.placement import cache_slots, expert_ranges
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.fast_path.decoder_layer import speed_up_decoder_layers
from engine.runtime.kv.library_attention import speed_up_prompts
from engine.runtime.load.devices import DeviceExperts
from engine.runtime.load.foresight import (
    Popularity,
    UseCounts,
    find_gates,
    load_popularity,
)
from engine.runtime.load.plan import Plan
from engine.runtime.load.timed_card import timed
from engine.runtime.loaded_model import LoadingParts

_log = logging.getLogger(__name__)


def bind_experts(plan: Plan, parts: LoadingParts) -> None:
    """Binds the experts to what computes them; devices get all the memory that is left to them."""
    if plan.devices:
        _bind_devices(plan, parts)
    elif parts.disk_backed is not None:
        _bind_read_ahead(plan, parts)


def bind_dense(model: Any, kernels: NativeKernels | None) -> None:
    if kernels is not None:
        speed_up_linears(model, kernels)
        speed_up_decoder_layers(model, kernels)
        speed_up_prompts(model, kernels)


def speed_up_on_cards(model: Any) -> None:
    """Lets kernels compute norms, residual sums, angles, rotations, latent attention and routers, wherever they give
    what the library gives.

    Args:
        model: in eval mode, with its weights where they are to be.
    """
    norms = speed_up_norms(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is not None:
        speed_up_angles(rotary, model.dtype)

    def angles(hidden: torch.Tensor) -> Any:
        return None if rotary is None else rotary(hidden, torch.tensor([TRIED_POSITIONS], device=hidden.device))

    latents = speed_up_latents(model, angles) if rotary is not None else 0
    rotations = speed_up_rotations(model, angles) if rotary is not None else 0  # of what is not part of one of those
    routers = speed_up_routers(model)
    layers = speed_up_layers(decoder_layers(model), getattr(decoder, "norm", None))
    _log.info(
        "kernels compute %d norms, %d rotations, %d latent attentions, %d routers, %d layers' sums",
        *(norms, rotations, latents, routers, layers),
    )


def _bind_devices(plan: Plan, parts: LoadingParts) -> None:
    file, devices, cache = plan.file, parts.devices, plan.config.cache
    profile, key, foresight = file.profile, file.key, parts.foresight
    able = [site for site in plan.sites if site.is_on_demand]
    if plan.placement.all_experts or not able:
        return
    assert parts.bank is not None
    assert foresight is not None
    budgets = devices.expert_budgets(min(plan.context_tokens, KV_TOKENS), plan.activations)
    held = devices.experts
    if plan.dense.type == "cpu" and file.dtype == torch.bfloat16:
        # The device's own, that compute beside the CPU, unless its time is modelled.
        held.kernels = load_kernels(1 if plan.devices[0].meter is None else torch.get_num_threads())
    held.activations = [Activations(device) for device in plan.devices]
    for activations in held.activations:  # no step can do without these: if they do not fit, the model runs on the CPU
        activations.rows((max(profile.experts_per_token, 1), profile.hidden), file.dtype)
    experts = [site.num_experts for site in able]
    known = load_popularity(key, experts)
    bound = open_caches(plan, parts, able, budgets, known)
    if cache.misses == "layer":
        bind_whole_layers(bound, held)
        return
    if plan.placement.shares:
        _connect(held)
    layers = _hybrids(bound, held, cache.misses)
    if not plan.placement.shares:
        for place, computed in zip(bound, layers, strict=True):
            _bind(place.site, computed.device, computed)
        held.tokens = _open_tokens(plan, layers, parts)
    if held.tokens is None:  # within a token of the device nothing could be brought
        foresight.prefetcher = _prefetcher_of_devices(plan, bound)
    uses = UseCounts(experts, foresight.prefetcher)
    foresight.keep_uses(key, uses, known)
    if plan.placement.shares:
        _bind_shared(bound, layers, held, uses)
    else:
        for layer in layers:
            layer.observer = uses
        if held.tokens is not None:
            held.tokens.observer = uses
    if known is not None:
        fill_caches(bound, known)


def _connect(held: DeviceExperts) -> None:
    home = held.devices[0]
    for number, device in enumerate(held.devices[1:], 1):
        ways = Ways(Between(home, device), Between(device, home))
        held.ways.append(ways)
        for way, target in ((ways.there, number), (ways.back, 0)):
            with_room(way.measure, partial(held.give_back, target))  # the caches have taken all that is left


def _bind_shared(
    bound: Sequence[BoundLayer], made: Sequence[HybridExperts], held: DeviceExperts, uses: UseCounts
) -> None:
    """Every layer's experts are on all cards: each module is computed by parts of it, one on each."""
    of_device = {device.name: ways for device, ways in zip(held.devices, [None, *held.ways], strict=True)}
    for site in dict.fromkeys(layer.site.name for layer in bound):
        mine = [(layer, each) for layer, each in zip(bound, made, strict=True) if layer.site.name == site]
        parts = [Part(each, layer.own, of_device[layer.place.cache.device.name]) for layer, each in mine]
        _bind(mine[0][0].site, held.devices[0], SharedExperts(parts, mine[0][0].number, uses))


def _bind(site: ExpertsSite, device: Device, experts: object) -> None:
    setattr(site.module, BANK_LAYER, (ComputedOn(device.torch_device), experts))


def _bind_read_ahead(plan: Plan, parts: LoadingParts) -> None:
    assert parts.disk_backed is not None
    assert parts.foresight is not None
    prefetcher = parts.foresight.prefetcher = _prefetcher_of_ram(plan, parts.disk_backed)
    for site in plan.on_disk:
        _, experts = bound_kernel(site.module)
        assert isinstance(experts, ExpertExecutor)
        experts.observer = prefetcher


@dataclass(frozen=True)
class ComputedOn:
    """Takes the place of a bank layer: hidden states are moved to this device."""

    device: torch.device


@dataclass(frozen=True)
class BoundLayer:
    """A layer of experts on its device.

    Attributes:
        number: among all that are on devices.
        own: its experts, where devices share those of each layer; else all.
        latency: what is known of how long its experts take.
    """

    site: ExpertsSite
    number: int
    own: range
    place: Place
    make_kernel: KernelMaker
    latency: LatencyModel


def _records_in_ram(
    site: ExpertsSite, parts: LoadingParts, device: Device, own: range
) -> tuple[LayerRecords, ExpertKernel, RecordSource]:
    assert parts.bank is not None
    held, over_disk = parts.bank.layers.get(site.name), parts.disk_backed
    if held is None:
        assert over_disk is not None
        layer = over_disk.disk.table.index_of[site.name]
        held = over_disk.slots(layer)
        kernel = timed(_kernel(site.module, held, parts.kernels), held, device, on_card=False)
        source = over_disk.source(layer, kernel)
    else:
        kernel = timed(_kernel(site.module, held, parts.kernels), held, device, on_card=False)
        source = RecordSource(held, kernel)
    return held, kernel, source if len(own) == site.num_experts else PartOfRecords(source, own)


def open_caches(
    plan: Plan,
    parts: LoadingParts,
    sites: Sequence[ExpertsSite],
    budgets: Sequence[int],
    popularity: Popularity | None,
) -> list[BoundLayer]:
    """Makes the caches of all devices, added to the devices' experts, which close them even if this fails."""
    held, first = parts.devices.experts, plan.devices[0]
    numbers = {site.name: number for number, site in enumerate(sites)}
    bound: list[BoundLayer] = []
    for index, device in enumerate(held.devices):
        own = {site.name: found for site in sites if (found := _own(plan, site, index))}
        mine = [site for site in sites if site.name in own]
        groups: dict[RecordLayout, list[ExpertsSite]] = {}
        for site in mine:
            groups.setdefault(site.layout, []).append(site)
        total = sum(len(own[site.name]) * site.layout.nbytes for site in mine)
        for group in groups.values():
            each = [own[site.name] for site in group]
            share = sum(map(len, each)) * group[0].layout.nbytes / total
            known = popularity.part([numbers[site.name] for site in group], each) if popularity is not None else None
            uses = known.of(range(len(group))) if known is not None else None
            most = max(map(len, each))
            cache = _open_cache(held, device, group, most, plan.config.cache, int(budgets[index] * share), share, uses)
            held.add(index, cache)
            makers: dict[object, KernelMaker] = {}
            latency: LatencyModel | None = None
            for layer, site in enumerate(group):
                seen, kernel, source = _records_in_ram(site, parts, first, own[site.name])
                make = makers.setdefault(_kernel_kind(site.module), _maker(site.module, held.kernels, device))
                if latency is None:
                    latency = _latency(device, seen, kernel, make, parts.kernels, plan.file.dtype)
                place = Place(cache, layer, source, own[site.name].start)
                bound.append(BoundLayer(site, numbers[site.name], own[site.name], place, make, latency))
    return sorted(bound, key=lambda layer: layer.number)


def _own(plan: Plan, site: ExpertsSite, index: int) -> range:
    if plan.placement.shares:
        return expert_ranges(site.num_experts, plan.placement.shares)[index]
    return range(site.num_experts if plan.layers.of(site.name) == index else 0)


def _hybrids(bound: Sequence[BoundLayer], held: DeviceExperts, misses: Misses) -> list[HybridExperts]:
    made: list[HybridExperts] = []
    activations = {activations.device.name: activations for activations in held.activations}
    for layer in bound:
        place, device = layer.place, layer.place.cache.device
        experts = HybridExperts(
            place.cache,
            place.layer,
            place.source,
            layer.make_kernel,
            layer.latency,
            activations[device.name],
            mode=misses,
            number=layer.number,
        )
        made.append(experts)
    for cache in {id(experts.cache): experts.cache for experts in made}.values():
        for experts, after in pairwise([each for each in made if each.cache is cache]):
            experts.after, after.prompts = after, experts.prompts
    return made


def _open_tokens(plan: Plan, layers: Sequence[HybridExperts], parts: LoadingParts) -> CardTokens | None:
    """Single tokens that the device computes by itself, where it can: misses then are the CPU's, and none is foreseen.

    Unless that was asked for, such tokens have to be worth it by what was measured here, at the share of experts that
    have no slots, or at half of it, as those that are used most come to have them; and while they run it is asked again
    (`PathChoice`).
    """
    device, cache, per_token = layers[0].device, plan.config.cache, plan.file.profile.experts_per_token
    card = nvidia_card(device.torch_device)
    wanted = (
        cache.misses in (MIXED, OnCpu.name)
        and cache.prefetch in ("auto", "off")
        and len({layer.device.name for layer in layers}) == 1
        and (cache.misses == OnCpu.name or _tokens_are_worth_it(layers, per_token))
    )
    if not wanted or parts.kernels is None:
        return None
    if card is None:
        path = fast_path_of(plan.file.model, "model")
        is_known = path is not None and path.streams is None and CardTokens.can_run(layers, per_token)
        return CardTokens(layers, parts.kernels, per_token) if is_known else None
    captures = plan.config.graphs != "off" and device.new_capture is not None and len(parts.devices.devices) == 1
    if not captures or not CardTokens.can_run(layers, per_token, card):
        return None
    tokens, refused = tried_tokens(layers, parts.kernels, per_token, card)
    if tokens is None:
        parts.devices.experts.shortages.append(f"{device.name} cannot run tokens by itself: {refused}.")
    return tokens


def _tokens_are_worth_it(layers: Sequence[HybridExperts], per_token: int) -> bool:
    if all(layer.latency.prefers_cpu(1) for layer in layers):
        return True  # nothing that the dispatcher could bring is missed
    choice = choice_for(layers, per_token)
    return choice.is_worth_it(choice.miss_ratio) or choice.is_worth_it(choice.miss_ratio / 2)


def bind_whole_layers(bound: Sequence[BoundLayer], held: DeviceExperts) -> None:
    """For comparison: all experts of a layer come while the one before computes."""
    groups: dict[int, list[BoundLayer]] = {}
    for layer in bound:
        groups.setdefault(id(layer.place.cache), []).append(layer)
    for group in groups.values():
        cache = group[0].place.cache
        buffers = LayerBuffers(cache.device, cache.layout, [layer.place.source for layer in group])
        held.layer_buffers.append(buffers)
        for number, layer in enumerate(group):
            _bind(layer.site, cache.device, WholeLayerExperts(buffers, number, layer.make_kernel))


def _prefetcher_of_devices(plan: Plan, bound: Sequence[BoundLayer]) -> Prefetcher | None:
    """A prefetcher over the caches of all devices; None if there is no predictor, or no slot to prefetch into."""
    if plan.config.cache.misses == "off" or not any(layer.place.cache.slots for layer in bound):
        return None
    caches = list({id(layer.place.cache): layer.place.cache for layer in bound}.values())
    of_layer: dict[int, list[BoundLayer]] = {}
    for layer in bound:  # each device has its part of every layer, or one has all of it
        of_layer.setdefault(layer.number, []).append(layer)
    layers, latency = [parts[0] for parts in of_layer.values()], bound[0].latency
    pools = [next(at for at, cache in enumerate(caches) if cache is layer.place.cache) for layer in layers]
    return _prefetcher(
        plan,
        [layer.site for layer in layers],
        VramPrefetch([[part.place for part in parts] for parts in of_layer.values()]),
        lambda: over_link(latency, [cache.counters for cache in caches]),
        pools if plan.config.cache.ways is None else list(range(len(layers))),
    )


def _prefetcher_of_ram(plan: Plan, ram: RamTier) -> Prefetcher | None:
    layouts = [site.layout for site in plan.on_disk]
    nbytes = max(layout.nbytes for layout in layouts)
    pools = [layouts.index(layout) for layout in layouts]
    return _prefetcher(plan, plan.on_disk, ram, lambda: over_disk(ram.disk, nbytes), pools)


def _prefetcher(
    plan: Plan,
    sites: Sequence[ExpertsSite],
    target: PrefetchTarget,
    times: Callable[[], PrefetchTimes],
    pools: Sequence[int],
) -> Prefetcher | None:
    experts, per_token = [site.num_experts for site in sites], plan.file.profile.experts_per_token
    learning = None
    if plan.config.cache.prefetch in ("auto", "mlp"):
        learning = Learning(
            f"{plan.file.key} {len(sites)}",
            layers=len(sites),
            experts=max(experts),
            per_token=per_token,
            limit=min(2 * per_token, max(experts)),
        )
    return make_prefetcher(
        target,
        times,
        layers=len(sites),
        experts=experts,
        per_token=per_token,
        choice=plan.config.cache.prefetch,
        gates=find_gates(plan.file.model, sites),
        learning=learning,
        pools=pools,
    )


def fill_caches(bound: Sequence[BoundLayer], popularity: Popularity) -> None:
    of_layer: dict[int, list[BoundLayer]] = {}
    for layer in bound:
        of_layer.setdefault(layer.number, []).append(layer)
    for number, used in popularity.ranked():
        layer = next(layer for layer in of_layer[number] if used in layer.own)
        place, expert = layer.place, used - layer.own.start
        cache = place.cache
        if not cache.free_slots(place.layer):
            continue
        held = place.source.hold_present([expert])
        try:
            if expert in held.rows and not cache.post_fetch(place.layer, [expert], held):
                cache.wait()  # as many are on their way as may be
                cache.post_fetch(place.layer, [expert], held)
        finally:
            held.release()


def _open_cache(
    held: DeviceExperts,
    device: Device,
    group: list[ExpertsSite],
    experts: int,
    settings: CacheSettings,
    budget: int,
    share: float,
    uses: dict[Key, float] | None,
) -> VramCache:
    """As many slots as the budget allows, or as were asked for; `experts` is the most of any layer."""
    layout, layers = group[0].layout, len(group)
    slots, staging, wanted = cache_slots(budget, layout.nbytes, layers * experts, share, settings)
    if settings.slots and slots < wanted and settings.misses != "layer":
        held.shortages.append(f"There is room for only {slots} experts on {device.name}.")
    policy = settings.policy
    if policy == "static" and uses is None:
        held.shortages.append(
            "Which experts are used most is not known yet: until the next start the cache picks its policy itself."
        )
        policy = "auto"
    return VramCache(
        device,
        layout,
        layers=layers,
        experts=experts,
        slots=slots,
        ways=settings.ways,
        policy=policy,
        popularity=uses,
        staging=staging,
    )


def _kernel(module: Any, records: LayerRecords, kernels: NativeKernels | None) -> ExpertKernel:
    kernel = choose_kernel(module, records, kernels)
    assert kernel is not None  # modules with their own computation never get here
    return kernel


def _maker(module: Any, kernels: NativeKernels | None, device: Device) -> KernelMaker:
    return lambda records: timed(_kernel(module, records, kernels), records, device, on_card=True)


def _kernel_kind(module: Any) -> object:
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
    seen: LayerRecords,
    on_cpu: ExpertKernel,
    make: KernelMaker,
    kernels: NativeKernels | None,
    dtype: torch.dtype,
) -> LatencyModel:
    threads = torch.get_num_threads()
    place = device.identity or device.name.partition("#")[0]
    name = f"{place} {threads} threads {kernels.isa.name if kernels is not None else 'torch'}"
    if kernels_of(device.torch_device) is not None:
        name += " CUDA C"
    precision = str(dtype).removeprefix("torch.")
    known = load_latency(name, precision, seen.layout.nbytes) if device.meter is None else None
    if known is not None:
        return known
    width = next(part.shape[0] for part in seen.layout.unquantised.parts if part.name == "down_proj")
    found = measure(device, seen, on_cpu, make, width, dtype=dtype, precision=precision)
    if device.meter is not None:  # it depends on more than its name
        return found
    try:
        save_latency(name, found)
    except OSError as error:  # it is measured again at the next start
        _log.warning("the measured latencies could not be kept: %s", error)
    return found
