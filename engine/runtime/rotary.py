"""The rotary embeddings of a model: what kinds there are, and those whose angles follow the length of the context."""

from __future__ import annotations

from typing import Any

BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose angles depend on how long the context of a forward is, and not on the position alone."""


def rotary_embeddings(model: Any) -> list[Any]:
    """The modules of a model that make angles of positions."""
    return [module for module in model.modules() if hasattr(module, "original_max_seq_len")]


def rope_kinds(rotary: Any) -> list[str]:
    """Of a module, one for each type of layer that it distinguishes.

    As the module has it: HunYuan's `dynamic` is one whose angles are fixed.
    """
    kinds = rotary.rope_type
    return [str(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])]


def kinds_by_length(model: Any) -> set[str]:
    """Those of `BY_LENGTH` that a model has."""
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
