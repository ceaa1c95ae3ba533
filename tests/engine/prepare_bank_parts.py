"""Banks made of tiny checkpoints, and what they must hold."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.bench.disk import load_prepared
from engine.experts.bank import ExpertBank
from engine.experts.disk_tier import DiskTier
from engine.runtime.load.fill_bank import fill_bank
from engine.runtime.load.library_models import quiet_library
from engine.runtime.load.prepare_bank import BankSource, PreparedBank, prepare_bank
from engine.runtime.load.tensor_reader import TensorReader

CPU = torch.device("cpu")


def nothing(done: int, total: int) -> None:
    pass


def prepare(source: BankSource, path: Path, **options: object) -> PreparedBank:
    return prepare_bank(source, path, **{"on_progress": nothing, "cancelled": lambda: False, **options})  # type: ignore[arg-type]


def in_ram(source: BankSource) -> ExpertBank:
    bank = ExpertBank(CPU)
    with torch.no_grad(), quiet_library(), TensorReader(nothing, lambda: False, 1) as reader:
        fill_bank(source.model, source.sites, source.plan, reader, bank)
    return bank


def assert_holds(path: Path, source: BankSource) -> None:
    """The file has the same bytes as the bank in RAM, part by part, and zeros between."""
    expected, loaded = in_ram(source), ExpertBank(CPU)
    with DiskTier(path, source.header(), readers=2) as disk:
        load_prepared(disk, loaded, nothing)
    assert list(loaded.layers) == list(expected.layers) == [site.name for site in source.sites]
    for name, layer in expected.layers.items():
        for part in layer.layout.parts:
            ours = loaded.layers[name].stacked[part.name].contiguous().view(torch.uint8)
            assert torch.equal(ours, layer.stacked[part.name].contiguous().view(torch.uint8)), (name, part.name)
        used = torch.zeros(layer.layout.nbytes, dtype=torch.bool)
        for part in layer.layout.parts:
            used[part.offset : part.offset + part.nbytes] = True
        assert not loaded.layers[name].records[:, ~used].any()
