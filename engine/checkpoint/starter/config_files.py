"""`config.json` and `generation_config.json` of the checkpoints derived from the parent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.starter.recipe import Recipe


def mixtral_config(recipe: Recipe, experts_per_token: int, dtype: str) -> dict[str, Any]:
    """Configuration of `MixtralForCausalLM`."""
    return _shared(recipe, dtype) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": recipe.model.expert_neurons,
        "num_local_experts": recipe.model.experts,
        "num_experts_per_tok": experts_per_token,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "sliding_window": None,
    }


def llama_config(recipe: Recipe, dtype: str) -> dict[str, Any]:
    """Configuration of the dense parent, `LlamaForCausalLM`."""
    return _shared(recipe, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": recipe.model.neurons,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_configs(folder: Path, config: dict[str, Any], recipe: Recipe) -> None:
    """Write both files into `folder`."""
    generation = {
        "bos_token_id": recipe.model.bos_token_id,
        "eos_token_id": recipe.model.eos_token_id,
        "pad_token_id": recipe.model.pad_token_id,
        **recipe.generation,
    }
    for name, document in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _shared(recipe: Recipe, dtype: str) -> dict[str, Any]:
    model = recipe.model
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "initializer_range": 0.02,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
