"""The first two tokens a model ever computes here: proof that it runs, and the true cost of a token of context."""

from __future__ import annotations

from typing import Any

import torch


def kv_bytes_per_token(model: Any, device: torch.device) -> int:
    """Bytes by which the model's own cache grows from one token of context to two.

    Measured rather than derived, so that latent attention, shared KV and layers without any come out right.
    """
    token = torch.tensor([[_harmless_token(model)]], device=device)
    inputs: dict[str, Any] = {"input_ids": token, "use_cache": True}
    if model.config.is_encoder_decoder:  # some encoders refuse to be asked for a cache: theirs runs beforehand
        source = model.get_encoder()(input_ids=token, return_dict=True)
        inputs = {"encoder_outputs": source, "decoder_input_ids": token, "use_cache": True}
    first = model(**inputs)
    cache = getattr(first, "past_key_values", None)
    if cache is None:
        return 0
    before = _cache_bytes(cache)
    second = model(**inputs, past_key_values=cache)
    return max(0, _cache_bytes(second.past_key_values) - before)


def _harmless_token(model: Any) -> int:
    text = model.config.get_text_config()
    for name in ("bos_token_id", "eos_token_id"):
        value = getattr(text, name, None)
        if isinstance(value, int) and 0 <= value < text.vocab_size:
            return value
    return 0


def _cache_bytes(cache: Any) -> int:
    """Bytes of the decoder's cache; what it keeps of the encoder does not grow with the answer."""
    total = 0
    for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
        tensors = {id(value): value for value in vars(layer).values() if isinstance(value, torch.Tensor)}
        total += sum(tensor.nbytes for tensor in tensors.values())
    return total
