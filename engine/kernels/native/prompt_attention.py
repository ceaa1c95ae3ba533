"""Attention of a prompt's many tokens in one native call."""

from __future__ import annotations

import ctypes

import torch

from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import out_of_memory

FEWEST_TOKENS = 16
"""Fewer tokens do not fill the blocks of queries that the kernel multiplies at once."""

_NO_RANGE = 2


class PromptStruct(ctypes.Structure):
    """`SwitchyardPrompt`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_token", "query_head", "key_head", "value_token", "value_head")),
        ("sees", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sees_token", "tokens", "held")),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        ("scale", ctypes.c_float),
    )


def is_faster(kernels: NativeKernels) -> bool:
    """Whether these kernels beat torch's operators at a prompt's attention."""
    return kernels.isa is not Isa.PORTABLE


def attend_prompt(
    kernels: NativeKernels,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sees: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """[T, heads, value_dim] bf16, contiguous; `None` if a token sees nothing, or no single range of keys.

    Shares are rounded to bf16 before they are multiplied with values.

    Args:
        queries: bf16 [heads, T, key_dim] of the last T tokens.
        keys, values: bf16 [kv_heads, held, key_dim] and [kv_heads, held, value_dim].
        scale: of scores; positive.
        sees: bool [T, held], whether a token sees a key; `None`: all before it, and itself.

    Raises:
        EngineError: `NOT_ENOUGH_MEMORY`.
    """
    queries, values = _with_whole_heads(queries), _with_whole_heads(values)
    if keys.stride(2) != 1 or keys.stride(1) != keys.shape[2]:
        keys = keys.contiguous()
    if sees is not None and sees.stride(1) != 1:
        sees = sees.contiguous()
    heads, tokens, key_dim = queries.shape
    struct = PromptStruct(
        *(tensor.data_ptr() for tensor in (queries, keys, values)),
        *(queries.stride(1), queries.stride(0), keys.stride(0), values.stride(1), values.stride(0)),
        sees.data_ptr() if sees is not None else None,
        sees.stride(0) if sees is not None else 0,
        *(tokens, keys.shape[1], heads, keys.shape[0], key_dim, values.shape[2]),
        scale,
    )
    out = queries.new_empty(tokens, heads, values.shape[2])
    failed = kernels.prompt_attention(kernels.pool, ctypes.addressof(struct), out.data_ptr())
    if failed == _NO_RANGE:
        return None
    if failed:
        raise out_of_memory()
    return out


def _with_whole_heads(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(2) == 1 else states.contiguous()
