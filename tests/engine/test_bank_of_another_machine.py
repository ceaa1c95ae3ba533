"""A data folder that was copied from another machine: its banks are used where they fit, else made again with a notice.

Another machine is another processor (the other end of the kernels' instruction sets, or none), another place of the
model, another version of a library.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.checkpoint.library import bank_path, banks_dir, banks_of
from engine.common.config import EngineConfig
from engine.experts import bank_file
from engine.kernels.native import linear
from engine.kernels.native.library import Isa, usable_isas
from engine.runtime.load import fill_bank, kept_dense, kept_experts, kept_records, prepare_bank
from engine.runtime.load.model import load_model
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no native kernels here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model, all of which is worth keeping."""
    for module in (kept_experts, kept_dense):
        monkeypatch.setattr(module, "WORTH_KEEPING", 0)
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 0)
    monkeypatch.setattr(linear, "SMALLEST", 256)
    return tiny_checkpoint("mixtral", tmp_path / "model", dtype=torch.bfloat16)


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each thing that was converted."""
    found: list[str] = []

    def counted(own: Callable[..., None]) -> Callable[..., None]:
        def count_and_convert(*args: object) -> None:
            found.append(own.__name__)
            own(*args)

        return count_and_convert

    monkeypatch.setattr(fill_bank, "quantise_layer", counted(fill_bank.quantise_layer))
    monkeypatch.setattr(kept_dense, "quantise_into", counted(kept_dense.quantise_into))
    return found


def _answer(folder: Path, precision: str = "int4") -> tuple[torch.Tensor, str]:
    """Logits, and what is said about the model."""
    loaded = load_model(
        EngineConfig(str(folder), device="cpu", precision=precision),
        on_progress=lambda _done, _total: None,
        cancelled=lambda: False,
    )
    try:
        with torch.inference_mode():
            return loaded.model(torch.arange(3, 11)[None]).logits.clone(), loaded.info.device_note
    finally:
        loaded.close()


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("here_is_newer", [True, False])
def test_a_bank_of_another_processor_is_used_as_it_is(
    folder: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch, precision: str, here_is_newer: bool
) -> None:
    isas = usable_isas()
    oldest, newest = Isa(min(isas)).name, Isa(max(isas)).name
    there, here = (oldest, newest) if here_is_newer else (newest, oldest)
    monkeypatch.setenv("SWITCHYARD_ISA", there)
    _answer(folder, precision)
    banks = {bank: bank.read_bytes() for bank in banks_of(folder)}
    assert len(banks) == 2
    assert converted
    monkeypatch.setenv("SWITCHYARD_ISA", here)
    converted.clear()
    with_their_banks, note = _answer(folder, precision)
    assert not converted
    assert "again" not in note
    for bank in banks:
        bank.unlink()
    with_own_banks, _ = _answer(folder, precision)
    assert converted
    torch.testing.assert_close(with_their_banks, with_own_banks)
    assert {bank: bank.read_bytes() for bank in banks_of(folder)} == banks


def test_where_there_are_no_kernels_the_experts_of_a_bank_are_used(
    folder: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = _answer(folder)
    converted.clear()
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    here, note = _answer(folder)
    assert "quantise_layer" not in converted
    assert "prepared again" not in note
    assert (here - there).abs().max() < 0.05 * there.abs().max()


def test_a_bank_follows_its_model_to_another_place(folder: Path, converted: list[str]) -> None:
    first, _ = _answer(folder)
    before = {bank.name for bank in banks_of(folder)}
    elsewhere = folder.parent / "elsewhere" / "model"
    elsewhere.parent.mkdir()
    folder.rename(elsewhere)
    converted.clear()
    second, note = _answer(elsewhere)
    assert not converted
    assert "again" not in note
    assert torch.equal(first, second)
    assert set(banks_dir().glob("*.bank")) == {bank_path(elsewhere, "int4"), bank_path(elsewhere, "int4-dense")}
    assert not before & {bank.name for bank in banks_of(elsewhere)}


def test_a_model_of_which_only_the_contents_came_along_is_prepared_again(folder: Path, converted: list[str]) -> None:
    """Copied without its files' times: nothing tells it from another model of the same shape."""
    first, _ = _answer(folder)
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))
    converted.clear()
    second, note = _answer(folder)
    assert converted
    assert "The experts were prepared again because the model that it was made from has changed." in note
    assert torch.equal(first, second)
    assert len(list(banks_dir().glob("*.bank"))) == 2


def test_banks_of_other_models_are_left_alone(folder: Path, tmp_path: Path) -> None:
    _answer(folder)
    before = {bank: bank.read_bytes() for bank in banks_of(folder)}
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for file in other.iterdir():
        os.utime(file, ns=(1, 1))
    _answer(other)
    assert {bank: bank.read_bytes() for bank in banks_of(folder)} == before
    assert len(banks_of(other)) == 2


@pytest.mark.parametrize("what", ["library", "checksum"])
def test_a_bank_of_another_version_is_made_again_and_why_is_said(
    folder: Path, converted: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as there:
        if what == "library":
            there.setattr(prepare_bank, "_CONVERTER", "transformers 4.99")
        first, _ = _answer(folder)
    if what == "checksum":
        checksums = {name: own for name, own in bank_file.CHECKSUMS.items() if name != kept_dense.BEST_CHECKSUM}
        if not checksums:
            pytest.skip("there is one kind of checksum here")
        monkeypatch.setattr(bank_file, "CHECKSUMS", checksums)
        monkeypatch.setattr("engine.experts.bank_writer.CHECKSUMS", checksums)
        monkeypatch.setattr(kept_dense, "BEST_CHECKSUM", next(iter(checksums)))
        monkeypatch.setattr(prepare_bank, "BEST_CHECKSUM", next(iter(checksums)))
    converted.clear()
    second, note = _answer(folder)
    assert converted
    reason = {
        "library": "it was made with transformers 4.99, and here is transformers",
        "checksum": "its checksums (xxh3_64) cannot be computed here",
    }[what]
    assert f"The experts were prepared again because {reason}" in note
    assert f"The other weights were prepared again because {reason}" in note
    assert torch.equal(first, second)
    converted.clear()
    _answer(folder)
    assert not converted
