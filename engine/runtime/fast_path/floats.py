"""Hidden states and rotary angles in float32 where the library computes a layer, without a file for each family.

A sum that grows from layer to layer loses more in bf16 than anything else does.  A layer adds what attention and an MLP
give to its input, so its sums are in float32 if the embedding's rows are and the norms give what matrices take.  The
model then makes its angles in float32, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from engine.families import fast_path_of
from engine.families.library import code_of
from engine.kernels.gpu.rotations import forward_with
from engine.kernels.native.linear import BlockEmbedding
from engine.runtime.fast_path.norms import LayerNorms, has_experts_beside, mixer_of

_ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
"""The functions in the library's files that rotate queries and keys by cosines and sines.  DeepSeek-V2's takes complex
numbers, and computes in float32 by itself; gpt-oss' has this name, too."""


def keep_in_floats(model: Any, layers: Sequence[Any], *, all_native: bool) -> None:
    """Lets a model in bf16 on the CPU keep hidden states in float32.

    Args:
        layers: those of the common kind; the norms of the others stay what they are.
        all_native: whether native steps compute all of them; else the embedding gives what it gave.
    """
    kinds = {type(LayerNorms.of(layer).before_attention) for layer in layers}
    for norm in model.modules():
        weight = getattr(norm, "weight", None) if type(norm) in kinds else None
        if weight is not None and weight.dtype == torch.bfloat16 and "forward" not in norm.__dict__:
            norm.forward = _NormOfSums(norm)
    for layer in filter(has_experts_beside, layers):  # a router with a norm that has no weight
        layer.router.proj.register_forward_pre_hook(lambda proj, inputs: (inputs[0].to(proj.weight.dtype),))
    path = fast_path_of(model, "model")
    if not all_native or path is None or path.streams is not None:
        return  # something else may read the embedding's rows; layers widen what they are given
    attentions = [
        part for part in map(mixer_of, layers) if (own := fast_path_of(part, "attention")) and own.angles != "none"
    ]
    rotating = [_rotating_in_floats(attention) for attention in attentions]
    if not all(rotating):
        return  # keys would be in float32 as well
    for attention, forward in zip(attentions, rotating, strict=True):
        attention.forward = forward
    table = getattr(model.model, path.embedding)
    rows = table.__dict__.get("forward")
    if isinstance(rows, BlockEmbedding):
        rows.dtype = torch.float32
    else:
        table.forward = _FloatRows(table)


class _NormOfSums:
    """The `forward` of a norm: rounded once, to the type of its weight."""

    def __init__(self, norm: Any) -> None:
        self._in_library, self._weight = norm.forward, norm.weight

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._in_library(hidden_states.float())
        return normed.to(self._weight.dtype)


class _FloatRows:
    """The `forward` of an embedding."""

    def __init__(self, table: Any) -> None:
        self._in_library = table.forward

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._in_library(ids)
        return rows.float()


def _rotating_in_floats(attention: Any) -> Any:
    """Its `forward`, with queries and keys rounded only once they are rotated; `None` if it rotates in another way."""
    code = code_of(attention)
    if code is None or "forward" in attention.__dict__:
        return None
    names = {name: code.__globals__.get(name) for name in _ROTATIONS if name in code.__code__.co_names}
    if not names and "apply_rotary_emb" in code.__code__.co_names:
        return attention.forward
    if not names or not all(callable(rotate) for rotate in names.values()):
        return None
    return forward_with(attention, {name: _in_floats(rotate) for name, rotate in names.items()})


def _in_floats(rotate: Any) -> Any:
    if "k" not in inspect.signature(rotate).parameters:
        return lambda x, *angles, **options: rotate(x.float(), *angles, **options).to(x.dtype)

    def rotated(q: torch.Tensor, k: torch.Tensor, *angles: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        turned_q, turned_k = rotate(q.float(), k.float(), *angles, **options)
        return turned_q.to(q.dtype), turned_k.to(k.dtype)

    return rotated
