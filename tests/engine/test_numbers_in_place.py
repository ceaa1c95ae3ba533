"""Safetensors in the numbers that a model computes with are used where they lie: no parameter is a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.headers import read_header
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.load import weights
from engine.runtime.load.model import load_model
from tests.engine.test_family_parity import greedy, logits
from tests.engine.tiny_families import tiny_checkpoint


def _load(folder: Path, precision: str) -> tuple[torch.Tensor, list[int], tuple[Path, ...], int]:
    """Logits, tokens, the files that were held as a whole, and the number of places from which parameters lie as in the
    file."""
    loaded = load_model(
        EngineConfig(str(folder), device="cpu", precision=precision),
        on_progress=lambda done, total: _told.append((done, total)),
        cancelled=lambda: False,
    )
    try:
        with torch.no_grad():
            own, entries = dict(loaded.model.named_parameters()), read_header(folder / "model.safetensors")
            places = {own[name].data_ptr() - entry.offset for name, entry in entries.items() if name in own}
            return logits(loaded.model), greedy(loaded.model)[0].tolist(), loaded.prepared, len(places)
    finally:
        loaded.close()


_told: list[tuple[int, int]] = []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dense_model(family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(family, tmp_path / family, dtype=dtype)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)  # of a file so small, the header is much
    _told.clear()
    found, tokens, files, places = _load(folder, precision)
    assert files == (folder / "model.safetensors",)
    assert _told[-1][0] == _told[-1][1] > 0
    assert all(done <= total for done, total in _told)
    monkeypatch.setattr(weights, "_MOSTLY", 2.0)
    wanted, same_tokens, files, copies = _load(folder, precision)
    assert files == ()
    assert places == 1 < copies
    assert torch.equal(found, wanted)
    assert tokens == same_tokens


def test_of_other_numbers_files_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.float32)
    monkeypatch.setattr(weights, "_MOSTLY", 0.5)
    assert _load(folder, "bf16")[2] == ()


def test_a_file_that_is_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.bfloat16)
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"model\.safetensors") as caught:
        _load(folder, "bf16")
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
