"""The encoder-decoder families: what transformers says of the same files, without experts in the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.experts.dispatch import BANK_LAYER
from engine.runtime.schedule.alone import Alone
from tests.engine.loaded_tiny import NO_END
from tests.engine.test_family_parity import (
    NEW_TOKENS,
    PROMPT,
    assert_buffers_equal,
    assert_is_out_of_the_module,
    loaded,
)
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

ANSWER = torch.tensor([[2, 17, 230, 5, 91, 64, 128, 7]])
PER_TOKEN = {"switch_transformers": 1, "nllb-moe": 2}
PUBLISHED = {
    "switch_transformers": "encoder.block.1.layer.1.mlp.experts.expert_11.wi.weight",
    "nllb-moe": "model.decoder.layers.1.ffn.experts.expert_11.fc2.bias",
}
"""A name that the checkpoints of the family have on the hub; that there are more than ten experts tests their order."""


@pytest.mark.parametrize("family", PER_TOKEN)
@pytest.mark.parametrize(
    ("save", "tied"), [({}, True), ({}, False), ({"max_shard_size": "20KB"}, False)], ids=["tied", "untied", "sharded"]
)
def test_logits_and_greedy_tokens_equal_the_librarys(
    family: str, save: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    tiny_checkpoint(family, tmp_path, save=save, tie_word_embeddings=tied)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == bool(save)
    assert any(PUBLISHED[family] in load_file(file) for file in files)
    library_class = model_class(tiny_config(family))
    with loaded(tmp_path, "fp32") as ours, torch.no_grad():
        reference = library_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
        assert_is_out_of_the_module(ours, moe=True)
        assert not [name for name, _ in ours.model.named_parameters() if "expert" in name]
        assert ours.info.parameters == sum(parameter.numel() for parameter in reference.parameters())
        assert (ours.info.experts, ours.info.experts_per_token, ours.info.layers) == (12, PER_TOKEN[family], 4)
        torch.testing.assert_close(logits(ours.model), logits(reference), rtol=0, atol=1e-5)
        session = Alone(ours)
        result = session.generate_from_ids(PROMPT[0].tolist(), SamplingParams(max_tokens=NEW_TOKENS), end_ids=NO_END)
        assert list(result.token_ids) == library_tokens(reference)
        assert session.kv_bytes > 0
    with loaded(tmp_path, "bf16") as ours, torch.no_grad():
        reference = library_class.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert_buffers_equal(ours.model, reference)
        torch.testing.assert_close(logits(ours.model).float(), logits(reference).float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("family", PER_TOKEN)
def test_without_its_experts_a_model_says_so(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    with loaded(tmp_path, "fp32") as ours, torch.no_grad():
        assert ours.bank is not None
        delattr(ours.model.get_submodule(next(iter(ours.bank.layers))), BANK_LAYER)
        with pytest.raises(EngineError) as raised:
            logits(ours.model)
        assert raised.value.code == ErrorCode.INTERNAL


@pytest.mark.parametrize("family", PER_TOKEN)
def test_every_experts_module_takes_part(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path)
    with loaded(tmp_path, "fp32") as ours, torch.no_grad():
        assert ours.bank is not None
        before = logits(ours.model)
        for layer in ours.bank.layers.values():
            kept = layer.records.clone()
            layer.records.zero_()
            assert (logits(ours.model) - before).abs().max() > 1e-4, layer.name
            layer.records.copy_(kept)


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=PROMPT, decoder_input_ids=ANSWER).logits
    return result


def library_tokens(model: Any) -> list[int]:
    answer = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
    )
    return [int(index) for index in answer[0, 1:]]
