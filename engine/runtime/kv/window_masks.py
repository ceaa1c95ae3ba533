"""Whether a model's masks know of the window by which its cache lets go of tokens.

The library makes a cache by the configuration alone: a stray `sliding_window` makes it slide in families whose
attention has no window.  There, a prompt sees all that comes before, and each token after it only a window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.runtime.decoder_layers import decoder_layers

IMPLEMENTATION = "switchyard_mask_rules"


def window_of_cache_alone(model: Any) -> int:
    """The longest context within which the library's cache keeps all that its masks let a token see.

    Reads no weights but a token's embedding, and nothing at all where no cache slides.
    """
    windows = {
        layer.sliding_window
        for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    if not windows or not model._supports_default_dynamic_cache():
        return sys.maxsize
    seen = _windows_of_masks(model, 2 * max(windows) + 2)
    return sys.maxsize if None in seen else min(windows - seen, default=sys.maxsize)


def window_of(mask_function: Callable[..., Any], tokens: int) -> int:
    """How many tokens, itself included, each of the first `tokens` sees by this rule of the library's.

    Returns:
        0 if all that come before it.

    Raises:
        LookupError: the rule is another one.
    """
    places, zero = torch.arange(tokens), torch.tensor(0)
    # Two neighbours distinguish a window from a chunk, in which each token sees one more than the one before it.
    seeing = sorted({tokens // 2, max(0, tokens - 2), tokens - 1})
    seen = [mask_function(zero, zero, torch.tensor(place), places).expand(tokens) for place in seeing]
    window = int(seen[-1].sum())
    for place, sees in zip(seeing, seen, strict=True):
        expected = (places <= place) & (places > place - window)
        if not torch.equal(sees, expected):
            raise LookupError("its masks are not those of a window")
    return 0 if window == tokens else window


def configs_of(model: Any) -> list[Any]:
    """Every configuration by which modules of this model choose their attention."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


@contextmanager
def attending_by(implementation: str, configs: list[Any]) -> Iterator[None]:
    """Within it the modules of these configurations attend, and make masks, in this way."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config._attn_implementation_internal = was


class _SeenError(Exception):
    """Masks are made before the first layer, and none is computed."""


@dataclass
class _Look:
    """What is seen of a model's masks.

    Attributes:
        tokens: contexts of this length tell all rules apart.
        windows: met so far, 0 without one, None for another rule.
    """

    tokens: int
    windows: set[int | None] = field(default_factory=set)


_looks: list[_Look] = []
"""At the model whose masks are being made: at most one, as one thread computes."""


def _windows_of_masks(model: Any, tokens: int) -> set[int | None]:
    look = _Look(tokens)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    _looks.append(look)
    try:
        with ExitStack() as undo, suppress(_SeenError), torch.inference_mode():
            undo.enter_context(attending_by(IMPLEMENTATION, configs_of(model)))
            for layer in decoder_layers(model):
                undo.callback(layer.register_forward_pre_hook(_stop).remove)
            model(input_ids=ids, use_cache=False)
    finally:
        _looks.pop()
    return look.windows


def _stop(*_args: Any, **_options: Any) -> Any:
    raise _SeenError


def _mask(*_args: Any, mask_function: Callable[..., Any], **_options: Any) -> torch.Tensor:
    look = _looks[-1]
    try:
        look.windows.add(window_of(mask_function, look.tokens))
    except (LookupError, RuntimeError):  # it may look into tensors of this one token
        look.windows.add(None)
    return torch.zeros(1, 1, 1, 1)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _stop)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
