"""What is handed over: the model, all that belongs to it, and what the window is told about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint.profile import ModelProfile
from engine.common.config import EngineConfig
from engine.common.footprint import FEWEST_KV_TOKENS, LONG_TOKENS, piece_tokens_in_ram
from engine.common.model_info import ModelInfo
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.device import Device
from engine.experts.sites import ExpertsSite
from engine.formats import format_of
from engine.kernels import card_note
from engine.kernels.native.library import missing_note
from engine.planner.placement import Note, NoteCode
from engine.runtime.decode.prompt import template_note
from engine.runtime.kv.reuse import exact_tokens
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.decision import Decision
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.weights import disk_note
from engine.runtime.loaded_model import LoadedModel, LoadingParts


def hand_over(
    opened: OpenedCheckpoint,
    decision: Decision,
    parts: LoadingParts,
    config: EngineConfig,
    *,
    kv_bytes: int,
    threads: int,
    note: str,
) -> LoadedModel:
    """The model as it runs from now on.

    Args:
        kv_bytes: of a token of context.
        threads: that compute on the CPU.
        note: a sentence for the user that comes first; may be empty.

    Raises:
        DeviceMemoryError: a device has no room for any context to speak of.
    """
    placement, devices = decision.placement, parts.devices
    slow = decision.uses_cpu and parts.kernels is None and format_of(decision.precision).native is not None
    wanted = opened.context_tokens(config)
    context = devices.context_room(wanted, FEWEST_KV_TOKENS, decision.activations)
    notes = [
        note,
        *map(sentence, placement.notes),
        f"There is room for a context of {context:,} tokens, not {wanted:,}." if context < wanted else "",
        *context_notes(opened.model, opened.profile.trained_tokens, context),
        devices_note(devices, sum(site.nbytes for site in decision.sites), all_experts=placement.all_experts),
        disk_note(parts.disk_backed) if parts.disk_backed is not None else "",
        f"The model reads text here, no {opened.unread.replace(' and ', ' or ')}." if opened.unread else "",
        missing_note() if slow else "",
        _card_note(decision),
    ]
    held = (parts.bank, parts.disk_backed)
    info = model_info(
        opened.directory,
        opened.profile,
        opened.model,
        decision.sites,
        dense_parameters=decision.dense_parameters,
        device=", ".join(device.name for device in decision.devices) or str(decision.dense),
        precision=decision.precision,
        threads=threads,
        context_tokens=context,
        experts_bytes=sum(each.nbytes for each in held if each is not None),
        kv_bytes_per_token=kv_bytes,
        note=" ".join(filter(None, notes)),
        template_note=template_note(opened.tokenizer),
    )
    return LoadedModel(
        model=opened.model,
        tokenizer=opened.tokenizer,
        info=info,
        bank=parts.bank,
        disk_backed=parts.disk_backed,
        kernels=parts.kernels,
        device=decision.dense,
        devices=devices if decision.devices else None,
        foresight=parts.foresight,
        graph_device=_graph_device(parts, config),
        context_tokens=context,
        piece_tokens=_piece_tokens(opened, decision, parts),
        ram_bytes=config.ram_bytes,
    )


def _card_note(decision: Decision) -> str:
    """Says so where a card computes the plain, slower way."""
    return next(filter(None, (card_note(device.torch_device) for device in decision.devices)), "")


def _piece_tokens(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> int:
    if decision.devices:
        return decision.placement.piece_tokens
    return (
        LONG_TOKENS
        if parts.disk_backed is not None
        else piece_tokens_in_ram(opened.profile.experts, opened.profile.experts_per_token)
    )


def _graph_device(parts: LoadingParts, config: EngineConfig) -> Device | None:
    """Where decode steps are captured: on one card that has all of the model, without native kernels on the CPU
    beside, which no card could repeat."""
    opened, wanted = parts.devices.devices, config.graphs
    if len(opened) != 1 or wanted == "off" or opened[0].new_capture is None:
        return None
    on_host = opened[0].torch_device.type == "cpu" and parts.kernels is not None
    return opened[0] if (wanted == "on" or opened[0].compute_follows_caller) and not on_host else None


def sentence(note: Note) -> str:
    """The note with its figures."""
    needed, room = rounded_up(note.needed), rounded_down(note.room)
    if note.code is NoteCode.ON_CPU:
        return (
            f"Runs on the CPU: even without its experts the model needs {needed} of {note.device}, of which {room} can "
            "be used."
        )
    begin = f"Weights are in {note.precision}, because {note.instead_of} needs {needed}"
    if note.code is NoteCode.COARSER_FOR_DEVICE:
        return f"{begin} of {note.device} even without its experts, of which {room} can be used."
    return f"{begin} of RAM and there is room for {room}."


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
