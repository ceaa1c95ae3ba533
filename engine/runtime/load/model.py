"""Makes a checkpoint directory into a model that runs, its experts in a bank outside the module."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from engine.checkpoint.library import precision_words
from engine.common.collector import without_collector
from engine.common.config import EngineConfig
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.common.falls import FALLS
from engine.common.footprint import FEWEST_KV_TOKENS, LONG_TOKENS, chunk_tokens_in_ram
from engine.common.model_info import ModelInfo
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.device import Device
from engine.devices.failures import is_fault_of_device, is_out_of_memory
from engine.devices.memory_budget import DeviceMemoryError
from engine.devices.opening import open_automatic, open_devices
from engine.experts.container import UnusableContainerError, reopen
from engine.experts.dispatch import verify
from engine.families.library import own_forward
from engine.families.replies.reader import may_think, template_text, thinking_choices
from engine.formats import STORED, format_of
from engine.hardware.cpu import compute_threads
from engine.hardware.probe import usable_cpus
from engine.kernels import card_note
from engine.kernels.gpu.proof import attention_of
from engine.kernels.native.choice import ensure_measured
from engine.kernels.native.library import load_kernels, missing_note
from engine.kernels.native.paged_attention import KvType
from engine.planner.placement import Note, NoteCode
from engine.runtime.decoder_layers import SegmentedCapture, decoder_layers, move_between
from engine.runtime.draft_head import draft_head_of
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.library_caches import KvCost, measure_kv
from engine.runtime.kv.reuse import exact_tokens
from engine.runtime.load.binding import bind_dense, bind_experts, speed_up_on_cards
from engine.runtime.load.checkpoint import OpenedCheckpoint, open_checkpoint
from engine.runtime.load.conversion import made_again
from engine.runtime.load.devices import ModelDevices, left_note, left_to_cpu
from engine.runtime.load.foresight import Foresight
from engine.runtime.load.forms import stored_note
from engine.runtime.load.library_models import first_line, quiet_library
from engine.runtime.load.plan import Machine, Plan, resolve
from engine.runtime.load.timed_card import charge_model, time_resident
from engine.runtime.load.tokenizer import template_note, tokenizer_meanwhile
from engine.runtime.load.weights import disk_note, layers_note, read_weights, tables_note
from engine.runtime.loaded_model import LoadedModel, LoadingParts, ModelParts, OnPhase, ignore_phase
from engine.runtime.pictures import Blind, Sight

_log = logging.getLogger(__name__)


_KV_TYPES = {"int8": KvType.INT8, "fp16": KvType.FP16}
_ATTEMPTS = 2
"""To read converted weights that turn out to be damaged."""

_WORTH_MEASURING = 2**30
"""Bytes of a model that is slow enough for kernels chosen by measurement to matter more than the second it takes."""


def open_compute_devices(config: EngineConfig) -> tuple[list[Device], str]:
    """The requested devices besides the CPU, which the caller closes, and what is to be said of those left out."""
    if config.device == "auto":
        return open_automatic(config.vram_bytes)
    return ([], "") if config.device == "cpu" else (open_devices(config.device, config.vram_bytes), "")


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per fast core; never more than this process may use."""
    count = max(1, min(threads or compute_threads(), usable_cpus()))
    torch.set_num_threads(count)
    return count


def load_model(
    config: EngineConfig,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: CancelCheck,
    on_phase: OnPhase = ignore_phase,
) -> LoadedModel:
    """Loads the checkpoint directory `config.model`.

    `on_progress(done, total)` counts bytes read; `cancelled()` is asked often; `on_phase` is told what comes next.

    Raises:
        EngineError: the checkpoint, the machine or the request does not allow it; the message says why.
        RequestCancelled: `cancelled()` was true; everything allocated has been freed.
    """
    FALLS.clear()
    set_threads(config.threads)  # before devices are opened: their threads take torch's number over
    said = ""
    for attempt in range(_ATTEMPTS + 1):
        devices, left_out = open_compute_devices(config)  # a missing one is reported before gigabytes are read
        parts = LoadingParts(devices=ModelDevices(devices), on_phase=on_phase)
        try:
            return _load(config, parts, on_progress, cancelled, _joined(left_out, said))
        except UnusableContainerError as error:
            if attempt == _ATTEMPTS:
                raise
            reopen(error)
            said = made_again(error.reason)
        except (DeviceMemoryError, torch.OutOfMemoryError) as error:
            refusal = str(error).partition("\n")[0]
            break
    # Other programs took the memory during loading, or the estimate was wrong: without the device it runs all the
    # same.  Not in the handler: the error's traceback holds what was allocated.
    gc.collect()
    _log.warning("loading again for the CPU: %s", refusal)
    on_cpu = replace(config, device="cpu")
    parts = LoadingParts(devices=ModelDevices(()), on_phase=on_phase)
    return _load(on_cpu, parts, on_progress, cancelled, f"Runs on the CPU: {refusal}")


def _load(
    config: EngineConfig,
    parts: LoadingParts,
    on_progress: Callable[[int, int], None],
    cancelled: CancelCheck,
    note: str,
) -> LoadedModel:
    parts.on_phase("loading")
    parts.foresight = Foresight(learns_always=config.prefetch == "mlp")
    try:
        with torch.no_grad(), quiet_library(), without_collector():
            devices = parts.devices.devices
            file = open_checkpoint(config, guesses=config.speculation == "heads" and not devices)
            with tokenizer_meanwhile(file.directory) as tokenizer:

                def stops() -> bool:
                    if tokenizer.done():
                        tokenizer.result()  # if there is something wrong with it, nothing else need be read
                    return cancelled()

                parts.model = file.model
                threads = torch.get_num_threads()
                parts.kernels = load_kernels(threads) if file.dtype == torch.bfloat16 else None
                machine = Machine.now(config, devices, has_kernels=parts.kernels is not None)
                plan = resolve(config, machine, file)
                note = _joined(note, threads_note(config.threads, threads))
                return build(plan, tokenizer, parts, on_progress, stops, note)
    except BaseException:
        parts.close()
        raise


def build(
    plan: Plan,
    tokenizer: Future[Any],
    parts: LoadingParts,
    on_progress: Callable[[int, int], None],
    cancelled: CancelCheck,
    note: str = "",
) -> LoadedModel:
    """Reads the weights to where the plan wants them and binds them to what computes; `parts` owns all of it."""
    file, model = plan.file, plan.file.model
    parts.place(plan.devices, plan.layers)
    if parts.kernels is not None and not plan.uses_cpu:  # the devices compute everything
        parts.kernels.close()
        parts.kernels = None
    elif parts.kernels is not None and file.profile.bytes >= _WORTH_MEASURING:
        ensure_measured(parts.kernels)
    note = _joined(note, read_weights(plan, parts, on_progress, cancelled))
    captures = _graph_device(plan, parts)
    move_between(model, plan.layers, plan.places, is_captured=captures is not None)
    model.eval().requires_grad_(False)
    speed_up_on_cards(model)
    waits_first = bool(plan.devices) or parts.disk_backed is not None
    if not waits_first:
        bind_dense(model, parts.kernels)  # while experts arrive
    prepared = parts.wait_for_weights(cancelled)
    waits = parts.stream.until(cancelled) if parts.stream is not None else contextlib.nullcontext()
    if parts.stream is not None:
        parts.stream.follow(decoder_layers(model))
    left_to = left_to_cpu() if plan.devices else contextlib.nullcontext(list[str]())
    with left_to as left, waits, _first_forward(file):
        kv, read = measure_kv(model, plan.dense)  # before experts are bound: they get what room it leaves
    if waits_first:
        if plan.devices:
            parts.devices.expect_kv(kv, file.profile.layers)
        bind_experts(plan, parts)
        time_resident(plan.sites, plan.devices)
        bind_dense(model, parts.kernels)
    verify(model, plan.sites)
    charge_model(model, plan.devices, plan.sites, plan.dense_sizes, parts.devices.experts.tokens)
    note = _joined(note, left_note(left))
    return _hand_over(plan, tokenizer.result(), parts, captures, kv, read, prepared, note)


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


@contextlib.contextmanager
def _first_forward(opened: OpenedCheckpoint) -> Iterator[None]:
    """Inside, a model computes its first tokens, where it shows whether its configuration fits its weights."""
    try:
        yield
    except (EngineError, RequestCancelled):
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
    plan: Plan,
    tokenizer: Any,
    parts: LoadingParts,
    captures: Device | None,
    kv: KvCost,
    read: Any,
    prepared: tuple[Path, ...],
    note: str,
) -> LoadedModel:
    file, placement, devices = plan.file, plan.placement, parts.devices
    model, profile = file.model, file.profile
    kv_place = captures.torch_device if captures is not None and len(plan.devices) == 1 else None
    kv_bytes = kv.per_token
    kv_type, kv_note = narrow_type(model, plan.config.kv_precision, kv_place)
    if kv_type is not None:
        kv_bytes = narrow_token_bytes(model, kv_bytes, kv_type)
    wanted = plan.context_tokens
    context = devices.context_room(wanted, FEWEST_KV_TOKENS, plan.activations)
    computes_in_blocks = plan.precision == STORED or format_of(plan.precision).native is not None
    lacks_kernels = plan.uses_cpu and parts.kernels is None and computes_in_blocks
    faults = [
        note,
        *map(placement_note, placement.notes),
        missing_note() if lacks_kernels else "",
        next(filter(None, (card_note(device.torch_device) for device in plan.devices)), ""),
    ]
    notes = [
        *faults,
        f"There is room for a context of {context:,} tokens, not {wanted:,}." if context < wanted else "",
        *context_notes(model, profile.trained_tokens, context),
        devices_note(devices, sum(site.nbytes for site in plan.sites), all_experts=placement.all_experts),
        disk_note(parts.disk_backed) if parts.disk_backed is not None else "",
        tables_note(placement.tables.on_disk) if plan.tables else "",
        layers_note(placement.streamed) if plan.streamed else "",
        file.left_out,
        unread_note(file),
        kv_note,
        stored_note(file.plan) if plan.precision == STORED and not plan.forms.in_place else "",
        head_note(model, wanted=plan.config.speculation == "heads", on_card=bool(plan.devices)),
    ]
    held = (parts.bank, parts.disk_backed)
    seeing = _seeing(file, tokenizer, plan.dense, devices if plan.devices else None)
    info = ModelInfo(
        name=file.name,
        path=str(file.directory),
        family=profile.family,
        device=", ".join(device.name for device in plan.devices) or str(plan.dense),
        precision=plan.precision,
        threads=torch.get_num_threads(),
        parameters=file.weights,
        layers=profile.layers,
        experts=max((site.num_experts for site in plan.sites), default=0),
        experts_per_token=profile.experts_per_token,
        context_tokens=context,
        weights_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        - (placement.streamed.nbytes - placement.streamed.window),
        experts_bytes=sum(each.nbytes for each in held if each is not None),
        kv_bytes_per_token=kv_bytes,
        device_note=_joined(*notes),
        is_hampered=any(faults),
        stored_as=precision_words(file.directory, profile),
        sees=isinstance(seeing, Sight),
        template_note=template_note(tokenizer),
        thinking=thinking_choices(template_text(tokenizer)),
        thinks=may_think(template_text(tokenizer), profile.family),
    )
    if plan.devices:
        chunk = placement.chunk_tokens
    elif placement.waits_for_disk:
        chunk = LONG_TOKENS
    else:
        chunk = chunk_tokens_in_ram(profile.experts, profile.experts_per_token)
    own = {each.name: getattr(parts, each.name) for each in fields(ModelParts)}
    return LoadedModel(
        **own | {"tokenizer": tokenizer, "devices": devices if plan.devices else None},
        info=info,
        device=plan.dense,
        graph_device=captures,
        context_tokens=context,
        chunk_tokens=chunk,
        ram_bytes=plan.config.ram_bytes,
        speculates=plan.config.speculation != "off",
        prepared=prepared,
        kv_type=kv_type,
        kv_fixed_bytes=kv.fixed,
        read=read,
        sight=seeing if isinstance(seeing, Sight) else None,
        blind=seeing if isinstance(seeing, Blind) else None,
    )


def _graph_device(plan: Plan, parts: LoadingParts) -> Device | None:
    """Where decode steps are captured: on the card that has all of the model, or where it begins on several, without
    native kernels on the CPU or rows from disk beside, which no card could repeat."""
    opened, asked = parts.devices.devices, plan.config.graphs
    if not opened or asked == "off" or not all(device.new_capture is not None for device in opened):
        return None
    on_host = opened[0].torch_device.type == "cpu" and parts.kernels is not None
    if (
        on_host
        or plan.tables
        or not (plan.config.graphs == "on" or all(device.compute_follows_caller for device in opened))
    ):
        return None
    return opened[0] if len(opened) == 1 else replace(opened[0], new_capture=lambda: SegmentedCapture(opened))


def narrow_type(model: Any, kv_precision: str, captures: torch.device | None = None) -> tuple[KvType | None, str]:
    """The type of keys and values that was asked for, if kernels read it in every layer of this model.

    Args:
        captures: where all of it is, if its steps are captured there: a card's kernel may read such keys then.
    """
    wanted = _KV_TYPES.get(kv_precision)
    if wanted is None:
        return None, ""
    cache, layers = library_cache(model), decoder_layers(model)
    whole = cache is not None and all(type(held) in (DynamicLayer, DynamicSlidingWindowLayer) for held in cache.layers)
    fast = (own_forward(layer) for layer in layers)
    if whole and layers and all(isinstance(path, SingleTokenLayer) and path.reads_narrow for path in fast):
        return wanted, ""
    if whole and captures is not None and attention_of(captures) is not None:
        return wanted, ""
    return None, f"Chats hold keys and values in the model's own type: its attention cannot read {kv_precision} here."


def narrow_token_bytes(model: Any, per_token: int, kv_type: KvType) -> int:
    """Bytes of a token where layers without a window hold it in this type; `per_token`: in the model's own."""
    cache = library_cache(model)
    config = model.config.get_text_config(decoder=True)
    if cache is None:
        return per_token
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow = sum(type(held) is DynamicLayer for held in cache.layers) / max(1, len(cache.layers))
    scale = 4 if kv_type is KvType.INT8 else 0
    ratio: float = (width * kv_type.dtype.itemsize + scale) / (width * model.dtype.itemsize)
    return int(per_token * (1 - narrow + narrow * ratio))


def head_note(model: Any, *, wanted: bool, on_card: bool) -> str:
    if not wanted or draft_head_of(model) is not None:
        return ""
    why = "the model runs on a card" if on_card else "this checkpoint has none that Switchyard knows"
    return f"No layer for drafting tokens is used: {why}."


def _seeing(file: OpenedCheckpoint, tokenizer: Any, place: torch.device, devices: ModelDevices | None) -> Sight | Blind:
    if file.sight is None:
        return Blind(file.name, file.why_blind)
    try:
        return file.sight(tokenizer, place, devices)
    except LookupError as error:
        return Blind(file.name, str(error.args[0]))


def unread_note(file: OpenedCheckpoint) -> str:
    if not file.unread:
        return ""
    taken = "text and images" if file.sight is not None else "text"
    return f"Switchyard gives this model {taken} only, no {file.unread.replace(' and ', ' or ')}."


def threads_note(asked: int | None, used: int) -> str:
    if asked is None or asked <= used:
        return ""
    compute = "1 thread computes" if used == 1 else f"{used} threads compute"
    return f"{compute}, not {asked}: this process may not use more processor cores."


def placement_note(note: Note) -> str:
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
    if note.code is NoteCode.SHARED_BY_LAYERS:
        return (
            f"The cards share layers instead of each layer's experts: for those {needed} would have to be there, and "
            f"{room} can be used."
        )
    finer = "what the file holds" if note.instead_of == STORED else note.instead_of
    begin = f"Weights are in {note.precision}, because {finer} needs {needed}"
    if note.code is NoteCode.COARSER_FOR_DEVICE:
        return f"{begin} of {note.device} even without its experts, of which {room} can be used."
    return f"{begin} of RAM and there is room for {room}."


def context_notes(model: Any, trained_tokens: int, context_tokens: int) -> list[str]:
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
