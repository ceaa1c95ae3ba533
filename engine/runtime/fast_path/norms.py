"""The norms of a decoder layer, wherever its family has them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from engine.families import family_at, fast_path_of
from engine.families.library import code_of, forward_with, own_forward, take_over
from engine.kernels.native.linear import BlockEmbedding


class LayerNorms(NamedTuple):
    """Those before attention and the MLP of a layer of a known kind, and those of what both add or `None`."""

    before_attention: Any
    before_mlp: Any
    after_attention: Any
    after_mlp: Any
    has_streams: bool = False
    """Whether the layer has several streams of hidden states: its norms may be in 32 bits."""

    @classmethod
    def of(cls, layer: Any) -> LayerNorms:
        """Those of `layer`."""
        path = fast_path_of(layer, "layer")
        assert path is not None
        before = [getattr(layer, name) for name in path.norms]
        after = [getattr(layer, name) for name in path.after_norms] if path.after_norms else [None, None]
        return cls(before[0], before[1], after[0], after[1], path.streams is not None)


def epsilon_of(norm: Any) -> float:
    """What is added to the mean of squares."""
    epsilon: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return epsilon


def offset_of(norm: Any) -> float:
    """What is added to the weight."""
    path = family_at(type(norm).__module__).fast_path
    return path.norm_offset if path is not None else 0.0


def multiple_of(layer: Any) -> float:
    """What attention and the MLP of a layer of a known kind add is multiplied by it."""
    path = fast_path_of(layer, "layer")
    return float(layer.residual_multiplier) if path is not None and path.has_multiples else 1.0


def has_experts_beside(layer: Any) -> bool:
    """Whether a layer of a known kind has a router and experts of its own beside its MLP."""
    path = fast_path_of(layer, "layer")
    return path is not None and path.experts_beside and bool(layer.enable_moe_block)


def mlp_of(layer: Any) -> tuple[Any, Any]:
    """The sparse block or dense MLP of a layer of a known kind, and what every token goes to besides; `None` for what
    it has not."""
    path = fast_path_of(layer, "layer")
    assert path is not None
    if path.of_one_part and _is_mixer(layer.mixer):
        return None, None
    return getattr(layer, path.mlp, None), getattr(layer, path.shared, None) if path.shared else None


def mixer_of(layer: Any) -> Any:
    """The attention of a layer, or what it has in place of it, if there is any under the name of its family's."""
    path = fast_path_of(layer, "layer")
    mixer = getattr(layer, path.mixer, None) if path is not None else None
    return None if path is not None and path.of_one_part and not _is_mixer(mixer) else mixer


def _is_mixer(part: Any) -> bool:
    return fast_path_of(part, "attention") is not None or fast_path_of(part, "delta") is not None


def add_mlp(layer: Any, norms: LayerNorms, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states after attention -> those after the layer, computed by the library's modules."""
    parts = [part for part in mlp_of(layer) if part is not None]
    if not parts:
        return hidden
    normed = norms.before_mlp(hidden)
    found = [part(normed) for part in parts]
    own, *others = (result[0] if isinstance(result, tuple) else result for result in found)
    for other in others:
        own = own + other
    if has_experts_beside(layer):
        flat = hidden.flatten(0, -2)
        _, shares, chosen = layer.router(flat)
        routed = layer.experts(layer.pre_feedforward_layernorm_2(flat), chosen, shares).view_as(own)
        own = layer.post_feedforward_layernorm_1(own) + layer.post_feedforward_layernorm_2(routed)
    own = own if norms.after_mlp is None else norms.after_mlp(own)
    out = torch.add(hidden, own, alpha=multiple_of(layer))
    return out if (scalar := getattr(layer, "layer_scalar", None)) is None else out * scalar


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
        if weight is not None and weight.dtype == torch.bfloat16 and own_forward(norm) is None:
            take_over([(norm, _NormOfSums(norm))])
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
    take_over(zip(attentions, rotating, strict=True))
    table = getattr(model.model, path.embedding)
    rows = own_forward(table)
    if isinstance(rows, BlockEmbedding):
        rows.dtype = torch.float32
    else:
        take_over([(table, _FloatRows(table))])


class _NormOfSums:
    """The `forward` of a norm: rounded once, to the type of its weight."""

    def __init__(self, norm: Any) -> None:
        self.in_library, self._weight = norm.forward, norm.weight

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.in_library(hidden_states.float())
        return normed.to(self._weight.dtype)


class _FloatRows:
    """The `forward` of an embedding."""

    def __init__(self, table: Any) -> None:
        self.in_library = table.forward

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.in_library(ids)
        return rows.float()


def _rotating_in_floats(attention: Any) -> Any:
    """Its `forward`, with queries and keys rounded only once they are rotated; `None` if it rotates in another way."""
    code = code_of(attention)
    if code is None or own_forward(attention) is not None:
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
