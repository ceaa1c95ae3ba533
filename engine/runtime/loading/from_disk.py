"""Experts that do not fit into RAM: read from a prepared bank on disk as they are needed."""

from __future__ import annotations

from collections.abc import Callable

from engine.checkpoint.bank_location import bank_path
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.cache.tier import ADAPTIVE
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.disk_tier import DiskTier
from engine.experts.ram_pressure import RamPressure
from engine.experts.ram_tier import RamTier
from engine.planner.placement import InRam
from engine.runtime.bank_source import BankSource
from engine.runtime.prepare_bank import prepare_bank, rebuild_record

_POLICY = ADAPTIVE


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
    directory, precision, kernels = source.directory, source.precision, source.kernels
    path = bank_path(directory, precision)
    prepared = prepare_bank(source, path, on_progress=on_progress, cancelled=cancelled)

    def repair(layer: int, expert: int) -> None:
        # Read again: of the model as it was opened, the weights have been filled in since.
        rebuild_record(BankSource.open(directory, precision, kernels).only(names), path, layer, expert)

    disk = DiskTier(path, source.header(), repair=repair)
    try:
        budget = min(placed.slots, disk.header.records_nbytes)
        pressure = RamPressure(budget)
        ram = RamTier(disk, budget, at_least=placed.at_least, policy=_POLICY, pressure=pressure)
        return DiskBackedBank(disk, ram, prepared.reason)
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
