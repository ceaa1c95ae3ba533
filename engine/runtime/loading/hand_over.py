"""What is handed over: the model, all that belongs to it, and what the window is told about it."""

from __future__ import annotations

from engine.common.config import EngineConfig
from engine.common.footprint import FEWEST_KV_TOKENS
from engine.devices.device import Device
from engine.formats import format_of
from engine.kernels import card_note
from engine.kernels.native.library import missing_note
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.loading.decision import Decision
from engine.runtime.loading.from_disk import disk_note
from engine.runtime.loading.opened import OpenedCheckpoint
from engine.runtime.loading.parts import LoadingParts
from engine.runtime.loading.placement_words import sentence
from engine.runtime.model_info import context_notes, devices_note, model_info
from engine.runtime.prefill_pieces import LONG_TOKENS, tokens_in_ram
from engine.runtime.prompt import template_note


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
    return LONG_TOKENS if parts.disk_backed is not None else tokens_in_ram(opened.profile)


def _graph_device(parts: LoadingParts, config: EngineConfig) -> Device | None:
    """Where decode steps are captured: on one card that has all of the model, without native kernels on the CPU
    beside, which no card could repeat."""
    opened, wanted = parts.devices.devices, config.graphs
    if len(opened) != 1 or wanted == "off" or opened[0].new_capture is None:
        return None
    on_host = opened[0].torch_device.type == "cpu" and parts.kernels is not None
    return opened[0] if (wanted == "on" or opened[0].compute_follows_caller) and not on_host else None
