"""The norms of a decoder layer, wherever its family has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from engine.families import family_at, fast_path_of


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
