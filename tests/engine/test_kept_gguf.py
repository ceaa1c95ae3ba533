"""What was made of a file that is quantised already is read the next time, and computes the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.checkpoint.library import bank_path, banks_of, remove_banks, show
from engine.common.config import EngineConfig
from engine.experts.bank_header import BankHeader
from engine.formats import STORED
from engine.kernels.native.library import load_kernels
from engine.runtime.load import kept_dense, kept_experts, kept_records, repacking
from engine.runtime.load.model import load_model
from tests.engine.test_stored_precision import SIZES, type_of
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def without_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that make tiles of blocks."""
    monkeypatch.setenv("SWITCHYARD_ISA", "PORTABLE")


@pytest.fixture(params=[False, True], ids=["head", "tied"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small file of which everything is worth keeping."""
    for module in (kept_dense, kept_experts):
        monkeypatch.setattr(module, "WORTH_KEEPING", 0)
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 0)
    folder = tiny_checkpoint(
        "qwen3_moe",
        tmp_path / "checkpoint",
        use_sliding_window=False,
        norm_topk_prob=True,
        tie_word_embeddings=request.param,
        **SIZES,
    )
    return write_model(folder, tmp_path / "model.gguf", "qwen3moe", quantised=type_of)


@pytest.fixture
def repacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each time that matrices were made of blocks."""
    found: list[int] = []
    own = repacking.repack

    def repack(jobs: list[object], *args: object) -> None:
        found.append(len(jobs))
        own(jobs, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(repacking, "repack", repack)
    return found


def _logits(file: Path, precision: str = "auto") -> tuple[torch.Tensor, str, tuple[Path, ...]]:
    loaded = load_model(
        EngineConfig(str(file), device="cpu", precision=precision),
        on_progress=lambda _done, _total: None,
        cancelled=lambda: False,
    )
    try:
        assert loaded.info.precision == STORED
        with torch.inference_mode():
            ids = torch.tensor([[5, 3, 9, 2, 7]])
            return loaded.model(ids).logits.clone(), loaded.info.device_note, loaded.prepared
    finally:
        loaded.close()


def test_a_second_start_computes_the_same_and_repacks_nothing(
    file: Path, repacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as nothing:
        nothing.setenv(kept_records.KEEP_VARIABLE, "0")
        plain, plain_note, _ = _logits(file)
    assert banks_of(file) == []
    first, note, for_next = _logits(file)
    files = {bank_path(file, STORED), bank_path(file, f"{STORED}-dense")}
    assert set(banks_of(file)) == set(for_next) == files
    count = len(repacked)
    second, same_note, for_next = _logits(file)
    assert len(repacked) == count
    assert set(for_next) == files
    assert plain_note == note == same_note
    assert torch.equal(plain, first)
    assert torch.equal(plain, second)
    assert show(str(file)).bank_bytes == sum(each.stat().st_size for each in files)
    remove_banks(banks_of(file))
    third, _, _ = _logits(file)
    assert len(repacked) > count
    assert torch.equal(plain, third)


def test_a_file_that_changed_is_repacked_again_with_a_notice(file: Path, repacked: list[int]) -> None:
    first, _, _ = _logits(file)
    count = len(repacked)
    os.utime(file, ns=(1, 1))
    second, note, _ = _logits(file)
    assert len(repacked) == 2 * count
    assert "The experts were prepared again because the model that it was made from has changed" in note
    assert "The other weights were prepared again" in note
    third, note, _ = _logits(file)
    assert len(repacked) == 2 * count
    assert "prepared again" not in note
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_of_another_version_damaged_or_on_a_full_disk(
    file: Path, repacked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(BankHeader, "layout_version", 1)
        older.setattr(BankHeader.__init__, "__defaults__", (1,))
        first, _, _ = _logits(file)
    count = len(repacked)
    second, note, _ = _logits(file)
    assert len(repacked) == 2 * count
    assert "prepared again because its records have the layout of another version" in note
    for path in banks_of(file):
        content = bytearray(path.read_bytes())
        content[-4096] ^= 1
        path.write_bytes(content)
    third, note, _ = _logits(file)
    assert "prepared again because a part of it was damaged" in note
    remove_banks(banks_of(file))
    monkeypatch.setattr(kept_records, "_LEFT_FREE", 2**60)
    last, note, _ = _logits(file)
    assert "The converted experts are not kept for the next start: they need" in note
    assert banks_of(file) == []
    assert all(torch.equal(first, each) for each in (second, third, last))


_KILLED = """
import os, signal, sys
from engine.common.config import EngineConfig
from engine.experts.bank_writer import BankWriter
from engine.runtime.load import kept_dense, kept_experts, kept_records
from engine.runtime.load.model import load_model

kept_dense.WORTH_KEEPING = kept_experts.WORTH_KEEPING = kept_records._LEFT_FREE = 0
own, before = BankWriter.write_layer, []

def write_layer(self, *args):
    if "-dense" not in str(self.path) and before:
        os.kill(os.getpid(), signal.SIGKILL)
    before.append(args[0])
    own(self, *args)

BankWriter.write_layer = write_layer
config = EngineConfig(sys.argv[1], device="cpu")
load_model(config, on_progress=lambda *_: None, cancelled=lambda: False)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_killed_in_the_middle_of_keeping(file: Path, repacked: list[int], tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # what it leaves there goes with the test
    done = subprocess.run([sys.executable, "-c", _KILLED, str(file)], env=environment, check=False, timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert not bank_path(file, STORED).exists()
    first, note, _ = _logits(file)
    assert "prepared again" not in note
    assert set(banks_of(file)) == {bank_path(file, STORED), bank_path(file, f"{STORED}-dense")}
    count = len(repacked)
    second, _, read = _logits(file)
    assert len(read) == 2
    assert len(repacked) == count
    assert torch.equal(first, second)
