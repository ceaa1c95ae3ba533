"""What the window is told about a model that has been loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.profile import ModelProfile
from engine.common.model_info import ModelInfo
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.sites import ExpertsSite
from engine.runtime.cache_reuse import exact_tokens
from engine.runtime.model_devices import ModelDevices


def model_info(
    directory: Path,
    profile: ModelProfile,
    model: Any,
    sites: list[ExpertsSite],
    *,
    dense_parameters: int,
    device: str,
    precision: str,
    threads: int,
    context_tokens: int,
    experts_bytes: int,
    kv_bytes_per_token: int,
    note: str,
    template_note: str,
) -> ModelInfo:
    """See `ModelInfo`; `sites` are the experts modules, whose weights are no longer in the model."""
    expert_parameters = sum(
        site.num_experts * part.nbytes // part.dtype.itemsize
        for site in sites
        for part in site.layout.unquantised.parts
    )
    return ModelInfo(
        name=directory.name,
        path=str(directory),
        family=profile.family,
        device=device,
        precision=precision,
        threads=threads,
        parameters=dense_parameters + expert_parameters,
        layers=profile.layers,
        experts=max((site.num_experts for site in sites), default=0),
        experts_per_token=profile.experts_per_token,
        context_tokens=context_tokens,
        weights_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        experts_bytes=experts_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        device_note=note,
        template_note=template_note,
    )


def context_notes(model: Any, trained_tokens: int, context_tokens: int) -> list[str]:
    """Sentences for the user about a context that is not like others: stretched, or read again for every answer."""
    notes = []
    if 0 < trained_tokens < context_tokens:
        notes.append(
            f"The model was made for contexts of {trained_tokens:,} tokens, which its rotary embedding stretches to "
            f"{context_tokens:,}: beyond {trained_tokens:,}, answers may get worse."
        )
    exact = exact_tokens(model)
    if exact < context_tokens:
        beyond = f"longer than {exact:,} tokens " if exact else ""
        notes.append(
            f"A chat {beyond}is read again from its beginning for every answer, which takes longer: this model's "
            "answers depend on which tokens are read together."
        )
    return notes


def devices_note(devices: ModelDevices, experts_bytes: int, *, all_experts: bool) -> str:
    """One or two sentences for the user, with the figures; nothing where the CPU does it all."""
    if not devices.devices:
        return ""
    sentences = []
    emulated = [device.name for device in devices.devices if device.name.startswith("emulated:")]
    if emulated:
        sentences.append("The graphics card is emulated: the CPU computes what it would.")
    if experts_bytes and not all_experts:
        kept = sum(cache.nbytes for caches in devices.experts.caches for cache in caches)
        begin = f"Of {rounded_up(experts_bytes)} of experts, {rounded_down(kept)} are" if kept else "No experts are"
        sentences.append(
            f"{begin} kept in video memory; the others are computed on the CPU or fetched as they are needed."
        )
    return " ".join([*sentences, *devices.experts.notes])
