"""Which type keys and values are held in, and what a token of context takes then."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.gpu.attention_proof import attention_of
from engine.kernels.native.paged_attention import KvType
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.kv.growing import GrowingLayer, GrowingWindowLayer
from engine.runtime.kv.layers import new_cache

_TYPES = {"int8": KvType.INT8, "fp16": KvType.FP16}


def narrow_type(model: Any, kv_precision: str, captures: torch.device | None = None) -> tuple[KvType | None, str]:
    """The type of keys and values that was asked for, if kernels read it in every layer of this model.

    Args:
        captures: where all of it is, if its steps are captured there: a card's kernel may read such keys then.

    Returns:
        `None` for the model's own type, and then a sentence if another one was asked for.
    """
    wanted = _TYPES.get(kv_precision)
    if wanted is None:
        return None, ""
    cache, layers = new_cache(model), decoder_layers(model)
    whole = cache is not None and all(isinstance(held, GrowingLayer | GrowingWindowLayer) for held in cache.layers)
    fast = (layer.__dict__.get("forward") for layer in layers)
    if whole and layers and all(isinstance(path, SingleTokenLayer) and path.reads_narrow for path in fast):
        return wanted, ""
    if whole and captures is not None and attention_of(captures) is not None:
        return wanted, ""
    return None, f"Chats hold keys and values in the model's own type: its attention cannot read {kv_precision} here."


def narrow_token_bytes(model: Any, per_token: int, kv_type: KvType) -> int:
    """Bytes of a token where layers without a window hold it in this type; `per_token`: in the model's own."""
    cache = new_cache(model)
    config = model.config.get_text_config(decoder=True)
    if cache is None:
        return per_token
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow = sum(isinstance(held, GrowingLayer) for held in cache.layers) / max(1, len(cache.layers))
    scale = 4 if kv_type is KvType.INT8 else 0
    ratio: float = (width * kv_type.dtype.itemsize + scale) / (width * model.dtype.itemsize)
    return int(per_token * (1 - narrow + narrow * ratio))
