"""Decoder layers of the common families, a few tokens over pages at a time, in two native calls each.

The library's own modules stay what they are and compute everything else: prompts, other caches, other types.  Only
steps of a few tokens through layers whose mathematics the kernels know take the fast path, and the parity tests hold it
to the library's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine.common import clock
from engine.families import fast_path_of
from engine.families.library import own_forward, replaced, take_over
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import PagesStruct
from engine.runtime.fast_path.attention import CompressedAttention, GroupedAttention, LatentAttention, NoAttention
from engine.runtime.fast_path.norms import LayerNorms, add_mlp, keep_in_floats, mixer_of, multiple_of
from engine.runtime.fast_path.sparse_block import SparseBlock
from engine.runtime.fast_path.state_mixer import StateMixer
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

Attention = GroupedAttention | LatentAttention | CompressedAttention | StateMixer | NoAttention


def knows_layer(layer: Any) -> bool:
    """Whether this is a decoder layer of the common kind: attention and an MLP, each after a norm and added."""
    return fast_path_of(layer, "layer") is not None


def speed_up_decoder_layers(model: Any, kernels: NativeKernels) -> int:
    """Gives every decoder layer that the kernels know its fast path for a few tokens; returns how many."""
    if count := take_over(_steps_in(model, kernels)):
        known = [layer for layer in model.modules() if knows_layer(layer)]
        keep_in_floats(model, known, all_native=count == len(known))
        RECORDER.layers.follow(kernels.stamps)
    return count


def _steps_in(model: Any, kernels: NativeKernels) -> Iterator[tuple[Any, SingleTokenLayer]]:
    for name, layer in model.named_modules():
        kind = _attention_of(layer) if knows_layer(layer) else None
        if kind is not None:
            sparse, number = SparseBlock.of(layer, kernels), lanes.layer_number(name)
            yield layer, SingleTokenLayer(layer, kind(layer, kernels), sparse, number)


def route_in_library(model: Any) -> None:
    """Lets the library's own routers choose the experts again, in all layers, so that they can be recorded."""
    for layer in model.modules():
        fast_path = own_forward(layer)
        if isinstance(fast_path, SingleTokenLayer):
            fast_path.leave_routing()


def _attention_of(layer: Any) -> type[Attention] | None:
    for kind in (GroupedAttention, LatentAttention, CompressedAttention, StateMixer, NoAttention):
        if kind.can_step(layer):
            return kind
    return None


class SingleTokenLayer:
    """The `forward` of one decoder layer.

    Attributes:
        in_library: the one that it takes the place of, for prompts and all that is not over pages.
        wants_last: whether only the last token's result is of use, all else than its keys and values being left out.
        attention: the part before the residual in its middle.
        sparse: the part after it, a dense MLP too; `None` if the library computes that.
        number: which layer it is.
    """

    wants_last = False

    def __init__(
        self,
        layer: Any,
        attention: Attention,
        sparse: SparseBlock | None,
        number: int,
    ) -> None:
        self.in_library = layer.forward
        self._layer = layer
        self._norms = LayerNorms.of(layer)
        self.attention = attention
        self.sparse = sparse
        self.number = number
        self._routes_apart = False
        path = fast_path_of(layer, "layer")
        assert path is not None
        self.streams = None if path.streams is None else tuple(getattr(layer, name) for name in path.streams[:2])
        """What is before and after its two parts if there are several streams of hidden states."""
        self._is_whole = path.passes_choice or self.streams is not None
        RECORDER.layers.name(attention.address, number, lanes.ATTENTION)
        if sparse is not None and sparse.tokens is None:
            RECORDER.layers.name(sparse.address, number, lanes.EXPERTS if sparse.has_experts else lanes.DENSE)

    def leave_routing(self) -> None:
        """From now on experts do not go the fast path."""
        self._routes_apart = True
        if self.sparse is not None and self.sparse.has_experts:
            self.sparse = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._is_whole:  # the next layer may be the library's: only whole steps are native
            return self.in_library(hidden_states, *args, **kwargs)
        if hidden_states.dtype == torch.bfloat16:
            hidden_states = hidden_states.float()
        if self.wants_last and hidden_states.shape[1] > 1 and not (args or self._routes_apart):
            return add_mlp(self._layer, self._norms, attend_last(self._layer, hidden_states, kwargs))
        return self.in_library(hidden_states, *args, **kwargs)

    def rows(self, hidden: torch.Tensor, held: PagesStruct, pieces: Pieces, positions: Any) -> torch.Tensor:
        """Hidden states [1, q, hidden] of the next tokens of several sequences, float32, contiguous -> what the layer
        makes of them.

        Args:
            held: its pages, which take their keys and values.
            positions: their cosines and sines, or whatever the model gives its layers instead.
        """
        assert not isinstance(self.attention, CompressedAttention)  # which is a part of whole steps alone
        return self._add_mlp(self.attention.rows(hidden, held, pieces, positions))

    def _add_mlp(self, out: torch.Tensor) -> torch.Tensor:
        if self.sparse is not None and self.sparse.can_step:
            return self.sparse.step(out)
        return self._recorded_mlp(out) if RECORDER.on else add_mlp(self._layer, self._norms, out)

    def _recorded_mlp(self, out: torch.Tensor) -> torch.Tensor:
        """The library's MLP, and its span; the native steps are stamped by themselves."""
        recorder = RECORDER
        attended_ns = recorder.layer_since_ns = clock.now_ns()
        out = add_mlp(self._layer, self._norms, out)
        if recorder.layer_since_ns == attended_ns:  # no experts, which would have recorded their own span
            recorder.layer_since_ns = ended_ns = clock.now_ns()
            recorder.dense(lanes.DENSE, attended_ns, ended_ns, self.number)
        return out

    @property
    def norm(self) -> Any:
        """The first of its norms."""
        return self._norms.before_attention

    @property
    def reads_narrow(self) -> bool:
        """Whether its attention, if it has any, reads keys and values in other types than the model's."""
        return not isinstance(self.attention, LatentAttention | CompressedAttention)

    @property
    def is_native(self) -> bool:
        """Whether native calls compute all of it, several tokens at once as each of them alone, bit by bit; a card
        computes one at a time."""
        return self.sparse is not None and self.sparse.tokens is None


def attend_last(layer: Any, hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Hidden states [B, q, hidden] through the norm, attention and residual of a decoder layer -> [B, 1, hidden] of the
    last token.

    Args:
        layer: of the common kind (see `engine.runtime.fast_path.decoder_layer`).
        options: what the layer is given besides; its cache takes the keys and values of all tokens.
    """
    norms = LayerNorms.of(layer)
    attention = mixer_of(layer)
    path = fast_path_of(attention, "attention")
    assert path is not None
    # Projections whose other rows nobody reads give the last row's result to all: a query serves its token alone.
    modules = [part for name in ("q_proj", path.output) if (part := getattr(attention, name, None)) is not None]
    with replaced((part, _LastRow(part.forward)) for part in modules):
        attended: torch.Tensor = attention(hidden_states=norms.before_attention(hidden_states), **options)[0]
    last = attended[:, -1:]
    last = last if norms.after_attention is None else norms.after_attention(last)
    return torch.add(hidden_states[:, -1:], last, alpha=multiple_of(layer))


class _LastRow:
    """The `forward` of a linear layer."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self._forward(x[..., -1:, :])
        return last.expand(*x.shape[:-1], last.shape[-1])
