"""Makes a checkpoint directory into a model that runs, its experts in a bank outside the module."""

from __future__ import annotations

import gc
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
from engine.errors import EngineError, ErrorCode
from engine.experts.bank import ExpertBank
from engine.experts.disk_backed import DiskBackedBank, bind_disk_backed
from engine.experts.sites import ExpertsSite, bind, empty_modules, find_sites, unbind, verify
from engine.kernels.native.library import NativeKernels, load_kernels, missing_note
from engine.kernels.native.linear import speed_up_linears
from engine.protocol import ModelInfo
from engine.runtime.adapters import adapter_for
from engine.runtime.bank_source import BankSource
from engine.runtime.expert_placement import ExpertPlacement, disk_note, open_disk_backed, place_experts
from engine.runtime.fill_bank import fill_bank, working_bytes
from engine.runtime.library_conversion import LoadingPlan, load_rest, parameter_dtypes, plan_loading
from engine.runtime.library_models import (
    build_skeleton,
    finish_generation_config,
    model_class_for,
    quantizer_for,
    quiet_library,
    read_library_config,
)
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.memory import require_ram
from engine.runtime.native_decoder import speed_up_decoder_layers
from engine.runtime.placement import Placement, place, requested_device, set_threads
from engine.runtime.prompt import template_note
from engine.runtime.tensor_reader import TensorReader
from engine.runtime.tokenizers import load_tokenizer
from engine.runtime.warm_up import kv_bytes_per_token

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
    dtype = _compute_dtype(config)
    requested_device(config)  # a device that is not there is told before gigabytes are read
    directory = Path(config.model)
    raw = read_config(directory)
    tensors = read_tensors(directory)
    profile = profile_of(raw, tensors.values())
    tokenizer = load_tokenizer(directory)
    with torch.no_grad(), quiet_library():
        library_config = read_library_config(directory, raw["model_type"])
        adapter = adapter_for(raw["model_type"])
        model_class, part = model_class_for(library_config, adapter)
        quantizer = quantizer_for(part, directory.name)
        model = build_skeleton(model_class, part, dtype, adapter)
        finish_generation_config(model, directory)
        sites = find_sites(model, parameter_dtypes(model, dtype))
        plan = plan_loading(model, sites, tensors, dtype, quantizer, adapter)
        expert_bytes = sum(site.nbytes for site in sites)
        dense_bytes = _dense_bytes(model, sites)
        placement = place(config, dense_bytes, expert_bytes)
        dense_in_ram = dense_bytes if placement.dense.type == "cpu" else 0
        if placement.experts.type == "cpu":
            experts = place_experts(
                directory.name, sites, dense_in_ram, working_bytes(plan), profile.experts_per_token, config.ram_bytes
            )
        else:
            require_ram(directory.name, dense_in_ram + working_bytes(plan), config.ram_bytes)
            experts = ExpertPlacement(sites, [])
        threads = set_threads(config.threads)
        bank = ExpertBank(placement.experts) if sites else None
        on_cpu = "cpu" in (placement.dense.type, placement.experts.type)
        kernels = load_kernels(threads) if on_cpu and dtype == torch.bfloat16 else None
        disk_backed: DiskBackedBank | None = None
        try:
            if experts.on_disk:
                source = BankSource(directory, model, sites, plan, "fp32" if dtype == torch.float32 else "bf16")
                plan = _without(plan, experts.on_disk)
                progress = _TwoParts(on_progress, plan.nbytes)
                disk_backed = open_disk_backed(source, experts, on_progress=progress.first, cancelled=cancelled)
                on_progress = progress.second
            with TensorReader(on_progress, cancelled, plan.nbytes) as reader:
                _read(model, experts, plan, reader, bank, disk_backed, placement, kernels)
            model.eval().requires_grad_(False)
            return _loaded(config, profile, model, tokenizer, sites, bank, disk_backed, placement, threads, kernels)
        except BaseException:
            if disk_backed is not None:
                unbind(model)
                disk_backed.close()
            if bank is not None:
                bank.close()
            if kernels is not None:
                kernels.close()
            gc.collect()
            raise


def _compute_dtype(config: EngineConfig) -> torch.dtype:
    if config.precision in ("int8", "int4"):
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"Precision {config.precision} is not part of Switchyard yet: use bf16 or fp32."
        )
    return torch.float32 if config.precision == "fp32" else torch.bfloat16


def _dense_bytes(model: Any, sites: list[ExpertsSite]) -> int:
    """Bytes of everything but the experts; tied weights are counted once, as they will be held."""
    experts = {target for site in sites for target in site.targets}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    parameters = sum(p.nbytes for name, p in model.named_parameters() if name not in experts and name not in tied)
    return int(parameters + sum(buffer.nbytes for buffer in model.buffers()))


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


def _read(
    model: Any,
    experts: ExpertPlacement,
    plan: LoadingPlan,
    reader: TensorReader,
    bank: ExpertBank | None,
    disk_backed: DiskBackedBank | None,
    placement: Placement,
    kernels: NativeKernels | None,
) -> None:
    sites = [*experts.resident, *experts.on_disk]
    if bank is not None:
        fill_bank(model, experts.resident, plan, reader, bank)
        empty_modules(sites)
        bind(experts.resident, bank, kernels)
    if disk_backed is not None:
        bind_disk_backed(experts.on_disk, disk_backed, kernels)
    load_rest(model, plan, reader, placement.dense)
    if kernels is not None:
        speed_up_linears(model, kernels)
        speed_up_decoder_layers(model, kernels)
    verify(model, sites)


def _loaded(
    config: EngineConfig,
    profile: ModelProfile,
    model: Any,
    tokenizer: Any,
    sites: list[ExpertsSite],
    bank: ExpertBank | None,
    disk_backed: DiskBackedBank | None,
    placement: Placement,
    threads: int,
    kernels: NativeKernels | None,
) -> LoadedModel:
    directory = Path(config.model)
    expert_parameters = sum(
        site.num_experts * part.nbytes // part.dtype.itemsize for site in sites for part in site.layout.parts
    )
    held = (bank.nbytes if bank is not None else 0) + (disk_backed.nbytes if disk_backed is not None else 0)
    slow = kernels is None and config.precision != "fp32" and "cpu" in (placement.dense.type, placement.experts.type)
    notes = [
        placement.note,
        disk_note(disk_backed) if disk_backed is not None else "",
        missing_note() if slow else "",
    ]
    context = profile.context_tokens or _UNKNOWN_CONTEXT
    context = min(context, config.context_tokens or context)
    info = ModelInfo(
        name=directory.name,
        path=str(directory),
        family=profile.family,
        device=str(placement.dense),
        precision="fp32" if config.precision == "fp32" else "bf16",
        threads=threads,
        parameters=sum(parameter.numel() for parameter in model.parameters()) + expert_parameters,
        layers=profile.layers,
        experts=max((site.num_experts for site in sites), default=0),
        experts_per_token=profile.experts_per_token,
        context_tokens=context,
        weights_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        experts_bytes=held,
        kv_bytes_per_token=kv_bytes_per_token(model, placement.dense),
        device_note=" ".join(filter(None, notes)),
        template_note=template_note(tokenizer),
    )
    return LoadedModel(model, tokenizer, info, bank, context, placement.dense, kernels, disk_backed)
