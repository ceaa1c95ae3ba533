"""A prompt is computed in pieces: how long they are, and what is asked for and told while one is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.checkpoint.profile import ModelProfile
from engine.runtime.cancellation import RequestCancelled
from engine.runtime.generation import CancelCheck, ProgressCallback

SHORT_TOKENS = 256
"""Where all weights are at hand: bounds the memory of activations."""
LONG_TOKENS = 2048
"""Where experts come over a link or from disk: each piece brings them once."""
_TOKENS_PER_EXPERT = 64
"""From about so many on, a matrix product is bound by arithmetic and no longer by reading the weights."""
_SHORTEST = 32
_SHARE = 4
"""A piece's activations may take one part in so many of what a device has left beside the dense weights."""


def activation_bytes(profile: ModelProfile, dtype: torch.dtype) -> int:
    """Bytes that a token of a piece takes at the most, by a rough count of the tensors that live at once.

    Residual, norms and projections are some ten of the hidden width; experts have a row of fp32 for each choice.
    """
    return profile.hidden * (10 * dtype.itemsize + 4 * max(profile.experts_per_token, 1))


def tokens_in_ram(profile: ModelProfile) -> int:
    """The length of a piece whose weights all lie in RAM: each expert gets enough tokens for its weights' way."""
    if not profile.experts_per_token:
        return SHORT_TOKENS
    return max(SHORT_TOKENS, min(LONG_TOKENS, _TOKENS_PER_EXPERT * profile.experts // profile.experts_per_token))


def piece_tokens(room: int, per_token: int, context_tokens: int) -> int:
    """The longest piece whose activations leave most of `room` bytes to others."""
    fitting = room // (_SHARE * max(per_token, 1))
    return max(_SHORTEST, min(LONG_TOKENS, fitting, context_tokens))


@contextmanager
def watched_layers(
    model: Any, begin: int, end: int, total: int, on_progress: ProgressCallback, cancelled: CancelCheck
) -> Iterator[None]:
    """While a long piece is computed, progress is told and a cancel heard at every layer.

    Raises:
        RequestCancelled: out of the forward, whose cache is then of no use.
    """
    layers = _layers(model) if end - begin > SHORT_TOKENS else []
    passed = 0

    def enter(_module: Any, _args: Any) -> None:
        nonlocal passed
        if cancelled():
            raise RequestCancelled
        on_progress(begin + (end - begin) * passed // len(layers), total)
        passed += 1

    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: Any) -> list[Any]:
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []
