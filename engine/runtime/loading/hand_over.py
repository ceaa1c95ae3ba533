"""What is handed over: the model, all that belongs to it, and what the window is told about it."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.devices.device import Device
from engine.kernels import card_note
from engine.kernels.native.library import missing_note
from engine.runtime.expert_placement import disk_note
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.loading.decision import Decision
from engine.runtime.loading.opened import OpenedCheckpoint
from engine.runtime.loading.parts import LoadingParts
from engine.runtime.model_info import devices_note, model_info
from engine.runtime.placement import FEWEST_KV_TOKENS
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
    placement, devices, needs = decision.placement, parts.devices, decision.needs
    slow = decision.uses_cpu and parts.kernels is None and decision.precision != "fp32"
    wanted = opened.context_tokens(config)
    context = devices.context_room(wanted, FEWEST_KV_TOKENS, placement.piece_tokens * needs.activations)
    notes = [
        note,
        *decision.notes,
        f"There is room for a context of {context:,} tokens, not {wanted:,}." if context < wanted else "",
        devices_note(devices, needs.experts, all_experts=placement.all_experts),
        disk_note(parts.disk_backed) if parts.disk_backed is not None else "",
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
        device=", ".join(device.name for device in placement.devices) or str(placement.dense),
        precision=decision.precision,
        threads=threads,
        context_tokens=context,
        experts_bytes=sum(each.nbytes for each in held if each is not None),
        kv_bytes_per_token=kv_bytes,
        note=" ".join(filter(None, notes)),
        template_note=template_note(opened.tokenizer),
    )
    return LoadedModel(
        opened.model,
        opened.tokenizer,
        info,
        parts.bank,
        context,
        placement.dense,
        parts.kernels,
        parts.disk_backed,
        devices if placement.devices else None,
        _piece_tokens(opened, decision, parts),
        parts.foresight,
        _graph_device(parts, config),
        config.ram_bytes,
    )


def _card_note(decision: Decision) -> str:
    """Says so where a card computes the plain, slower way."""
    return next(filter(None, (card_note(device.torch_device) for device in decision.placement.devices)), "")


def _piece_tokens(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> int:
    if decision.placement.devices:
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
