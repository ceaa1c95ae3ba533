"""The same weights, stored in every way that checkpoints are: sharded, stacked, FP8, MXFP4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.combinations import some
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import compare_with_library, greedy, logits
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config, tiny_model
from tests.engine.tiny_tokenizer import save_tiny_tokenizer

_BLOCK = 8


@pytest.mark.parametrize("family", some(["mixtral", "gpt_oss", "deepseek_v3", "llama"], every=4))
def test_sharded(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(family, tmp_path, save={"max_shard_size": "40KB"})
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare_with_library(tmp_path, model_class(tiny_config(family)), moe=family != "llama")


def test_shards_without_their_index(tmp_path: Path) -> None:
    tiny_checkpoint("mixtral", tmp_path, save={"max_shard_size": "40KB"})
    with opened_model(tmp_path, "fp32") as ours:
        expected = logits(ours.model)
    (tmp_path / "model.safetensors.index.json").unlink()
    with opened_model(tmp_path, "fp32") as ours:
        assert torch.equal(logits(ours.model), expected)


@pytest.mark.parametrize("family", some(["qwen3_moe", "mixtral", "granitemoe", "ernie4_5_moe", "nemotron_h"], every=4))
def test_experts_stacked_as_the_module_has_them(family: str, tmp_path: Path) -> None:
    """Most families are saved with a tensor for each expert; here one holds them all."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, tmp_path / "model.safetensors")
    save_tiny_tokenizer(tmp_path)
    compare_with_library(tmp_path, type(model))


def test_weights_in_half_precision(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, dtype=torch.bfloat16)
    compare_with_library(tmp_path, model_class(tiny_config("qwen3_moe")))


def test_tied_embeddings(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    compare_with_library(tmp_path, model_class(tiny_config("qwen3_moe")))
    with opened_model(tmp_path, "fp32") as ours:
        assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3"])
def test_fp8(family: str, tmp_path: Path) -> None:
    """Blocks of fp8 with `weight_scale_inv`, experts and plain linears alike, against the same numbers unpacked."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    tiny_checkpoint(family, plain)
    tiny_checkpoint(family, packed)
    skipped = ("embed", "norm", "lm_head", "mlp.gate.weight")
    unpacked_tensors, packed_tensors = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in skipped):
            unpacked_tensors[name] = packed_tensors[name] = tensor
            continue
        quantised, scale = _to_fp8(tensor)
        packed_tensors[name], packed_tensors[f"{name}_scale_inv"] = quantised, scale
        unpacked_tensors[name] = _from_fp8(quantised, scale)
    assert any(".experts." in name for name in packed_tensors) == (family != "qwen3")
    save_file(unpacked_tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(packed_tensors, packed / "model.safetensors", {"format": "pt"})
    _set_quantization(
        packed, {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic"}
    )
    _compare_with_plain(packed, plain)


def test_mxfp4(tmp_path: Path) -> None:
    """gpt-oss as it is published: experts in `*_blocks` and `*_scales`, against the same numbers unpacked."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    tiny_checkpoint("gpt_oss", plain, **sizes)
    tiny_checkpoint("gpt_oss", packed, **sizes)
    tensors = load_file(plain / "model.safetensors")
    packed_tensors = dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        del packed_tensors[name]
        packed_tensors[f"{name}_blocks"], packed_tensors[f"{name}_scales"] = blocks, scales
        tensors[name] = _from_mxfp4(blocks, scales).transpose(1, 2).contiguous()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(packed_tensors, packed / "model.safetensors", {"format": "pt"})
    _set_quantization(packed, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    _compare_with_plain(packed, plain)


def _compare_with_plain(packed: Path, plain: Path) -> None:
    with opened_model(packed, "fp32") as ours, torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        torch.testing.assert_close(logits(ours.model), logits(reference), rtol=0, atol=1e-5)
        assert greedy(ours.model, 8).tolist() == greedy(reference, 8).tolist()
    with opened_model(packed, "bf16") as ours, opened_model(plain, "bf16") as same:
        torch.testing.assert_close(logits(ours.model), logits(same.model), rtol=0, atol=2e-3)


def _to_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = tensor.shape
    row_block, column_block = (_BLOCK if size % _BLOCK == 0 else 4 for size in (rows, columns))
    tiles = tensor.reshape(rows // row_block, row_block, columns // column_block, column_block)
    scale = tiles.abs().amax(dim=(1, 3)) / 448
    quantised = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(rows, columns)
    return quantised, scale


def _from_fp8(quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = quantised.shape
    spread = scale.repeat_interleave(rows // scale.shape[0], 0).repeat_interleave(columns // scale.shape[1], 1)
    return quantised.float() * spread


def _from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """OCP Microscaling: e2m1 values, the low nibble first, times 2^(scale - 127) for each 32."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([positive, -positive])
    numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


def _set_quantization(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": values}))
