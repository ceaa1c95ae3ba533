"""Whether a model's experts all come into RAM, or are read from a prepared bank on disk as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.checkpoint.bank_location import bank_path
from engine.experts.disk_backed import DiskBackedBank, can_be_disk_backed
from engine.experts.disk_tier import DiskTier
from engine.experts.ram_pressure import RamPressure
from engine.experts.ram_tier import RamTier
from engine.experts.sites import ExpertsSite
from engine.experts.slot_group import ADAPTIVE, fewest_slots
from engine.runtime.bank_source import BankSource
from engine.runtime.memory import gigabytes, require_ram, usable_ram
from engine.runtime.prepare_bank import prepare_bank, rebuild_record

_POLICY = ADAPTIVE
_KEPT_FREE = 10
"""One part in so many of the RAM that is free is left for what is not known yet, where the user set no budget."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Where the experts modules of a model get their records from.

    Attributes:
        resident: all their records are held, in RAM or on the graphics card.
        on_disk: their records come into slots in RAM from disk.
        slot_bytes: for these slots.
        at_least: experts of one layer that there is a slot for.
    """

    resident: list[ExpertsSite]
    on_disk: list[ExpertsSite]
    slot_bytes: int = 0
    at_least: int = 1


def place_experts(
    name: str, sites: list[ExpertsSite], dense: int, working: int, experts_per_token: int, budget: int | None
) -> ExpertPlacement:
    """Decides for experts that are computed on the CPU.

    Args:
        name: the model's, for messages.
        dense: bytes of RAM for everything but the experts.
        working: bytes needed while experts are brought into RAM.
        budget: bytes of RAM that the user allows, if any.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`, with the least that would do.
    """
    needed = dense + sum(site.nbytes for site in sites) + working
    usable = usable_ram(budget)
    on_disk = [site for site in sites if can_be_disk_backed(site)]
    if needed <= usable or not on_disk:
        require_ram(name, needed, budget)
        return ExpertPlacement(sites, [])
    resident = [site for site in sites if not can_be_disk_backed(site)]
    fixed = dense + (sum(site.nbytes for site in resident) + working if resident else 0)
    at_least = max(experts_per_token, 1)
    fewest = fewest_slots(((site.layout, site.num_experts) for site in on_disk), at_least)
    least = sum(count * layout.nbytes for layout, count in fewest.items())
    require_ram(name, fixed + least, budget, even=" even with its experts read from disk")
    spare = usable // _KEPT_FREE if budget is None else 0
    return ExpertPlacement(resident, on_disk, max(least, usable - fixed - spare), at_least)


def open_disk_backed(
    source: BankSource,
    placement: ExpertPlacement,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> DiskBackedBank:
    """Prepares the bank of the experts on disk unless it is there, and opens it with slots in RAM over it.

    Raises:
        EngineError, RequestCancelled: as `prepare_bank`.
    """
    names = {site.name for site in placement.on_disk}
    source = source.only(names)
    directory, precision, kernels = source.directory, source.precision, source.kernels
    path = bank_path(directory, precision)
    prepared = prepare_bank(source, path, on_progress=on_progress, cancelled=cancelled)

    def repair(layer: int, expert: int) -> None:
        # Read anew: of the model as it was opened, the weights have been filled in since.
        rebuild_record(BankSource.open(directory, precision, kernels).only(names), path, layer, expert)

    disk = DiskTier(path, source.header(), repair=repair)
    try:
        budget = min(placement.slot_bytes, disk.header.records_nbytes)
        ram = RamTier(disk, budget, at_least=placement.at_least, policy=_POLICY, pressure=RamPressure(budget))
        return DiskBackedBank(disk, ram, prepared.reason)
    except BaseException:
        disk.close()
        raise


def disk_note(bank: DiskBackedBank) -> str:
    """One sentence for the user, with the figures."""
    total = bank.disk.header.records_nbytes
    note = (
        f"Experts are read from disk as they are needed, which is slower: there is RAM for {gigabytes(bank.nbytes)} "
        f"of their {gigabytes(total)}."
    )
    return " ".join([note, *bank.notes])
