"""What is bound: experts to the devices that compute them, layers to kernels, and who predicts what is wanted."""

from __future__ import annotations

import torch

from engine.common.config import EngineConfig
from engine.common.footprint import KV_TOKENS
from engine.experts.activations import Activations
from engine.experts.disk_backed import bind_disk_backed, can_be_disk_backed
from engine.formats import careful, format_of
from engine.kernels.native.library import load_kernels
from engine.kernels.native.linear import quantise_linears, speed_up_linears
from engine.runtime.device_binding import RecordsInRam, bind_to_devices, bind_whole_layers, fill_caches, open_caches
from engine.runtime.foretelling import foretell_for_devices, foretell_for_ram
from engine.runtime.loading.decision import Decision
from engine.runtime.loading.opened import OpenedCheckpoint
from engine.runtime.loading.parts import LoadingParts
from engine.runtime.native_decoder import speed_up_decoder_layers
from engine.runtime.popularity import UseCounts, load_popularity


def bind_experts(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts, config: EngineConfig) -> None:
    """Hands the experts over to who computes them, devices with all the memory that is left to them.

    Raises:
        EngineError: a device failed, or has no room for what no step can do without.
    """
    if decision.devices:
        _bind_devices(opened, decision, parts, config)
    elif parts.disk_backed is not None:
        _bind_read_ahead(opened, decision, parts, config)


def bind_dense(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> None:
    """Lets the native kernels compute what else is on the CPU."""
    kernels = parts.kernels
    if kernels is None:
        return
    if format_of(decision.precision).is_tiled:
        quantise_linears(opened.model, careful(decision.precision, opened.weights), kernels)
    speed_up_linears(opened.model, kernels)
    speed_up_decoder_layers(opened.model, kernels)


def _bind_devices(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts, config: EngineConfig) -> None:
    devices, profile = parts.devices, opened.profile
    able = [site for site in decision.sites if can_be_disk_backed(site)]
    if decision.placement.all_experts or not able:
        return
    assert parts.bank is not None
    context = min(opened.context_tokens(config), KV_TOKENS)
    budgets = devices.expert_budgets(context, decision.activations)
    held = devices.experts
    if decision.dense.type == "cpu" and opened.dtype == torch.bfloat16:
        held.kernels = load_kernels(1)  # the device's own: it computes beside the CPU
    held.activations = [Activations(device) for device in decision.devices]
    for activations in held.activations:  # what no step can do without: who is refused it runs on the CPU
        activations.rows((max(profile.experts_per_token, 1), profile.hidden), opened.dtype)
    records = RecordsInRam(parts.bank, parts.disk_backed, parts.kernels)
    experts = [site.num_experts for site in able]
    known = load_popularity(opened.key, experts)
    bound = open_caches(held, able, records, decision.layers, config, budgets, known, parts.kernels, opened.dtype)
    if config.misses == "layer":
        bind_whole_layers(bound, held)
        return
    foresight, per_token = parts.foresight, profile.experts_per_token
    foresight.prefetcher = foretell_for_devices(opened.model, bound, config, per_token, opened.key)
    uses = UseCounts(experts, foresight.prefetcher)
    foresight.keep_uses(opened.key, uses, known)
    bind_to_devices(bound, held, config, uses)
    if known is not None:
        fill_caches(bound, known)


def _bind_read_ahead(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts, config: EngineConfig) -> None:
    """Lets the experts on disk be predicted, now that the routers can be asked."""
    disk_backed = parts.disk_backed
    assert disk_backed is not None
    on_disk = [site for site in decision.sites if site.name in disk_backed.disk.header.index_of]
    per_token = opened.profile.experts_per_token
    prefetcher = foretell_for_ram(opened.model, on_disk, disk_backed, config, per_token, opened.key)
    parts.foresight.prefetcher = prefetcher
    bind_disk_backed(on_disk, disk_backed, parts.kernels, prefetcher)
