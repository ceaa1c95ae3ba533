"""Decoder layers of a model on a card whose residual sums are part of the norms that follow them.

A layer of the common kind has two norms, attention and an MLP, and adds what each of these makes to its input, in some
families (Granite) times a number.  Whether it is one is tried with something simple in the places of attention and MLP.
The sum behind the MLP goes to the norm of the next layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.families.library import own_forward, replaced, take_over
from engine.kernels.gpu.norms import CardNorm, scaled_sum

_log = logging.getLogger(__name__)

_FEW_ROWS = 16
_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm")
_MLPS = ("mlp", "block_sparse_moe")
_MULTIPLIER = "residual_multiplier"


class CardLayer:
    """The `forward` of one decoder layer.

    Args:
        following: norm of what it returns, if any.
    """

    def __init__(self, layer: Any, following: CardNorm | None) -> None:
        self.in_library = layer.forward
        self._layer = layer
        self._middle: CardNorm = layer.post_attention_layernorm.forward
        self._following = following
        self._mlp = mlp_of(layer)
        self._scale = float(getattr(layer, _MULTIPLIER, 1.0))

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the library's layer."""
        if args or not 0 < hidden_states.numel() <= _FEW_ROWS * self._middle.weight.numel():
            return self.in_library(hidden_states, *args, **kwargs)
        layer, scale = self._layer, self._scale
        attended = _own(layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs))
        hidden_states = self._middle.add(hidden_states, attended, scale)
        made = _own(self._mlp(layer.post_attention_layernorm(hidden_states)))
        if self._following is None:
            return scaled_sum(hidden_states, made, scale)
        return self._following.add(hidden_states, made, scale)


def mlp_of(layer: Any) -> Any:
    """The MLP of a layer, or the experts in its place; `None` where there is not one."""
    found = [getattr(layer, name) for name in _MLPS if hasattr(layer, name)]
    return found[0] if len(found) == 1 else None


def _own(result: Any) -> torch.Tensor:
    """Without what some modules return beside it."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def speed_up_layers(layers: Sequence[Any], last_norm: Any) -> int:
    """Gives every layer whose norms are a card's its forward, if that has been seen to give the same.

    Args:
        layers: of a model, in order.
        last_norm: module behind them, or `None`.
    """
    return take_over(_made_in(layers, last_norm))


def _made_in(layers: Sequence[Any], last_norm: Any) -> Iterator[tuple[Any, CardLayer]]:
    norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]] + [last_norm]
    for layer, norm in zip(layers, norms[: len(layers)], strict=True):  # there may be no such layers
        if own_forward(layer) is not None or not all(hasattr(layer, name) for name in _PARTS) or mlp_of(layer) is None:
            continue
        if not all(isinstance(own_forward(getattr(layer, name)), CardNorm) for name in (_PARTS[0], _PARTS[2])):
            continue
        following = own_forward(norm)
        own, its = own_forward(getattr(layer, _PARTS[2])), following if isinstance(following, CardNorm) else None
        if its is not None and its.weight.device != own.weight.device:
            its = None
        made = _made(layer, its)
        if made is not None:
            yield layer, made


@torch.inference_mode()
def _made(layer: Any, following: CardNorm | None) -> CardLayer | None:
    weight = layer.post_attention_layernorm.weight
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(1, 3, weight.numel(), generator=generator).to(weight.device, weight.dtype)
    made = CardLayer(layer, following)
    for is_tuple in (False, True):
        given = dict.fromkeys(("attention_mask", "position_embeddings", "cache", "position_ids"))
        attended, computed = _Stub(0.75, is_tuple=True), _Stub(1.25, is_tuple=is_tuple)
        try:
            with replaced([(layer.self_attn, attended), (mlp_of(layer), computed)]):
                wanted, found = layer.forward(x, **given), made(x, **given)
            if attended.calls[0] != attended.calls[1] or computed.calls[0] != computed.calls[1]:
                return None  # it is given something else by the library
            if not isinstance(wanted, torch.Tensor) or not torch.equal(found, wanted):
                return None
            if following is None or torch.equal(following(found), following(wanted)):
                return made
        except (ValueError, TypeError, AttributeError):  # it wants a tuple of its MLP, or to be given something else
            continue
        except Exception:  # any compiler or driver error: operators do it
            _log.warning("residual sums are not computed by a kernel on %s", weight.device, exc_info=True)
            return None
    return None


class _Stub:
    """In the place of attention, or of an MLP: a multiple of what it gets.

    Attributes:
        calls: the names of what it was given, one by one.
    """

    def __init__(self, factor: float, *, is_tuple: bool) -> None:
        self._factor, self._is_tuple = factor, is_tuple
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        self.calls.append((len(args), *sorted(name for name in kwargs if name != "use_cache")))
        hidden = args[0] if args else kwargs["hidden_states"]
        result = hidden * self._factor
        return (result, None) if self._is_tuple else result
