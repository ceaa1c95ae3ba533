"""`models export --to gguf`: what is written is read back as the same model, and answers alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.checkpoint.gguf.export import Quantisation
from engine.cli import main
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.load.gguf_export import export_gguf
from engine.runtime.load.model import load_model
from tests.engine.test_family_parity import greedy, logits
from tests.engine.tiny_families import tiny_checkpoint


def _answers(path: Path) -> tuple[torch.Tensor, list[int], list[int]]:
    loaded = load_model(
        EngineConfig(str(path), device="cpu", precision="fp32"),
        on_progress=lambda _done, _total: None,
        cancelled=lambda: False,
    )
    try:
        with torch.no_grad():
            ids = loaded.tokenizer.encode("Hello wörld, it's 12345!\n", add_special_tokens=False)
            return logits(loaded.model), greedy(loaded.model)[0].tolist(), list(ids)
    finally:
        loaded.close()


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "olmoe", "qwen3", "qwen2_moe"])
def test_a_file_that_was_written_is_the_same_model(family: str, tmp_path: Path) -> None:
    options = {"use_sliding_window": False} if family.startswith("qwen") else {}
    if family in ("qwen3_moe",):
        options["norm_topk_prob"] = True
    checkpoint = tiny_checkpoint(family, tmp_path / "model", **options)
    file = export_gguf(checkpoint, tmp_path, Quantisation.BF16, lambda _done, _total: None)
    assert file == tmp_path / "model-BF16.gguf"
    wanted, found = _answers(checkpoint), _answers(file)
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=2e-2)  # its weights are rounded to bf16
    assert found[2] == wanted[2]


def test_what_llama_cpp_does_not_have_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint("mixtral", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "longcat_flash"}))
    assert main(["models", "export", str(checkpoint), str(tmp_path), "--to", "gguf"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert "cannot be written as llama.cpp has it" in said[-1]
    assert not list(tmp_path.glob("*.gguf"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(EngineError, match="is there already") as caught:
        export_gguf(checkpoint, tmp_path / "a.gguf", Quantisation.BF16, lambda _done, _total: None)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert (tmp_path / "a.gguf").read_text() == "mine"
    shutil.rmtree(checkpoint)
