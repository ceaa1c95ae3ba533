"""Experts in RAM that were converted once are kept in the bank file of `prepare_bank`.

The same bank serves whether its experts fit into RAM or not.
"""

from __future__ import annotations

import os

from engine.experts.bank import ExpertBank
from engine.experts.disk_backed import can_be_disk_backed
from engine.experts.quantised_layout import QuantisedLayout
from engine.kernels.native.library import NativeKernels
from engine.runtime.load.checkpoint import OpenedCheckpoint
from engine.runtime.load.decision import Decision
from engine.runtime.load.kept_records import KEEP_VARIABLE, WORTH_KEEPING, KeptRecords
from engine.runtime.load.prepare_bank import BankSource


def kept_experts(
    opened: OpenedCheckpoint, decision: Decision, bank: ExpertBank | None, kernels: NativeKernels | None
) -> KeptRecords | None:
    """Where the experts of this model are kept that are held in RAM; None if they need not be converted.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a file of the model is gone.
    """
    if decision.in_place or bank is None or bank.device.type != "cpu" or os.environ.get(KEEP_VARIABLE) == "0":
        return None
    sites = [site for site in decision.resident if can_be_disk_backed(site)]
    if sum(site.nbytes for site in sites) < WORTH_KEEPING:
        return None
    source = BankSource(opened.directory, opened.model, sites, opened.plan, decision.precision, kernels, opened.guesses)
    path = source.bank
    keeps = all(isinstance(site.layout, QuantisedLayout) for site in sites)
    if not keeps and not path.exists():
        return None
    return KeptRecords(source.header(), path, "experts", source.require_unchanged, keeps=keeps)
