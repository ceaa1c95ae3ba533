"""A prompt is computed in pieces: how long they are, and what is asked for and told while one is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from engine.checkpoint.profile import ModelProfile
from engine.common.cancellation import RequestCancelled
from engine.common.footprint import LONG_TOKENS as LONG_TOKENS
from engine.common.footprint import SHORT_TOKENS as SHORT_TOKENS
from engine.common.footprint import activation_token_bytes, piece_tokens_in_ram
from engine.runtime.generation import CancelCheck, ProgressCallback


def activation_bytes(profile: ModelProfile, dtype: torch.dtype) -> int:
    """Bytes that a token of a piece takes at the most."""
    return activation_token_bytes(profile.hidden, profile.experts_per_token, dtype.itemsize)


def tokens_in_ram(profile: ModelProfile) -> int:
    """The length of a piece whose weights all lie in RAM."""
    return piece_tokens_in_ram(profile.experts, profile.experts_per_token)


@contextmanager
def watched_layers(
    model: Any, begin: int, end: int, total: int, on_progress: ProgressCallback, cancelled: CancelCheck
) -> Iterator[None]:
    """While a long piece is computed, progress is told and a cancel heard at every layer.

    Raises:
        RequestCancelled: out of the forward, whose cache is then of no use.
    """
    layers = decoder_layers(model) if end - begin > SHORT_TOKENS else []
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


def decoder_layers(model: Any) -> list[Any]:
    """The layers that tokens go through, in order; none if the library does not say which they are."""
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    for module in chain(model.get_decoder().modules(), model.modules()):  # a tower may have as many
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []
