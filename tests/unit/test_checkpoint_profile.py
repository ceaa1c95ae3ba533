from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.headers import read_header
from engine.checkpoint.profile import kv_of_model, read_profile, stretched_context
from engine.runtime.load.library_conversion import PartSources
from tests.unit.checkpoint_files import header_of, write_config, write_safetensors

MIXTRAL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def expert_tensors(prefix: str) -> dict[str, tuple[str, list[int]]]:
    return {
        f"{prefix}.experts.{expert}.{part}.weight": ("BF16", [8, 4]) for expert in (0, 1) for part in ("w1", "w2", "w3")
    }


def test_moe_profile(tmp_path: Path) -> None:
    write_config(tmp_path, **MIXTRAL)
    tensors = {
        "model.embed_tokens.weight": ("BF16", [10, 8]),
        **expert_tensors("model.layers.0.block_sparse_moe"),
        "model.layers.0.shared_experts.up.weight": ("BF16", [8, 4]),
    }
    write_safetensors(tmp_path / "model.safetensors", header_of(tensors))
    profile = read_profile(tmp_path)
    assert (profile.family, profile.layers, profile.hidden) == ("mixtral", 1, 8)
    assert (profile.experts, profile.experts_per_token, profile.context_tokens) == (2, 1, 64)
    assert profile.expert_parameters == 6 * 32
    assert profile.expert_bytes == 2 * 6 * 32
    assert profile.parameters == 80 + 7 * 32
    assert profile.bytes == 2 * profile.parameters
    assert profile.kv.numbers == 2 * 4
    assert (profile.dtype, profile.quantization) == ("bfloat16", "")


def test_numbers_inside_a_multimodal_config(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="qwen3_vl_moe", text_config=MIXTRAL)
    write_safetensors(tmp_path / "model.safetensors", header_of({"a": ("F32", [2])}))
    profile = read_profile(tmp_path)
    assert (profile.family, profile.experts, profile.layers) == ("qwen3_vl_moe", 2, 1)


def test_quantised_parameters_are_counted_unpacked(tmp_path: Path) -> None:
    write_config(tmp_path, **MIXTRAL, quantization_config={"quant_method": "mxfp4"})
    tensors = {
        "model.layers.0.mlp.experts.down_proj_blocks": ("U8", [2, 8, 1, 16]),
        "model.layers.0.mlp.experts.down_proj_scales": ("U8", [2, 8, 1]),
        "model.layers.0.self_attn.q_proj.weight": ("F8_E4M3", [8, 8]),
        "model.layers.0.self_attn.q_proj.weight_scale_inv": ("F32", [1, 1]),
    }
    write_safetensors(tmp_path / "model.safetensors", header_of(tensors))
    profile = read_profile(tmp_path)
    assert profile.quantization == "mxfp4"
    assert profile.expert_parameters == 2 * 8 * 32
    assert profile.parameters == 2 * 8 * 32 + 64


def test_kv_of_latent_attention_and_of_linear_layers() -> None:
    latent = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    assert kv_of_model(latent).numbers == 3 * (16 + 4)
    hybrid = {**MIXTRAL, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    assert kv_of_model(hybrid).numbers == 2 * 4


def test_sources_of_an_expert(tmp_path: Path) -> None:
    tensors = {**expert_tensors("x"), "stack": ("BF16", [2, 8, 4])}
    entries = read_header(write_safetensors(tmp_path / "m.safetensors", header_of(tensors)))
    each = PartSources("t", 2, None, {"w1": [entries["x.experts.0.w1.weight"], entries["x.experts.1.w1.weight"]]})
    assert each.is_apart
    assert not each.is_fused
    assert each.of_expert(1) == {"w1": entries["x.experts.1.w1.weight"]}
    stack = PartSources("t", 2, None, {"stack": [entries["stack"]]})
    assert stack.is_fused
    row = stack.of_expert(1)["stack"]
    assert (row.shape, row.offset - entries["stack"].offset, row.nbytes) == ((1, 8, 4), 64, 64)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, 100),
        ({"rope_parameters": None}, 100),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 400),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4}}, 100),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, 100),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}}, 320),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 400),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}}, 100),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 800}}, 100),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1]}, "original_max_position_embeddings": 10}, 100),
        ({"rope_scaling": {"type": "longrope", "factor": 32}, "original_max_position_embeddings": 10}, 320),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 80}}, 100),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 100),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": "4"}}, 100),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            320,
        ),
    ],
)
def test_a_context_is_as_long_as_the_rotary_embedding_stretches_it(config: dict[str, object], tokens: int) -> None:
    assert stretched_context(config, 100) == tokens
