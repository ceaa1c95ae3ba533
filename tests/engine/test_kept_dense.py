"""Linear layers and embeddings that were made once are read the next time, and compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.library import bank_path, banks_of
from engine.common.config import EngineConfig
from engine.experts.bank_header import BankHeader
from engine.kernels.native import linear
from engine.kernels.native.library import load_kernels
from engine.runtime.load import kept_dense, kept_experts, kept_records
from engine.runtime.load.model import load_model
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="no native kernels here")


@pytest.fixture(params=["mixtral", "deepseek_v3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of which everything is worth keeping."""
    for module in (kept_dense, kept_experts):
        monkeypatch.setattr(module, "WORTH_KEEPING", 0)
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 0)
    monkeypatch.setattr(linear, "SMALLEST", 256)
    return tiny_checkpoint(request.param, tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each matrix that was quantised."""
    found: list[int] = []
    own = kept_dense.quantise_into

    def quantise_into(weight: torch.Tensor, *args: object) -> None:
        found.append(weight.numel())
        own(weight, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_dense, "quantise_into", quantise_into)
    return found


def _logits(folder: Path, precision: str) -> tuple[torch.Tensor, str, tuple[Path, ...]]:
    loaded = load_model(
        EngineConfig(str(folder), device="cpu", precision=precision),
        on_progress=lambda _done, _total: None,
        cancelled=lambda: False,
    )
    try:
        with torch.inference_mode():
            ids = torch.tensor([[5, 3, 9, 2, 7]])
            return loaded.model(ids).logits.clone(), loaded.info.device_note, loaded.prepared
    finally:
        loaded.close()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_second_start_computes_the_same_and_quantises_nothing(folder: Path, made: list[int], precision: str) -> None:
    first, note, for_next = _logits(folder, precision)
    assert made
    files = {bank_path(folder, precision), bank_path(folder, f"{precision}-dense")}
    assert set(banks_of(folder)) == set(for_next) == files
    count = len(made)
    second, same_note, for_next = _logits(folder, precision)
    assert len(made) == count
    assert set(for_next) == files
    assert same_note == note
    assert torch.equal(first, second)


def test_made_again_with_a_notice(folder: Path, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(BankHeader, "layout_version", 1)
        older.setattr(BankHeader.__init__, "__defaults__", (1,))
        first, _, _ = _logits(folder, "int8")
    count = len(made)
    again, note, _ = _logits(folder, "int8")
    assert len(made) == 2 * count
    assert "The other weights were prepared again because its records have the layout of another version" in note
    path = bank_path(folder, "int8-dense")
    content = bytearray(path.read_bytes())
    content[-4096] ^= 1
    path.write_bytes(content)
    last, note, _ = _logits(folder, "int8")
    assert len(made) == 3 * count
    assert "prepared again because a part of it was damaged" in note
    assert torch.equal(first, again)
    assert torch.equal(first, last)


def test_a_full_disk_keeps_nothing_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 2**60)
    _, note, for_next = _logits(folder, "int8")
    assert for_next == ()
    assert "The converted other weights are not kept for the next start: they need" in note
    assert banks_of(folder) == []
