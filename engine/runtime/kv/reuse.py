"""Which contexts are computed alike however they are divided, and where angles depend on how long they are."""

from __future__ import annotations

import sys
from typing import Any

from engine.families import family_of
from engine.runtime.kv.library_attention import window_of_cache_alone

BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose angles depend on how long the context of a forward is, and not on the position alone."""


def rotary_embeddings(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "original_max_seq_len")]


def rope_kinds(rotary: Any) -> list[str]:
    """Of a module, one for each type of layer that it distinguishes.

    As the module has it: HunYuan's `dynamic` is one whose angles are fixed.
    """
    kinds = rotary.rope_type
    return [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def kinds_by_length(model: Any) -> set[str]:
    return {kind for rotary in rotary_embeddings(model) for kind in rope_kinds(rotary)} & set(BY_LENGTH)


def restart_angles(model: Any) -> None:
    """Dynamic angles are again those of a short context.

    The library keeps those of the longest context that there was, so that an answer would depend on earlier ones.
    """
    for rotary in rotary_embeddings(model):
        by_layer = isinstance(rotary.rope_type, dict)
        for name, kind in rotary.rope_type.items() if by_layer else [("", rotary.rope_type)]:
            prefix = f"{name}_" if by_layer else ""
            cached = f"{prefix}max_seq_len_cached"
            if kind != "dynamic" or getattr(rotary, cached, 0) == rotary.original_max_seq_len:
                continue
            original, now = getattr(rotary, f"{prefix}original_inv_freq"), getattr(rotary, f"{prefix}inv_freq")
            rotary.register_buffer(f"{prefix}inv_freq", original.to(now.device), persistent=False)
            setattr(rotary, cached, rotary.original_max_seq_len)


_FEW_INDEX_HEADS = 16
"""An index scores a token by a sum over its heads, of which each is 0 for every other token: where all are, tokens tie.
With 64 heads, as in DeepSeek-V3.2, that does not happen; with 16 it does once in 65,000."""


def exact_tokens(model: Any) -> int:
    """The longest context within which an answer does not depend on which of its tokens are computed together.

    Beyond it the library's answer is that of a prompt computed at once, followed by single tokens:

    - the family has a limit of its own (Doge's experts mix the routing of all tokens of a forward);
    - a dynamic rotary embedding, and LongRoPE of most families, turns the tokens of a forward by the length of the
      context then, and those before keep their angles;
    - where the library's cache slides by a window that its masks do not have, a prompt sees all that comes before it;
    - an index of the most important tokens that has few heads finds many of them equally important, and which of these
      are taken depends on how many there are.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [window_of_cache_alone(model)]
    family = family_of(config.model_type)
    own = family.exact_tokens(config.to_dict()) if family.exact_tokens is not None else None
    if own is not None:
        limits.append(own)
    if any(kind == "dynamic" for rotary in rotary_embeddings(model) for kind in rope_kinds(rotary)):
        limits.append(int(config.max_position_embeddings))
    long_rope = _long_rope_length(model)
    if long_rope is not None and not family.rotates_again:
        limits.append(long_rope)
    heads = getattr(config, "index_n_heads", None) or getattr(config, "indexer_n_heads", None)
    chosen = getattr(config, "index_topk", None) or getattr(config, "indexer_budget", None)
    if heads and chosen and heads <= _FEW_INDEX_HEADS:
        limits.append(int(chosen))
    return min(limits)


def long_rope_boundary(model: Any) -> int | None:
    """The context length beyond which LongRoPE rotates every position differently; `None` without LongRoPE.

    Keys cached on one side of it are of no use on the other (LongRoPE, Ding et al. 2024; transformers switches by the
    longest position of a forward).  `None` too for families whose earlier tokens keep their angles.
    """
    config = model.config.get_text_config(decoder=True)
    return _long_rope_length(model) if family_of(config.model_type).rotates_again else None


def together_tokens(model: Any) -> int:
    """The longest context that may be computed together with others, whose lengths would change its angles beyond."""
    if not kinds_by_length(model):
        return sys.maxsize
    return min(exact_tokens(model), long_rope_boundary(model) or sys.maxsize)


def _long_rope_length(model: Any) -> int | None:
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = [
        variant.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for variant in variants
        if variant.get("rope_type") == "longrope"
    ]
    known = [int(length) for length in lengths if length]
    return min(known) if known else None
