"""KV cache size per token of context, layer by layer, from a model's configuration alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.families import family_of
from engine.families.family import KvNumbers

LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
HIDDEN = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_heads", "n_head", "decoder_attention_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")
_HEAD_DIM = ("head_dim", "kv_channels", "d_kv")
_NESTED = ("ffn_config", "moe_config", "attn_config")  # dbrx has its experts and heads there
_POSITIONS = 6
"""An indexed layer stores three 64-bit positions per token: six 32-bit numbers."""


def kv_elements_per_token(text: dict[str, Any]) -> int:
    """KV cache elements per token over all layers, as transformers stores them.

    Multi-head latent attention caches latents, the rotary part of the keys, and the keys of the token index if there is
    one. Linear attention and state-space layers have no growing cache. Sliding-window layers count in full: their cache
    grows until the window is full.
    """
    layers = number_of(text, (*DECODER_LAYERS, *LAYERS))
    kinds = _kinds(text, layers)
    kinds = kinds[: len(kinds) - number_of(text, ("num_kv_shared_layers",))]
    growing = [(index, kind) for index, kind in enumerate(kinds) if _grows(kind)] or list(enumerate(kinds))
    by_layer = text.get("per_layer_config")
    of_its_own = by_layer if isinstance(by_layer, dict) else {}
    family = family_of(str(text.get("model_type"))).kv
    count = sum(_of_layer({**text, **(of_its_own.get(str(index)) or {})}, kind, family) for index, kind in growing)
    return count * family.attentions


def number_of(config: dict[str, Any], names: Iterable[str]) -> int:
    """The first positive number under one of these names, at the top level or nested; 0 if there is none."""
    places = [config, *(nested for key in _NESTED if isinstance(nested := config.get(key), dict))]
    for place in places:
        for name in names:
            value = place.get(name)
            if isinstance(value, list) and value:  # one number per layer
                value = max((item for item in value if isinstance(item, int)), default=0)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _kinds(text: dict[str, Any], layers: int) -> list[str]:
    """The type of each layer."""
    types = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(types, list) and types:
        return [str(kind) for kind in types]
    period = number_of(text, ("attn_layer_period",))
    if period:  # state-space layers with an attention layer every `period`
        offset = number_of(text, ("attn_layer_offset",))
        return ["attention" if layer % period == offset else "state" for layer in range(layers)]
    return ["attention"] * layers


def _grows(kind: str) -> bool:
    return ("attention" in kind or kind.startswith("hybrid")) and "linear" not in kind


def _of_layer(text: dict[str, Any], kind: str, family: KvNumbers) -> int:
    latent = number_of(text, ("kv_lora_rank",))
    if latent:
        index = (
            number_of(text, ("index_head_dim",)) if number_of(text, ("index_topk",)) and "sliding" not in kind else 0
        )
        if index and number_of(text, ("index_kpool",)):
            index = 2 * index + 1  # keys, pooling weights, and their sum
        return latent + number_of(text, ("qk_rope_head_dim",)) + index
    heads = number_of(text, _HEADS)
    kv_heads = number_of(text, _KV_HEADS) or heads
    keys = number_of(text, _HEAD_DIM) or (number_of(text, HIDDEN) // heads if heads else 0)
    values = number_of(text, ("v_head_dim",)) or keys
    if family.keys_are_values:
        return keys
    if "sliding" in kind:
        kv_heads = number_of(text, ("swa_num_key_value_heads",)) or kv_heads * family.window_heads
        own = number_of(text, ("swa_head_dim",))
        keys, values = own or keys, own or values
    found = kv_heads * (keys + values)
    if "indexed" in kind:
        index = number_of(text, ("indexer_kv_heads",)) * number_of(text, ("indexer_head_dim",))
        found += index + _POSITIONS
    return found
