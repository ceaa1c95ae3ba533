"""Experts that were converted once are read from disk the next time; nothing that goes wrong there stops a model."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.library import bank_path, banks_of
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.bank_header import BankHeader
from engine.experts.bank_writer import BankWriter, preparing
from engine.runtime.load import fill_bank, kept_experts, kept_records
from engine.runtime.load.model import load_model
from tests.engine.tiny_families import tiny_checkpoint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model whose converted experts are worth keeping."""
    monkeypatch.setattr(kept_experts, "WORTH_KEEPING", 0)
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 0)
    return tiny_checkpoint("mixtral", tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of layers that were quantised."""
    names: list[str] = []
    own = fill_bank.quantise_layer

    def quantise_layer(plain: Any, target: Any, kernels: Any = None) -> None:
        names.append(target.name)
        own(plain, target, kernels)

    monkeypatch.setattr(fill_bank, "quantise_layer", quantise_layer)
    return names


def _load(
    folder: Path,
    precision: str = "int4",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, bytes], str]:
    """The records of all layers, and what is said about the model."""
    loaded = load_model(EngineConfig(str(folder), precision=precision), on_progress=on_progress, cancelled=cancelled)
    try:
        assert loaded.bank is not None
        records = {name: layer.records.numpy().tobytes() for name, layer in loaded.bank.layers.items()}
        return records, loaded.info.device_note
    finally:
        loaded.close()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_second_start_converts_nothing(folder: Path, quantised: list[str], precision: str) -> None:
    steps: list[tuple[int, int]] = []
    first, note = _load(folder, precision, lambda done, total: steps.append((done, total)))
    assert len(quantised) == len(first) > 1
    assert banks_of(folder) == [bank_path(folder, precision)]
    second, same_note = _load(folder, precision, lambda done, total: steps.append((done, total)))
    assert len(quantised) == len(first)
    assert second == first
    assert same_note == note
    assert all(0 <= done <= total for done, total in steps)
    assert steps[-1][0] == steps[-1][1] > 0


def test_what_need_not_be_converted_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _load(folder, "bf16")
    assert banks_of(folder) == []
    monkeypatch.setenv(kept_records.KEEP_VARIABLE, "0")
    _load(folder)
    assert banks_of(folder) == []
    monkeypatch.setenv(kept_records.KEEP_VARIABLE, "1")
    monkeypatch.setattr(kept_experts, "WORTH_KEEPING", 2**40)
    _load(folder)
    assert banks_of(folder) == []


def test_a_model_that_changed_is_converted_again_with_a_notice(folder: Path, quantised: list[str]) -> None:
    first, _ = _load(folder)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    second, note = _load(folder)
    assert len(quantised) == 2 * len(first)
    assert "prepared again because the model that it was made from has changed" in note
    assert second == first
    assert "prepared again" not in _load(folder)[1]


def test_a_bank_of_another_version_is_made_again_with_a_notice(
    folder: Path, quantised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(BankHeader, "layout_version", 1)
        older.setattr(BankHeader.__init__, "__defaults__", (1,))
        first, _ = _load(folder)
    second, note = _load(folder)
    assert len(quantised) == 2 * len(first)
    assert "because its records have the layout of another version" in note
    assert second == first


@pytest.mark.parametrize("damage", ["a record", "the table", "cut short", "not a bank", "empty"])
def test_a_damaged_bank_is_made_again_with_a_notice(folder: Path, quantised: list[str], damage: str) -> None:
    first, _ = _load(folder)
    bank = bank_path(folder, "int4")
    content = bytearray(bank.read_bytes())
    if damage == "a record":
        content[-4000] ^= 1
        content[-4096] ^= 1
    elif damage == "the table":
        content[4096] ^= 1
    elif damage == "not a bank":
        content[:8] = b"whatever"
    else:
        del content[len(content) // 2 if damage == "cut short" else 0 :]
    bank.write_bytes(content)
    second, note = _load(folder)
    assert second == first
    assert "prepared again because" in note
    assert len(quantised) == 2 * len(first)
    assert _load(folder)[0] == first
    assert len(quantised) == 2 * len(first)


def test_a_full_disk_keeps_nothing_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 2**60)
    first, note = _load(folder)
    assert "not kept for the next start: they need" in note
    assert banks_of(folder) == []
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(BankWriter, "finish", full)
        assert "not kept for the next start: No space left" in _load(folder)[1]
    assert banks_of(folder) == []

    def stopped(*_: object) -> None:
        raise EngineError(ErrorCode.DISK_FULL, "The disk is full.")

    with monkeypatch.context() as broken:
        broken.setattr(BankWriter, "write_layer", stopped)
        second, note = _load(folder)
    assert "not kept for the next start: The disk is full." in note
    assert banks_of(folder) == []
    assert second == first


def test_a_start_that_is_stopped_leaves_no_bank_that_would_be_used(folder: Path, quantised: list[str]) -> None:
    with pytest.raises(RequestCancelled):
        _load(folder, cancelled=lambda: len(quantised) > 1)
    assert not bank_path(folder, "int4").exists()
    before = len(quantised)
    first, note = _load(folder)
    assert len(quantised) - before == len(first)
    assert "prepared again" not in note
    assert _load(folder)[0] == first
    assert len(quantised) - before == len(first)


def test_while_another_process_keeps_them_they_are_only_converted(folder: Path, quantised: list[str]) -> None:
    path = bank_path(folder, "int4")
    path.parent.mkdir(parents=True)
    with preparing(path, lambda: None):
        records, note = _load(folder)
    assert len(quantised) == len(records)
    assert "not kept" not in note
    assert not path.exists()
