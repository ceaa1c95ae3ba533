"""Makes a checkpoint directory into a model that runs, its experts in a bank outside the module."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.config_file import read_config
from engine.checkpoint.expert_index import ExpertIndex
from engine.checkpoint.profile import ModelProfile, profile_of
from engine.checkpoint.shards import read_tensors
from engine.config import EngineConfig
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.activations import Activations
from engine.experts.bank import ExpertBank
from engine.experts.disk_backed import DiskBackedBank, bind_disk_backed, can_be_disk_backed
from engine.experts.sites import ExpertsSite, bind, empty_modules, find_sites, quantised, unbind, verify
from engine.kernels.native.library import NativeKernels, load_kernels, missing_note
from engine.kernels.native.linear import quantise_linears, speed_up_linears
from engine.kernels.quantised.tiles import PRECISIONS
from engine.planner.precision import careful_precision
from engine.runtime.adapters import adapter_for
from engine.runtime.bank_source import BankSource
from engine.runtime.device_binding import RecordsInRam, bind_to_devices, bind_whole_layers, fill_caches, open_caches
from engine.runtime.expert_placement import ExpertPlacement, disk_note, open_disk_backed, place_experts
from engine.runtime.fill_bank import fill_bank, working_bytes
from engine.runtime.foresight import Foresight
from engine.runtime.foretelling import foretell_for_devices, foretell_for_ram
from engine.runtime.layer_devices import move_between, split_layers
from engine.runtime.library_conversion import LoadingPlan, load_rest, parameter_dtypes, plan_loading
from engine.runtime.library_models import (
    build_skeleton,
    count_weights,
    finish_generation_config,
    model_class_for,
    quantizer_for,
    quiet_library,
    read_library_config,
)
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.memory import require_ram, usable_ram
from engine.runtime.model_devices import ModelDevices
from engine.runtime.model_info import devices_note, model_info
from engine.runtime.native_decoder import speed_up_decoder_layers
from engine.runtime.placement import (
    FEWEST_KV_TOKENS,
    KV_TOKENS,
    ModelNeeds,
    Placement,
    open_compute_devices,
    place,
    set_threads,
)
from engine.runtime.popularity import UseCounts, load_popularity
from engine.runtime.precision_choice import Footprint, choose_precision
from engine.runtime.prefill_pieces import LONG_TOKENS, activation_bytes, tokens_in_ram
from engine.runtime.prompt import template_note
from engine.runtime.tensor_reader import TensorReader
from engine.runtime.tokenizers import load_tokenizer
from engine.runtime.warm_up import kv_bytes_per_token

_log = logging.getLogger(__name__)

_UNKNOWN_CONTEXT = 32_768
"""For models that set themselves no limit (state-space models, say)."""


def load_model(
    config: EngineConfig,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> LoadedModel:
    """Loads the checkpoint directory `config.model`.

    `on_progress(done, total)` counts bytes read; `cancelled()` is asked often.

    Raises:
        EngineError: the checkpoint, the machine or the request does not allow it; the message says why.
        RequestCancelled: `cancelled()` was true; everything allocated has been freed.
    """
    set_threads(config.threads)  # before devices are opened: their threads take torch's number over
    devices = ModelDevices(open_compute_devices(config))  # one that is not there is told before gigabytes are read
    try:
        return _Loading(config, devices, on_progress, cancelled).run()
    except (DeviceMemoryError, torch.OutOfMemoryError) as error:
        refusal = str(error).partition("\n")[0]
    # Others took the memory while the model was being loaded, or it was misjudged: without the device it runs all the
    # same.  Not in the handler: the error's traceback holds what was allocated.
    gc.collect()
    _log.warning("loading again for the CPU: %s", refusal)
    on_cpu = replace(config, device="cpu")
    return _Loading(on_cpu, ModelDevices(()), on_progress, cancelled, f"Runs on the CPU: {refusal}").run()


class _Loading:
    """One model on its way; what was allocated belongs to it until it is handed over, and is freed if it is not."""

    def __init__(
        self,
        config: EngineConfig,
        devices: ModelDevices,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        note: str = "",
    ) -> None:
        self._config = config
        self._directory = Path(config.model)
        self._dtype = _compute_dtype(config)
        self._precision: str = "bf16" if config.precision == "auto" else config.precision
        self._weights = 0
        self._threads = torch.get_num_threads()
        self._devices = devices
        self._on_progress, self._cancelled = on_progress, cancelled
        self._notes = [note]
        self._model: Any = None
        self._bank: ExpertBank | None = None
        self._disk_backed: DiskBackedBank | None = None
        self._kernels: NativeKernels | None = None
        self._foresight = Foresight(learns_always=config.prefetch == "mlp")

    def run(self) -> LoadedModel:
        """See `load_model`."""
        try:
            with torch.no_grad(), quiet_library():
                return self._load()
        except BaseException:
            if self._model is not None:
                unbind(self._model)
            for held in (self._foresight, self._devices, self._disk_backed, self._bank, self._kernels):
                if held is not None:
                    held.close()
            self._model = None
            gc.collect()
            raise

    def _load(self) -> LoadedModel:
        directory, dtype = self._directory, self._dtype
        raw = read_config(directory)
        tensors = read_tensors(directory)
        profile = profile_of(raw, tensors.values())
        tokenizer = load_tokenizer(directory)
        library_config = read_library_config(directory, raw["model_type"])
        adapter = adapter_for(raw["model_type"])
        model_class, part = model_class_for(library_config, adapter)
        quantizer = quantizer_for(part, directory.name)
        model = self._model = build_skeleton(model_class, part, dtype, adapter)
        finish_generation_config(model, directory)
        sites = find_sites(model, parameter_dtypes(model, dtype))
        self._weights = count_weights(model)
        plan = plan_loading(model, sites, tensors, dtype, quantizer, adapter)
        sites = self._in_precision(profile, sites, plan)
        placement, needs = self._place(profile, sites)
        experts = self._place_experts(profile, sites, placement, needs, working_bytes(plan, sites))
        on_cpu = "cpu" in (placement.dense.type, placement.experts.type)
        if on_cpu and dtype == torch.bfloat16:
            self._kernels = load_kernels(self._threads)
        if sites:
            from_host = placement.devices and not placement.all_experts
            host_memory = placement.devices[0].host_memory if from_host else None
            if host_memory is not None:
                host_memory.expect(sum(site.nbytes for site in experts.resident))
            self._bank = ExpertBank(placement.experts, host_memory)
        self._read(plan, sites, experts, placement)
        move_between(model, self._devices.layers, [device.torch_device for device in placement.devices])
        model.eval().requires_grad_(False)
        kv_bytes = kv_bytes_per_token(model, placement.dense)
        if placement.devices:
            self._bind_devices(sites, placement, needs, kv_bytes, profile)
        elif self._disk_backed is not None:
            self._bind_read_ahead(sites, profile)
        dense_parameters = sum(parameter.numel() for parameter in model.parameters())
        if self._kernels is not None:
            if self._precision in PRECISIONS:
                quantise_linears(model, careful_precision(self._precision, self._weights), self._kernels)
            speed_up_linears(model, self._kernels)
            speed_up_decoder_layers(model, self._kernels)
        verify(model, sites)
        return self._hand_over(profile, tokenizer, sites, placement, needs, kv_bytes, dense_parameters)

    def _in_precision(self, profile: ModelProfile, sites: list[ExpertsSite], plan: LoadingPlan) -> list[ExpertsSite]:
        """The sites with records in the precision asked for, or in that which `auto` turns out to be."""
        if self._config.precision == "auto" and sites:
            options = {"bf16": sites, **{each: quantised(sites, each, self._weights) for each in PRECISIONS}}
            footprints = []
            for precision, of_this in options.items():
                needs = self._needs(profile, of_this)
                placement = place(self._config, self._devices.devices, needs, self._context_tokens(profile))
                dense = sum(needs.dense) if placement.dense.type == "cpu" else 0
                experts = needs.experts if placement.experts.type == "cpu" else 0
                footprints.append(Footprint(precision, dense + experts + working_bytes(plan, of_this)))
            self._precision, why = choose_precision(footprints, usable_ram(self._config.ram_bytes))
            self._notes.append(why)
        return quantised(sites, self._precision, self._weights) if self._precision in PRECISIONS else sites

    def _needs(self, profile: ModelProfile, sites: list[ExpertsSite]) -> ModelNeeds:
        model, devices = self._model, self._devices
        devices.layers = split_layers(model, _tensor_sizes(model), [device.memory.total for device in devices.devices])
        dense = [0] * max(len(devices.devices), 1)
        for name, nbytes in _dense_sizes(model, sites).items():
            dense[devices.layers.of(name)] += nbytes
        return ModelNeeds(
            dense=tuple(dense),
            experts=sum(site.nbytes for site in sites),
            kv=profile.kv_elements_per_token * self._dtype.itemsize,
            activations=activation_bytes(profile, self._dtype),
        )

    def _place(self, profile: ModelProfile, sites: list[ExpertsSite]) -> tuple[Placement, ModelNeeds]:
        devices, needs = self._devices, self._needs(profile, sites)
        placement = place(self._config, devices.devices, needs, self._context_tokens(profile))
        if devices.devices and not placement.devices:
            devices.close()
            self._devices = ModelDevices(())
        self._notes.append(placement.note)
        return placement, needs

    def _place_experts(
        self, profile: ModelProfile, sites: list[ExpertsSite], placement: Placement, needs: ModelNeeds, working: int
    ) -> ExpertPlacement:
        dense_in_ram = sum(needs.dense) if placement.dense.type == "cpu" else 0
        name, budget = self._directory.name, self._config.ram_bytes
        if placement.experts.type == "cpu":
            return place_experts(name, sites, dense_in_ram, working, profile.experts_per_token, budget)
        require_ram(name, dense_in_ram + working, budget)
        return ExpertPlacement(sites, [])

    def _read(
        self, plan: LoadingPlan, sites: list[ExpertsSite], experts: ExpertPlacement, placement: Placement
    ) -> None:
        model, on_progress = self._model, self._on_progress
        self._devices.count_weights(_dense_sizes(model, sites))
        if placement.devices and placement.all_experts:
            self._devices.count(0, sum(site.nbytes for site in sites), MemoryCategory.EXPERTS)
        if experts.on_disk:
            source = BankSource(self._directory, model, sites, plan, self._precision, self._kernels)
            plan = _without(plan, experts.on_disk)
            progress = _TwoParts(on_progress, plan.nbytes)
            self._disk_backed = open_disk_backed(source, experts, on_progress=progress.first, cancelled=self._cancelled)
            on_progress = progress.second
        with TensorReader(on_progress, self._cancelled, plan.nbytes) as reader:
            if self._bank is not None:
                fill_bank(model, experts.resident, plan, reader, self._bank, self._kernels)
                empty_modules(sites)
                bind(experts.resident, self._bank, self._kernels)
            if self._disk_backed is not None:
                bind_disk_backed(experts.on_disk, self._disk_backed, self._kernels)
            places = [device.torch_device for device in placement.devices] or [placement.dense]
            load_rest(model, plan, reader, self._devices.layers.device_map(places))

    def _bind_devices(
        self, sites: list[ExpertsSite], placement: Placement, needs: ModelNeeds, kv_bytes: int, profile: ModelProfile
    ) -> None:
        """Hands the experts over to the devices, with all the memory that is left to them."""
        devices, config = self._devices, self._config
        devices.expect_kv(kv_bytes, profile.layers)
        able = [site for site in sites if can_be_disk_backed(site)]
        if placement.all_experts or not able:
            return
        assert self._bank is not None
        context = min(self._context_tokens(profile), KV_TOKENS)
        budgets = devices.expert_budgets(context, placement.piece_tokens * needs.activations)
        held = devices.experts
        if placement.dense.type == "cpu" and self._dtype == torch.bfloat16:
            held.kernels = load_kernels(1)  # the device's own: it computes beside the CPU
        held.activations = [Activations(device) for device in placement.devices]
        for activations in held.activations:  # what no step can do without: who is refused it runs on the CPU
            activations.rows((max(profile.experts_per_token, 1), profile.hidden), self._dtype)
        records = RecordsInRam(self._bank, self._disk_backed, self._kernels)
        experts = [site.num_experts for site in able]
        key = self._model_key(profile)
        known = load_popularity(key, experts)
        bound = open_caches(held, able, records, devices.layers, config, budgets, known, self._kernels, self._dtype)
        if config.misses == "layer":
            bind_whole_layers(bound, held)
            return
        self._foresight.prefetcher = foretell_for_devices(self._model, bound, config, profile.experts_per_token, key)
        uses = UseCounts(experts, self._foresight.prefetcher)
        self._foresight.keep_uses(key, uses, known)
        bind_to_devices(bound, held, config, uses)
        if known is not None:
            fill_caches(bound, known)

    def _bind_read_ahead(self, sites: list[ExpertsSite], profile: ModelProfile) -> None:
        """Lets the experts on disk be foretold, now that the routers can be asked."""
        assert self._disk_backed is not None
        on_disk = [site for site in sites if site.name in self._disk_backed.disk.header.index_of]
        prefetcher = foretell_for_ram(
            self._model, on_disk, self._disk_backed, self._config, profile.experts_per_token, self._model_key(profile)
        )
        self._foresight.prefetcher = prefetcher
        bind_disk_backed(on_disk, self._disk_backed, self._kernels, prefetcher)

    def _model_key(self, profile: ModelProfile) -> str:
        return f"{self._directory.name} {profile.family} {profile.parameters} {profile.bytes}"

    def _piece_tokens(self, profile: ModelProfile, placement: Placement) -> int:
        if placement.devices:
            return placement.piece_tokens
        return LONG_TOKENS if self._disk_backed is not None else tokens_in_ram(profile)

    def _context_tokens(self, profile: ModelProfile) -> int:
        own = profile.context_tokens or _UNKNOWN_CONTEXT
        return min(own, self._config.context_tokens or own)

    def _hand_over(
        self,
        profile: ModelProfile,
        tokenizer: Any,
        sites: list[ExpertsSite],
        placement: Placement,
        needs: ModelNeeds,
        kv_bytes: int,
        dense_parameters: int,
    ) -> LoadedModel:
        model, devices = self._model, self._devices
        on_cpu = "cpu" in (placement.dense.type, placement.experts.type)
        slow = on_cpu and self._kernels is None and self._precision != "fp32"
        wanted = self._context_tokens(profile)
        context = devices.context_room(wanted, FEWEST_KV_TOKENS, placement.piece_tokens * needs.activations)
        notes = [
            *self._notes,
            f"There is room for a context of {context:,} tokens, not {wanted:,}." if context < wanted else "",
            devices_note(devices, needs.experts, all_experts=placement.all_experts),
            disk_note(self._disk_backed) if self._disk_backed is not None else "",
            missing_note() if slow else "",
        ]
        held = (self._bank, self._disk_backed)
        info = model_info(
            self._directory,
            profile,
            model,
            sites,
            dense_parameters=dense_parameters,
            device=", ".join(device.name for device in placement.devices) or str(placement.dense),
            precision=self._precision,
            threads=self._threads,
            context_tokens=context,
            experts_bytes=sum(each.nbytes for each in held if each is not None),
            kv_bytes_per_token=kv_bytes,
            note=" ".join(filter(None, notes)),
            template_note=template_note(tokenizer),
        )
        return LoadedModel(
            model,
            tokenizer,
            info,
            self._bank,
            context,
            placement.dense,
            self._kernels,
            self._disk_backed,
            devices if placement.devices else None,
            self._piece_tokens(profile, placement),
            self._foresight,
            self._graph_device(),
        )

    def _graph_device(self) -> Device | None:
        """Where decode steps are captured: on one card that has all of the model, without native kernels on the CPU
        beside, which no card could repeat."""
        opened = self._devices.devices
        wanted = self._config.graphs
        if len(opened) != 1 or wanted == "off" or opened[0].new_capture is None:
            return None
        on_host = opened[0].torch_device.type == "cpu" and self._kernels is not None
        is_card = opened[0].compute_follows_caller
        return opened[0] if (wanted == "on" or is_card) and not on_host else None


def _compute_dtype(config: EngineConfig) -> torch.dtype:
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def _tensor_sizes(model: Any) -> dict[str, int]:
    """Bytes of every tensor by name; tied weights are counted once, as they will be held."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    sizes = {name: p.nbytes for name, p in model.named_parameters() if name not in tied}
    return {**sizes, **{name: buffer.nbytes for name, buffer in model.named_buffers()}}


def _dense_sizes(model: Any, sites: list[ExpertsSite]) -> dict[str, int]:
    """The same of everything but the experts."""
    experts = {target for site in sites for target in site.targets}
    return {name: nbytes for name, nbytes in _tensor_sizes(model).items() if name not in experts}


def _without(plan: LoadingPlan, sites: list[ExpertsSite]) -> LoadingPlan:
    """The plan for the experts modules that are left."""
    names = {site.name for site in sites}
    left = {name: parts for name, parts in plan.index.modules.items() if name not in names}
    return replace(plan, index=ExpertIndex(left))


class _TwoParts:
    """Progress of preparing and then of reading the rest, as one."""

    def __init__(self, on_progress: Callable[[int, int], None], rest: int) -> None:
        self._on_progress = on_progress
        self._rest = rest
        self._prepared = 0

    def first(self, done: int, total: int) -> None:
        self._prepared = total
        self._on_progress(done, total + self._rest)

    def second(self, done: int, total: int) -> None:
        self._on_progress(self._prepared + done, self._prepared + total)
