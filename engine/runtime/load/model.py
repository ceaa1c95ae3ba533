"""Makes a checkpoint directory into a model that runs, its experts in a bank outside the module."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from engine.common.collector import without_collector
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.common.footprint import FEWEST_KV_TOKENS, LONG_TOKENS, chunk_tokens_in_ram
from engine.common.model_info import ModelInfo
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.device import Device
from engine.devices.failures import is_fault_of_device, is_out_of_memory
from engine.devices.memory_budget import DeviceMemoryError
from engine.devices.mps import left_note, left_to_cpu
from engine.devices.opening import open_automatic, open_devices
from engine.experts.container import UnusableContainerError, reopen
from engine.experts.sites import ExpertsSite, verify
from engine.families.replies.thinking import may_think, template_text, thinking_choices
from engine.formats import STORED, format_of
from engine.hardware.cpu import compute_threads
from engine.hardware.probe import usable_cpus
from engine.kernels import card_note
from engine.kernels.gpu.proof import reads_blocks
from engine.kernels.native.choice import ensure_measured
from engine.kernels.native.library import load_kernels, missing_note
from engine.planner.placement import Note, NoteCode
from engine.runtime.decoder_layers import move_between
from engine.runtime.draft_head import draft_head_of
from engine.runtime.kv.memory import measure_kv
from engine.runtime.kv.reuse import exact_tokens
from engine.runtime.load.binding import bind_dense, bind_experts
from engine.runtime.load.checkpoint import OpenedCheckpoint, open_checkpoint
from engine.runtime.load.conversion import made_again
from engine.runtime.load.decision import Decision, decide
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.foresight import Foresight
from engine.runtime.load.in_place import ALL_TYPES, BLOCKS, formats_on_cards, lies_in_place
from engine.runtime.load.kv_precision import narrow_token_bytes, narrow_type
from engine.runtime.load.library_models import first_line, quiet_library
from engine.runtime.load.on_cards import speed_up_on_cards
from engine.runtime.load.stored import stored_note
from engine.runtime.load.timed_card import charge_model, time_resident
from engine.runtime.load.tokenizer import template_note, tokenizer_meanwhile
from engine.runtime.load.weights import disk_note, read_weights
from engine.runtime.loaded_model import LoadedModel, LoadingParts, OnPhase, ignore_phase
from engine.runtime.segments import SegmentedCapture

_log = logging.getLogger(__name__)


def open_compute_devices(config: EngineConfig) -> tuple[list[Device], str]:
    """The requested devices besides the CPU, which the caller closes, and what is to be said of those left out.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if this machine has no such device, `INVALID_REQUEST` if nothing is called so.
    """
    if config.device == "auto":
        return open_automatic(config.vram_bytes)
    return ([], "") if config.device == "cpu" else (open_devices(config.device, config.vram_bytes), "")


_ATTEMPTS = 2
"""To read converted weights that turn out to be damaged."""

_WORTH_MEASURING = 2**30
"""Bytes of a model that is slow enough for kernels chosen by measurement to matter more than the second it takes."""


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per fast core; never more than this process may use."""
    count = max(1, min(threads or compute_threads(), usable_cpus()))
    torch.set_num_threads(count)
    return count


def load_model(
    config: EngineConfig,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    on_phase: OnPhase = ignore_phase,
) -> LoadedModel:
    """Loads the checkpoint directory `config.model`.

    `on_progress(done, total)` counts bytes read; `cancelled()` is asked often; `on_phase` is told what comes next.

    Raises:
        EngineError: the checkpoint, the machine or the request does not allow it; the message says why.
        RequestCancelled: `cancelled()` was true; everything allocated has been freed.
    """
    set_threads(config.threads)  # before devices are opened: their threads take torch's number over
    opened, left_out = open_compute_devices(config)  # a missing one is reported before gigabytes are read
    try:
        note = left_out
        for _ in range(_ATTEMPTS):
            try:
                return _load(config, ModelDevices(opened), on_progress, cancelled, on_phase, note)
            except UnusableContainerError as error:
                reopen(error)
                note = made_again(error.reason)
            opened, left_out = open_compute_devices(config)
            note = " ".join(filter(None, (note, left_out)))
        return _load(config, ModelDevices(opened), on_progress, cancelled, on_phase, note)
    except (DeviceMemoryError, torch.OutOfMemoryError) as error:
        refusal = str(error).partition("\n")[0]
    # Other programs took the memory during loading, or the estimate was wrong: without the device it runs all the
    # same.  Not in the handler: the error's traceback holds what was allocated.
    gc.collect()
    _log.warning("loading again for the CPU: %s", refusal)
    on_cpu = replace(config, device="cpu")
    return _load(on_cpu, ModelDevices(()), on_progress, cancelled, on_phase, f"Runs on the CPU: {refusal}")


def _load(
    config: EngineConfig,
    devices: ModelDevices,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    on_phase: OnPhase,
    note: str = "",
) -> LoadedModel:
    on_phase("loading")
    parts = LoadingParts(
        on_phase=on_phase, devices=devices, foresight=Foresight(learns_always=config.prefetch == "mlp")
    )
    try:
        with torch.no_grad(), quiet_library(), without_collector():
            return _load_parts(config, parts, on_progress, cancelled, note)
    except BaseException:
        parts.close()
        raise


def _load_parts(
    config: EngineConfig,
    parts: LoadingParts,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    note: str,
) -> LoadedModel:
    opened = open_checkpoint(config, guesses=config.speculation == "heads" and not parts.devices.devices)
    with tokenizer_meanwhile(opened.directory) as tokenizer:

        def stops() -> bool:
            if tokenizer.done():
                tokenizer.result()  # if there is something wrong with it, nothing else need be read
            return cancelled()

        return _load_weights(config, opened, tokenizer, parts, on_progress, stops, note)


def _load_weights(
    config: EngineConfig,
    opened: OpenedCheckpoint,
    tokenizer: Future[Any],
    parts: LoadingParts,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    note: str,
) -> LoadedModel:
    threads = torch.get_num_threads()
    model = parts.model = opened.model
    devices = parts.devices.devices
    types = BLOCKS if devices else ALL_TYPES
    lies = opened.dtype == torch.bfloat16 and lies_in_place(opened, types)
    needs_kernels = lies or (not devices and opened.dtype == torch.bfloat16)
    parts.kernels = load_kernels(threads) if needs_kernels else None
    can_be_read = lies and parts.kernels is not None and _read_blocks(devices, opened)
    decision = decide(opened, config, parts.devices.devices, in_place=types if can_be_read else frozenset())
    parts.place(decision.devices, decision.layers)
    if decision.uses_cpu and opened.dtype == torch.bfloat16:
        parts.kernels = parts.kernels or load_kernels(threads)
        if parts.kernels is not None and opened.profile.bytes >= _WORTH_MEASURING:
            ensure_measured(parts.kernels)
    elif devices and parts.kernels is not None:  # the devices compute everything
        parts.kernels.close()
        parts.kernels = None
    note = " ".join(filter(None, (note, read_weights(opened, decision, parts, on_progress, cancelled))))
    places = [device.torch_device for device in decision.devices]
    captures = _graph_device(parts, decision, config)
    move_between(model, decision.layers, places, is_captured=captures is not None)
    model.eval().requires_grad_(False)
    speed_up_on_cards(model)
    if decision.devices or parts.disk_backed is not None:
        parts.wait_for_weights(cancelled)
        with left_to_cpu() as left, _first_forward(opened):
            kv = measure_kv(model, decision.dense)  # first: the experts get what room it leaves
        note = " ".join(filter(None, (note, left_note(left))))
        if decision.devices:
            parts.devices.expect_kv(kv, opened.profile.layers)
        bind_experts(opened, decision, parts, config)
        time_resident(decision.sites, decision.devices)
        bind_dense(opened, decision, parts)
    else:
        bind_dense(opened, decision, parts)  # while experts arrive
        parts.wait_for_weights(cancelled)
        with _first_forward(opened):
            kv = measure_kv(model, decision.dense)  # by native kernels, in half the time
    verify(model, decision.sites)
    tokens = parts.devices.experts.tokens
    charge_model(model, decision.devices, decision.sites, decision.dense_sizes, tokens)
    return _hand_over(
        opened,
        tokenizer.result(),
        decision,
        parts,
        config,
        captures=captures,
        kv_bytes=kv.per_token,
        threads=threads,
        note=note,
    )


def _read_blocks(devices: Sequence[Device], opened: OpenedCheckpoint) -> bool:
    """Whether all devices compute from the model's files, which can be used as they lie, as the native kernels do."""
    formats = formats_on_cards(opened) if devices else set()
    return all(reads_blocks(device.torch_device, formats) for device in devices)


@contextlib.contextmanager
def _first_forward(opened: OpenedCheckpoint) -> Iterator[None]:
    """Inside, a model computes its first tokens, where it shows whether its configuration fits its weights.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, unless memory or a device was at fault.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # whatever a family's own code stumbles over
        if is_out_of_memory(error) or is_fault_of_device(error):
            raise
        _log.error("the first forward failed", exc_info=True)
        raise EngineError(
            ErrorCode.CHECKPOINT_DAMAGED,
            f"The configuration of {opened.directory} does not fit its weights ({first_line(error)}): get both from "
            "the same version of the model.",
        ) from error


def _hand_over(
    opened: OpenedCheckpoint,
    tokenizer: Any,
    decision: Decision,
    parts: LoadingParts,
    config: EngineConfig,
    *,
    captures: Device | None,
    kv_bytes: int,
    threads: int,
    note: str,
) -> LoadedModel:
    """The model as it runs from now on.

    Args:
        captures: where decode steps are captured, if they are.
        kv_bytes: of a token of context.
        threads: that compute on the CPU.
        note: a sentence for the user that comes first; may be empty.

    Raises:
        DeviceMemoryError: a device has no room for any context to speak of.
    """
    placement, devices = decision.placement, parts.devices
    slow = decision.uses_cpu and parts.kernels is None and format_of(decision.precision).native is not None
    kv_place = captures.torch_device if captures is not None and len(decision.devices) == 1 else None
    kv_type, kv_note = narrow_type(opened.model, config.kv_precision, kv_place)
    if kv_type is not None:
        kv_bytes = narrow_token_bytes(opened.model, kv_bytes, kv_type)
    wanted = opened.context_tokens(config)
    context = devices.context_room(wanted, FEWEST_KV_TOKENS, decision.activations)
    notes = [
        note,
        threads_note(config.threads, threads),
        *map(placement_note, placement.notes),
        f"There is room for a context of {context:,} tokens, not {wanted:,}." if context < wanted else "",
        *context_notes(opened.model, opened.profile.trained_tokens, context),
        devices_note(devices, sum(site.nbytes for site in decision.sites), all_experts=placement.all_experts),
        disk_note(parts.disk_backed) if parts.disk_backed is not None else "",
        *(each.note for each in parts.arriving),
        opened.left_out,
        f"Switchyard gives this model text only, no {opened.unread.replace(' and ', ' or ')}." if opened.unread else "",
        missing_note() if slow else "",
        _card_note(decision),
        kv_note,
        stored_note(opened.plan) if decision.precision == STORED and not decision.in_place else "",
        head_note(config, opened.model, on_card=bool(decision.devices)),
    ]
    held = (parts.bank, parts.disk_backed)
    info = ModelInfo(
        name=opened.name,
        path=str(opened.directory),
        family=opened.profile.family,
        device=", ".join(device.name for device in decision.devices) or str(decision.dense),
        precision=decision.precision,
        threads=threads,
        parameters=decision.dense_parameters + sum(map(_parameters, decision.sites)),
        layers=opened.profile.layers,
        experts=max((site.num_experts for site in decision.sites), default=0),
        experts_per_token=opened.profile.experts_per_token,
        context_tokens=context,
        weights_bytes=sum(tensor.nbytes for tensor in (*opened.model.parameters(), *opened.model.buffers())),
        experts_bytes=sum(each.nbytes for each in held if each is not None),
        kv_bytes_per_token=kv_bytes,
        device_note=" ".join(filter(None, notes)),
        template_note=template_note(tokenizer),
        thinking=thinking_choices(template_text(tokenizer)),
        thinks=may_think(template_text(tokenizer), opened.profile.family),
    )
    return LoadedModel(
        model=opened.model,
        tokenizer=tokenizer,
        info=info,
        bank=parts.bank,
        disk_backed=parts.disk_backed,
        kernels=parts.kernels,
        device=decision.dense,
        devices=devices if decision.devices else None,
        foresight=parts.foresight,
        graph_device=captures,
        context_tokens=context,
        chunk_tokens=_chunk_tokens(opened, decision, parts),
        ram_bytes=config.ram_bytes,
        speculates=config.speculation != "off",
        prepared=parts.prepared,
        kv_type=kv_type,
    )


def _parameters(site: ExpertsSite) -> int:
    return site.num_experts * sum(part.nbytes // part.dtype.itemsize for part in site.layout.unquantised.parts)


def _card_note(decision: Decision) -> str:
    """Says so where a card computes the plain, slower way."""
    return next(filter(None, (card_note(device.torch_device) for device in decision.devices)), "")


def _chunk_tokens(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> int:
    if decision.devices:
        return decision.placement.chunk_tokens
    if parts.disk_backed is not None:
        return LONG_TOKENS
    return chunk_tokens_in_ram(opened.profile.experts, opened.profile.experts_per_token)


def _graph_device(parts: LoadingParts, decision: Decision, config: EngineConfig) -> Device | None:
    """Where decode steps are captured: on the card that has all of the model, or where it begins on several, without
    native kernels on the CPU beside, which no card could repeat."""
    opened, wanted = parts.devices.devices, config.graphs
    if not decision.devices or wanted == "off" or not all(device.new_capture is not None for device in opened):
        return None
    on_host = opened[0].torch_device.type == "cpu" and parts.kernels is not None
    if on_host or not (wanted == "on" or all(device.compute_follows_caller for device in opened)):
        return None
    return opened[0] if len(opened) == 1 else replace(opened[0], new_capture=lambda: SegmentedCapture(opened))


def head_note(config: EngineConfig, model: Any, *, on_card: bool) -> str:
    """Says so where a layer for drafting tokens was asked for and none is used."""
    if config.speculation != "heads" or draft_head_of(model) is not None:
        return ""
    why = "the model runs on a card" if on_card else "this checkpoint has none that Switchyard knows"
    return f"No layer for drafting tokens is used: {why}."


def threads_note(asked: int | None, used: int) -> str:
    """Says so where more threads were asked for than this process may use."""
    if asked is None or asked <= used:
        return ""
    compute = "1 thread computes" if used == 1 else f"{used} threads compute"
    return f"{compute}, not {asked}: this process may not use more processor cores."


def placement_note(note: Note) -> str:
    """The note with its figures."""
    needed, room = rounded_up(note.needed), rounded_down(note.room)
    if note.code is NoteCode.ON_CPU:
        return (
            f"Runs on the CPU: even without its experts the model needs {needed} of {note.device}, of which {room} can "
            "be used."
        )
    if note.code is NoteCode.NO_SLOTS:
        return (
            f"Runs on the CPU: with its experts, all of which have to lie there, the model needs {needed} of "
            f"{note.device}, of which {room} can be used."
        )
    finer = "what the file holds" if note.instead_of == STORED else note.instead_of
    begin = f"Weights are in {note.precision}, because {finer} needs {needed}"
    if note.code is NoteCode.COARSER_FOR_DEVICE:
        return f"{begin} of {note.device} even without its experts, of which {room} can be used."
    return f"{begin} of RAM and there is room for {room}."


def context_notes(model: Any, trained_tokens: int, context_tokens: int) -> list[str]:
    """Sentences for the user about an unusual context: stretched, or read again for every answer."""
    notes = []
    if 0 < trained_tokens < context_tokens:
        notes.append(
            f"The model was trained on contexts of {trained_tokens:,} tokens, which its rotary embedding stretches to "
            f"{context_tokens:,}: beyond {trained_tokens:,}, answers may get worse."
        )
    exact = exact_tokens(model)
    if exact < context_tokens:
        beyond = f"longer than {exact:,} tokens " if exact else ""
        notes.append(
            f"A chat {beyond}is read from its beginning again for every answer, which takes longer: this model's "
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
        modelled = " Its time is modelled from data sheets." if any(d.meter for d in devices.devices) else ""
        sentences.append(f"The graphics card is emulated: the CPU computes what it would.{modelled}")
    if experts_bytes and not all_experts:
        kept = sum(cache.nbytes for cache in devices.experts.all_caches)
        begin = f"Of {rounded_up(experts_bytes)} of experts, {rounded_down(kept)} are" if kept else "No experts are"
        sentences.append(
            f"{begin} kept in video memory; the others are computed on the CPU or fetched as they are needed."
        )
    return " ".join([*sentences, *devices.experts.notes])
