"""Tokens that a real card runs by itself, tried with the model's own experts before they are used."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.experts.card_tokens import CardTokens
from engine.experts.dispatcher import HybridExperts
from engine.kernels.cuda.launcher import SharingLauncher
from engine.kernels.native.library import NativeKernels

_log = logging.getLogger(__name__)

_REPLAYS = 2
_LIKE = 0.999
"""Cosine with what the CPU computes: both round x to 8 bits where weights are quantised."""


def tried_tokens(
    layers: Sequence[HybridExperts], kernels: NativeKernels, per_token: int, card: SharingLauncher
) -> tuple[CardTokens | None, str]:
    """`CardTokens` that give what the CPU gives, or why there are none, in a few words.  Raises nothing.

    Some of the experts are in slots afterwards.
    """
    tokens: CardTokens | None = None
    try:
        tokens = CardTokens(layers, kernels, per_token, card)
        with torch.inference_mode():
            _fill(layers, per_token)
            refused = _tried(tokens, layers, per_token)
    except Exception as error:  # of a compiler, a driver, a card: the dispatcher does it
        _log.warning("%s runs no tokens by itself", layers[0].device.name, exc_info=True)
        refused = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    if tokens is not None and refused:
        tokens.close()
        tokens = None
    return tokens, refused


def _fill(layers: Sequence[HybridExperts], per_token: int) -> None:
    """Brings half of a token's experts to the slots, as far as there are any."""
    for layer in layers:
        experts = list(range(min((per_token + 1) // 2, layer.source.num_experts, layer.cache.free_slots(layer.layer))))
        if experts:
            held = layer.source.acquire(experts)
            layer.cache.post_fetch(layer.layer, experts, held)
            held.release()
            layer.cache.wait()


def _tried(tokens: CardTokens, layers: Sequence[HybridExperts], per_token: int) -> str:
    """First launch by launch, which compiles and loads the kernels, then as a graph with other numbers each time."""
    device, place = layers[0].device, layers[0].device.torch_device
    drawn = torch.Generator().manual_seed(1)
    count, hidden = len(layers), tokens.hidden
    x = torch.zeros(count, 1, hidden, dtype=torch.bfloat16, device=place)
    index = torch.zeros(count, 1, per_token, dtype=torch.int64, device=place)
    shares = torch.zeros(count, 1, per_token, device=place)

    def draw() -> None:
        x.copy_(torch.randn(x.shape, generator=drawn))
        shares.copy_(torch.rand(shares.shape, generator=drawn))
        chosen = [torch.randperm(layer.source.num_experts, generator=drawn)[:per_token] for layer in layers]
        for number, experts in enumerate(chosen):
            if number % 2:  # what is in slots, and as many others
                experts = torch.arange(per_token)
            index[number, 0] = experts

    def forward() -> torch.Tensor:
        return torch.stack([tokens.compute(layer, x[n], index[n], shares[n]) for n, layer in enumerate(layers)])

    def is_like(found: torch.Tensor) -> bool:
        found = found.cpu()
        for number, layer in enumerate(layers):
            wanted = layer.source.kernel(x[number].cpu(), index[number].cpu(), shares[number].cpu())
            like = torch.cosine_similarity(found[number].float(), wanted.float(), dim=-1)
            if not like.item() > _LIKE:
                return False
        return True

    draw()
    with tokens.trial():
        found = tokens.whole(forward)
    if not is_like(found):
        return "it computes something else than the CPU"
    assert device.new_capture is not None
    capture = device.new_capture()
    try:
        with tokens.trial():
            capture.begin()
            found = tokens.whole(forward)
            graph = capture.end()
        for _ in range(_REPLAYS):
            draw()
            with tokens.trial():
                graph.replay()
            if not is_like(found):
                return "repeated, it computes something else than the CPU"
    finally:
        capture.close()
    return ""
