"""What is read: experts into the bank or onto disk, everything else through the library to where it is computed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertIndex
from engine.checkpoint.library import bank_path
from engine.common.sizes import rounded_down, rounded_up
from engine.devices.memory_budget import MemoryCategory
from engine.experts.bank import ExpertBank
from engine.experts.cache.tier import ADAPTIVE
from engine.experts.disk_backed import DiskBackedBank, bind_disk_backed
from engine.experts.disk_tier import DiskTier
from engine.experts.ram_pressure import RamPressure
from engine.experts.ram_tier import RamTier
from engine.experts.sites import bind, empty_modules
from engine.formats import STORED
from engine.kernels.dense import card_layers, quantise_on_cards
from engine.kernels.native.linear import keep_linears, keepable
from engine.planner.placement import InRam
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.decision import Decision, dense_on_cards
from engine.runtime.load.fill_bank import fill_bank
from engine.runtime.load.in_place import (
    ExpertsOnDisk,
    FilesInPlace,
    MatricesOnCards,
    bytes_in_place,
    fill_records,
    matrices_in_place,
)
from engine.runtime.load.kept_dense import KeptDense, kept_dense
from engine.runtime.load.kept_experts import kept_experts
from engine.runtime.load.library_conversion import LoadingPlan, load_rest
from engine.runtime.load.prepare_bank import BankSource, kept_as, prepare_bank, rebuild_record
from engine.runtime.load.stored import StoredLinears
from engine.runtime.load.tensor_reader import TensorReader
from engine.runtime.loaded_model import LoadingParts

OnProgress = Callable[[int, int], None]
_log = logging.getLogger(__name__)
_POLICY = ADAPTIVE


def read_weights(
    opened: OpenedCheckpoint,
    decision: Decision,
    parts: LoadingParts,
    on_progress: OnProgress,
    cancelled: Callable[[], bool],
) -> None:
    """Fills the model and, with records, `parts`, whose kept experts may still be on their way.

    Raises:
        EngineError, RequestCancelled: as `engine.runtime.load.model.load_model`.
    """
    model, plan, placement = opened.model, opened.plan, decision.placement
    sites, devices, resident, on_disk = decision.sites, parts.devices, decision.resident, decision.on_disk
    if sites:
        from_host = decision.devices and not placement.all_experts
        host_memory = decision.devices[0].host_memory if from_host else None
        if host_memory is not None:
            host_memory.expect(sum(site.nbytes for site in resident))
        parts.bank = ExpertBank(decision.experts, host_memory, decision.experts_elsewhere)
    devices.count_weights(decision.dense_sizes)
    if decision.devices and placement.all_experts:
        for index in range(len(decision.devices)):
            mine = [site.nbytes for site in sites if decision.layers.of(site.name) == index]
            devices.count(index, sum(mine), MemoryCategory.EXPERTS)
    if on_disk and not decision.in_place:
        parts.on_phase("converting")
        source = BankSource(opened.directory, model, sites, plan, decision.precision, parts.kernels, opened.guesses)
        names = {site.name for site in on_disk}
        plan = _without(plan, names)
        progress = _TwoParts(on_progress, plan.nbytes)
        parts.disk_backed = open_disk_backed(
            source, names, placement.ram, on_progress=progress.first, cancelled=cancelled
        )
        on_progress = progress.second
        parts.on_phase("reading")
    files: FilesInPlace | None = None
    more = 0  # bytes that are read besides the plan's
    if decision.in_place:
        plan = _without(plan, {site.name for site in sites})
        _remove_copies(opened)
        if decision.devices:
            more = bytes_in_place(opened, resident)
        else:
            files = FilesInPlace(opened, whole=not on_disk)
            parts.arriving += files.arriving
            on_progress = files.counting(on_progress)
    linears = _stored_linears(opened, decision, parts)
    kept = kept_experts(opened, decision, parts.bank, parts.kernels)
    if kept is not None:
        parts.arriving.append(kept)
        plan = _without(plan, kept.names)
        on_progress = kept.counting(on_progress)
    dense = parts.kept_dense = kept_dense(opened, decision, parts.kernels)
    if dense is not None:
        parts.arriving.insert(0, dense.records)  # whose progress has that of the others in it
        on_progress = dense.records.counting(on_progress)
        linears = [] if dense.records.is_there else linears
    total = plan.nbytes + StoredLinears(opened).read_twice(linears) - _read_apart(plan, dense) + more
    if files is not None:
        total -= sum(plan.renamed[name].nbytes for name in matrices_in_place(opened) if name in plan.renamed)
    with TensorReader(on_progress, cancelled, total, dtype=plan.dtype, kernels=parts.kernels) as reader:
        if parts.bank is not None:
            there = kept.read_into(parts.bank) if kept is not None else set()
            converted = [site for site in resident if site.name not in there and not decision.in_place]
            parts.on_phase(
                "converting" if any(site.layout is not site.layout.unquantised for site in converted) else "reading"
            )
            on_made = kept.write if kept is not None else lambda _layer: None
            fill_bank(model, converted, plan, reader, parts.bank, parts.kernels, on_made)
            if files is not None:
                files.bind_experts(resident, reader, parts.bank)
            elif decision.in_place:
                fill_records(opened, resident, reader, parts.bank)
            empty_modules(model, sites)
            bind(resident, parts.bank, parts.kernels)
        if on_disk and decision.in_place:
            parts.disk_backed = _slots_over(DiskTier(ExpertsOnDisk(opened, on_disk, reader)), placement.ram)
        if parts.disk_backed is not None:
            bind_disk_backed(on_disk, parts.disk_backed, parts.kernels)
        parts.on_phase("reading")
        _read_rest(opened, plan, decision, parts, reader, linears, files)


def _remove_copies(opened: OpenedCheckpoint) -> None:
    """What earlier versions made of files that are now used as they lie."""
    made = kept_as(STORED, guesses=opened.guesses)
    for copy in (bank_path(opened.directory, made), bank_path(opened.directory, f"{made}-dense")):
        with contextlib.suppress(OSError):
            nbytes = copy.stat().st_size
            copy.unlink()
            _log.info("removed %s of %s, which is no longer needed (%d bytes)", copy.name, opened.name, nbytes)


def _read_apart(plan: LoadingPlan, dense: KeptDense | None) -> int:
    """Bytes of the checkpoint that need not be read, as what is made of them is there."""
    names = dense.apart if dense is not None else set()
    return sum(plan.renamed[name].nbytes for name in names)


def _stored_linears(opened: OpenedCheckpoint, decision: Decision, parts: LoadingParts) -> list[str]:
    """Names of the linear layers that are made of what the checkpoint stores."""
    if decision.precision != STORED or decision.in_place:
        return []
    formats, places = StoredLinears(opened).formats, _places(decision)
    if decision.devices and dense_on_cards(opened, places, STORED) is not None:
        return card_layers(opened.model, STORED, formats)
    on_cpu = parts.kernels is not None and all(place.type == "cpu" for place in places)
    return list(keepable(opened.model, formats)) if on_cpu else []


def _places(decision: Decision) -> list[torch.device]:
    return [device.torch_device for device in decision.devices] or [decision.dense]


def _read_rest(
    opened: OpenedCheckpoint,
    plan: LoadingPlan,
    decision: Decision,
    parts: LoadingParts,
    reader: TensorReader,
    kept: list[str],
    files: FilesInPlace | None,
) -> None:
    """Everything but the experts; where cards hold it quantised, it comes by way of RAM."""
    layers, model, places = decision.layers, opened.model, _places(decision)
    precision = dense_on_cards(opened, places, decision.precision) if decision.devices else None
    if decision.in_place and precision is not None:
        on_cards = MatricesOnCards(opened, reader)
        load_rest(model, plan, reader, {"": torch.device("cpu")}, on_cards.names & plan.renamed.keys())
        quantise_on_cards(model, precision, lambda name: places[layers.of(name)], None, on_cards)
        on_cards.bind_embeddings(model, lambda name: places[layers.of(f"{name}.")])
        _move_rest(model, decision, places)
        return
    stored = StoredLinears(opened, reader) if decision.precision == STORED else None
    apart = stored.read_apart(kept) if stored is not None else set()
    dense = parts.kept_dense
    apart |= dense.apart if dense is not None else set()
    if files is not None:
        apart |= matrices_in_place(opened).keys() & plan.renamed.keys()
    if precision is None:
        load_rest(model, plan, reader, layers.device_map(places), apart)
        if dense is not None and parts.kernels is not None:
            dense.take_place(model)
            keep_linears(model, dense, parts.kernels)
        if files is not None and parts.kernels is not None:
            files.bind_matrices(model, parts.kernels, reader)
        if kept and stored is not None and parts.kernels is not None:
            keep_linears(model, dense.keeping(stored) if dense is not None else stored, parts.kernels)
        return
    load_rest(model, plan, reader, {"": torch.device("cpu")}, apart)
    quantise_on_cards(model, precision, lambda name: places[layers.of(name)], parts.kernels, stored)
    _move_rest(model, decision, places)


def _move_rest(model: Any, decision: Decision, places: list[torch.device]) -> None:
    """What is still in RAM goes to its card."""
    for name, module in model.named_modules():
        place = places[decision.layers.of(f"{name}.")]
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None and tensor.device != place:
                    _move(own, key, place)


def _move(own: Any, key: str, place: torch.device) -> None:
    """A parameter stays the one that it is, for others may share it."""
    if isinstance(own[key], torch.nn.Parameter):
        own[key].data = own[key].data.to(place)
    else:
        own[key] = own[key].to(place)


def _without(plan: LoadingPlan, names: set[str]) -> LoadingPlan:
    """The plan without the experts modules of these names."""
    left = {name: parts for name, parts in plan.index.modules.items() if name not in names}
    return replace(plan, index=ExpertIndex(left))


class _TwoParts:
    """Progress of preparing and then of reading the rest, as one."""

    def __init__(self, on_progress: OnProgress, rest: int) -> None:
        self._on_progress = on_progress
        self._rest = rest
        self._prepared = 0

    def first(self, done: int, total: int) -> None:
        self._prepared = total
        self._on_progress(done, total + self._rest)

    def second(self, done: int, total: int) -> None:
        self._on_progress(self._prepared + done, self._prepared + total)


def open_disk_backed(
    source: BankSource,
    names: set[str],
    placed: InRam,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> DiskBackedBank:
    """Prepares the bank of the experts on disk unless it is there, and opens it with slots in RAM over it.

    Args:
        names: of the experts modules that are read from disk.
        placed: how much RAM their slots have.

    Raises:
        EngineError, RequestCancelled: as `prepare_bank`.
    """
    source = source.only(names)
    path = source.bank
    prepared = prepare_bank(source, path, on_progress=on_progress, cancelled=cancelled)

    def repair(layer: int, expert: int) -> None:
        # Read again: of the model as it was opened, the weights have been filled in since.
        again = BankSource.open(source.directory, source.precision, source.kernels, guesses=source.guesses)
        rebuild_record(again.only(names), path, layer, expert)

    return _slots_over(DiskTier(path, source.header(), repair=repair), placed, prepared.reason)


def _slots_over(disk: DiskTier, placed: InRam, made_again: str | None = None) -> DiskBackedBank:
    try:
        budget = min(placed.slots, disk.header.records_nbytes)
        pressure = RamPressure(budget)
        ram = RamTier(disk, budget, at_least=placed.at_least, policy=_POLICY, pressure=pressure)
        return DiskBackedBank(disk, ram, made_again)
    except BaseException:
        disk.close()
        raise


def disk_note(bank: DiskBackedBank) -> str:
    """One sentence for the user, with the figures."""
    total = bank.disk.header.records_nbytes
    note = (
        f"Experts are read from disk as they are needed, which is slower: there is RAM for {rounded_down(bank.nbytes)} "
        f"of their {rounded_up(total)}."
    )
    return " ".join([note, *bank.notes])
