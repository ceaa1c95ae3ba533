"""The shapes of published Mixture-of-Experts models: their configuration, and the tensors of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Role(Enum):
    """The role of a tensor, which determines how it is filled."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    ROUTER = "router"
    RESIDUAL = "residual"  # writes to the residual stream
    ONES = "ones"
    ZEROS = "zeros"
    FINAL_NORM = "final norm"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint; `fan_in`: inputs per output."""

    name: str
    shape: tuple[int, ...]
    role: Role = Role.MATRIX
    fan_in: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of one model.  `family` is transformers' `model_type`; `source`: origin of the dimensions."""

    family: str
    source: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    dense_intermediate: int = 0

    def changed(self, **options: int) -> Shape:
        """The same with other `layers`, `vocab` or `experts`."""
        return replace(self, **options)  # type: ignore[arg-type]


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", "Qwen/Qwen3-30B-A3B", 48, 2048, 768, 128, 8, 32, 4, 128, 151936, 40960, 1e6, 6144
    ),
    "olmoe-1b-7b": Shape("olmoe", "allenai/OLMoE-1B-7B-0924", 16, 2048, 1024, 64, 8, 16, 16, 128, 50304, 4096, 1e4),
    "mixtral-8x7b": Shape(
        "mixtral", "mistralai/Mixtral-8x7B-v0.1", 32, 4096, 14336, 8, 2, 32, 8, 128, 32000, 32768, 1e6
    ),
    "gpt-oss-20b": Shape("gpt_oss", "openai/gpt-oss-20b", 24, 2880, 2880, 32, 4, 64, 8, 64, 201088, 131072, 1.5e5),
    "deepseek-v2-lite": Shape(
        "deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite", 27, 2048, 1408, 64, 6, 16, 16, 192, 102400, 32768, 1e4, 10944
    ),
    "mixtral-eighth": Shape("mixtral", "", 8, 512, 1792, 8, 2, 8, 2, 64, 4096, 32768, 1e6),
    "qwen3-moe-small": Shape("qwen3_moe", "", 8, 512, 256, 128, 8, 8, 2, 64, 8192, 40960, 1e6, 1024),
    "qwen3-moe-tiny": Shape("qwen3_moe", "", 2, 64, 32, 16, 4, 4, 2, 16, 512, 4096, 1e6, 128),
}
"""Of Mixtral with an eighth of its width each matrix has a 64th of the weights; the last two are like Qwen3-30B-A3B,
reduced for quick runs and tests."""


def config_of(shape: Shape) -> dict[str, Any]:
    """The content of `config.json`."""
    common: dict[str, Any] = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return common | _FAMILIES[shape.family].config(shape)


def tensors_of(shape: Shape) -> Iterator[list[TensorSpec]]:
    """The tensors of each file of the checkpoint: embedding, one file per layer, head."""
    hidden = shape.hidden
    yield [TensorSpec("model.embed_tokens.weight", (shape.vocab, hidden), Role.EMBEDDING)]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        norms = [
            TensorSpec(f"{prefix}{name}.weight", (hidden,), Role.ONES)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        yield [*norms, *_FAMILIES[shape.family].layer(shape, prefix, layer)]
    yield [
        TensorSpec("model.norm.weight", (hidden,), Role.FINAL_NORM),
        TensorSpec("lm_head.weight", (shape.vocab, hidden), Role.MATRIX, hidden),
    ]


@dataclass(frozen=True, slots=True)
class _Family:
    """A family's part of the configuration, and its tensors of layer i except the two norms."""

    config: Callable[[Shape], dict[str, Any]]
    layer: Callable[[Shape, str, int], Iterator[TensorSpec]]


def _linear(name: str, outputs: int, inputs: int, role: Role = Role.MATRIX) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (outputs, inputs), role, inputs)


def _attention(shape: Shape, prefix: str) -> Iterator[TensorSpec]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _linear(f"{prefix}self_attn.q_proj", queries, shape.hidden)
    yield _linear(f"{prefix}self_attn.k_proj", keys, shape.hidden)
    yield _linear(f"{prefix}self_attn.v_proj", keys, shape.hidden)
    yield _linear(f"{prefix}self_attn.o_proj", shape.hidden, queries, Role.RESIDUAL)


def _mlp(prefix: str, hidden: int, intermediate: int, names: tuple[str, str, str]) -> Iterator[TensorSpec]:
    gate, up, down = names
    yield _linear(f"{prefix}{gate}", intermediate, hidden)
    yield _linear(f"{prefix}{up}", intermediate, hidden)
    yield _linear(f"{prefix}{down}", hidden, intermediate, Role.RESIDUAL)


_USUAL = ("gate_proj", "up_proj", "down_proj")


def _experts(shape: Shape, block: str, names: tuple[str, str, str] = _USUAL) -> Iterator[TensorSpec]:
    yield _linear(f"{block}.gate", shape.experts, shape.hidden, Role.ROUTER)
    for expert in range(shape.experts):
        yield from _mlp(f"{block}.experts.{expert}.", shape.hidden, shape.intermediate, names)


def _qwen3_config(shape: Shape) -> dict[str, Any]:
    return {
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.dense_intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    for name in ("q_norm", "k_norm"):
        yield TensorSpec(f"{prefix}self_attn.{name}.weight", (shape.head_dim,), Role.ONES)
    yield from _experts(shape, f"{prefix}mlp")


def _olmoe_config(shape: Shape) -> dict[str, Any]:
    return {"num_experts": shape.experts, "intermediate_size": shape.intermediate, "norm_topk_prob": False}


def _olmoe_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    for name, heads in (("q_norm", shape.heads), ("k_norm", shape.kv_heads)):
        yield TensorSpec(f"{prefix}self_attn.{name}.weight", (heads * shape.head_dim,), Role.ONES)
    yield from _experts(shape, f"{prefix}mlp")


def _mixtral_config(shape: Shape) -> dict[str, Any]:
    return {"num_local_experts": shape.experts, "intermediate_size": shape.intermediate, "sliding_window": None}


def _mixtral_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    yield from _attention(shape, prefix)
    yield from _experts(shape, f"{prefix}block_sparse_moe", ("w1", "w3", "w2"))


def _gpt_oss_config(shape: Shape) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": shape.rope_theta, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return {
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts,
        "intermediate_size": shape.intermediate,
        "sliding_window": 128,
        "layer_types": [("full_attention" if i % 2 else "sliding_attention") for i in range(shape.layers)],
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_parameters": {**rope, "truncate": False, "original_max_position_embeddings": 4096},
    }


def _gpt_oss_layer(shape: Shape, prefix: str, _layer: int) -> Iterator[TensorSpec]:
    for spec in _attention(shape, prefix):
        yield spec
        yield TensorSpec(spec.name.removesuffix("weight") + "bias", spec.shape[:1], Role.ZEROS)
    yield TensorSpec(f"{prefix}self_attn.sinks", (shape.heads,), Role.ZEROS)
    experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
    yield _linear(f"{prefix}mlp.router", experts, hidden, Role.ROUTER)
    yield TensorSpec(f"{prefix}mlp.router.bias", (experts,), Role.ZEROS)
    # Inputs first, gate and up interleaved, all experts in one tensor: as in the family's bf16 files.
    fused = f"{prefix}mlp.experts."
    yield TensorSpec(f"{fused}gate_up_proj", (experts, hidden, 2 * inner), Role.MATRIX, hidden)
    yield TensorSpec(f"{fused}gate_up_proj_bias", (experts, 2 * inner), Role.ZEROS)
    yield TensorSpec(f"{fused}down_proj", (experts, inner, hidden), Role.RESIDUAL, inner)
    yield TensorSpec(f"{fused}down_proj_bias", (experts, hidden), Role.ZEROS)


_LATENT, _NOPE, _ROPE, _VALUE, _SHARED = 512, 128, 64, 128, 2


def _deepseek_config(shape: Shape) -> dict[str, Any]:
    return {
        "n_routed_experts": shape.experts,
        "n_shared_experts": _SHARED,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": shape.dense_intermediate,
        "first_k_dense_replace": 1,
        "kv_lora_rank": _LATENT,
        "q_lora_rank": None,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "v_head_dim": _VALUE,
        "head_dim": _ROPE,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }


def _deepseek_layer(shape: Shape, prefix: str, layer: int) -> Iterator[TensorSpec]:
    attention, hidden = f"{prefix}self_attn.", shape.hidden
    yield _linear(f"{attention}q_proj", shape.heads * (_NOPE + _ROPE), hidden)
    yield _linear(f"{attention}kv_a_proj_with_mqa", _LATENT + _ROPE, hidden)
    yield TensorSpec(f"{attention}kv_a_layernorm.weight", (_LATENT,), Role.ONES)
    yield _linear(f"{attention}kv_b_proj", shape.heads * (_NOPE + _VALUE), _LATENT)
    yield _linear(f"{attention}o_proj", hidden, shape.heads * _VALUE, Role.RESIDUAL)
    if layer == 0:  # the family's first layer is dense
        yield from _mlp(f"{prefix}mlp.", hidden, shape.dense_intermediate, _USUAL)
        return
    yield from _mlp(f"{prefix}mlp.shared_experts.", hidden, _SHARED * shape.intermediate, _USUAL)
    yield from _experts(shape, f"{prefix}mlp")


_FAMILIES = {
    "qwen3_moe": _Family(_qwen3_config, _qwen3_layer),
    "olmoe": _Family(_olmoe_config, _olmoe_layer),
    "mixtral": _Family(_mixtral_config, _mixtral_layer),
    "gpt_oss": _Family(_gpt_oss_config, _gpt_oss_layer),
    "deepseek_v2": _Family(_deepseek_config, _deepseek_layer),
}
