"""Prompts attend by the native kernels: torch's operators compute bf16 attention in fp32 on many processors."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import FEWEST_TOKENS, attend_prompt, is_faster

_REPLACED = "sdpa"
"""The name stays: some families of the library look at it, and leave a mask out under any other."""
_OTHERS = ("position_bias", "cache", "softcap")
"""Options by which the library's own function computes something else; it ignores all that are not its parameters."""


def speed_up_prompts(model: Any, kernels: NativeKernels) -> int:
    """Lets attention modules on the CPU use the kernels for prompts; returns their number."""
    if not is_faster(kernels):
        return 0
    modules = [module for module in model.modules() if hasattr(module, "config")]
    for module in modules:
        module.__dict__["prompt_kernels"] = kernels
    return len(modules)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    kernels: NativeKernels | None = module.__dict__.get("prompt_kernels")
    if kernels is not None and dropout == 0 and _is_plain(module, query, key, value, attention_mask, options):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sees = None if attention_mask is None else attention_mask[0, 0]
        out = attend_prompt(kernels, query[0], key[0], value[0], scale, sees) if scale > 0 else None
        if out is not None:
            return out[None], None
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _is_plain(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> bool:
    """Whether the kernels may compute it: one sequence in bf16 on the CPU, each token seeing a range of keys."""
    tokens, held = query.shape[2], key.shape[2]
    if (
        tokens < FEWEST_TOKENS
        or query.shape[0] != 1
        or {each.dtype for each in (query, key, value)} != {torch.bfloat16}
    ):
        return False
    if (
        query.device.type != "cpu"
        or key.device.type != "cpu"
        or query.shape[1] % key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        return False
    if any(options.get(name) is not None for name in _OTHERS):
        return False
    if mask is not None:
        return mask.dtype == torch.bool and mask.shape == (1, 1, tokens, held)
    causal = options.get("is_causal")
    return tokens == held and bool(getattr(module, "is_causal", True) if causal is None else causal)


ALL_ATTENTION_FUNCTIONS.register(_REPLACED, _attention)
