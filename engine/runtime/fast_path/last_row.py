"""The last layer of a prompt: only its last token's row is of use, because the logits of the others are not asked for.

Its keys and values are those of all tokens, as the next ones attend to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.families import fast_path_of
from engine.runtime.fast_path.norms import LayerNorms, mixer_of, multiple_of


def attend_last(layer: Any, hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Hidden states [B, q, hidden] through the norm, attention and residual of a decoder layer -> [B, 1, hidden] of the
    last token.

    Args:
        layer: of the common kind (see `engine.runtime.fast_path.decoder_layer`).
        options: what the layer is given besides; its cache takes the keys and values of all tokens.
    """
    norms = LayerNorms.of(layer)
    attention = mixer_of(layer)
    with _only_last_rows(attention):
        attended: torch.Tensor = attention(hidden_states=norms.before_attention(hidden_states), **options)[0]
    last = attended[:, -1:]
    last = last if norms.after_attention is None else norms.after_attention(last)
    return torch.add(hidden_states[:, -1:], last, alpha=multiple_of(layer))


@contextmanager
def _only_last_rows(attention: Any) -> Iterator[None]:
    """While in use, projections whose other rows nobody reads give the last row's result to all: a token's query serves
    that token alone."""
    path = fast_path_of(attention, "attention")
    assert path is not None
    modules = [module for name in ("q_proj", path.output) if (module := getattr(attention, name, None)) is not None]
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = _LastRow(module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _LastRow:
    """The `forward` of a linear layer."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        last: torch.Tensor = self._forward(x[..., -1:, :])
        return last.expand(*x.shape[:-1], last.shape[-1])
