"""What the library's attention modules attend by: the only place where functions are registered with it.

Its own function for prompts makes way for one that asks the native kernels.  Under a name of our own, whatever computes
a step over pages attends for a while, and gives modules what it likes in place of masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import FEWEST_TOKENS, attend_prompt, is_faster
from engine.runtime.decoder_layers import decoder_layers

_OURS = "switchyard"


class Attending(Protocol):
    """What attends for a model's modules."""

    def attend(
        self,
        module: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """[B, heads, T, dim] -> [B, T, heads, value_dim]."""
        ...

    def mask(self, mask_function: Callable[..., Any]) -> torch.Tensor | None:
        """What modules get in place of the mask that the library would build by this rule."""
        ...


_attending: list[Attending] = []
"""The last one attends: a single thread computes."""


def window_of_cache_alone(model: Any) -> int:
    """The longest context within which the library's cache keeps all that its masks let a token see.

    The library makes a cache by the configuration alone: a stray `sliding_window` makes it slide in families whose
    attention has no window.  There, a prompt sees all that comes before, and each token after it only a window.

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
def attending_by(how: Attending, configs: list[Any]) -> Iterator[None]:
    """Within it this attends for the modules of these configurations, and makes their masks."""
    before = [config._attn_implementation_internal for config in configs]
    _attending.append(how)
    for config in configs:
        config._attn_implementation_internal = _OURS
    try:
        yield
    finally:
        for config, was in zip(configs, before, strict=True):
            config._attn_implementation_internal = was
        _attending.pop()


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

    def attend(self, *_: Any) -> torch.Tensor:
        raise _SeenError

    def mask(self, mask_function: Callable[..., Any]) -> torch.Tensor:
        try:
            self.windows.add(window_of(mask_function, self.tokens))
        except (LookupError, RuntimeError):  # it may look into tensors of this one token
            self.windows.add(None)
        return torch.zeros(1, 1, 1, 1)


def _windows_of_masks(model: Any, tokens: int) -> set[int | None]:
    look = _Look(tokens)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
    with ExitStack() as undo, suppress(_SeenError), torch.inference_mode():
        undo.enter_context(attending_by(look, configs_of(model)))
        for layer in decoder_layers(model):
            undo.callback(layer.register_forward_pre_hook(look.attend).remove)
        model(input_ids=ids, use_cache=False)
    return look.windows


PROMPTS = "sdpa"
"""The name stays: some families of the library look at it, and leave a mask out under any other."""
_OTHERS = ("position_bias", "cache", "softcap")
"""Options by which the library's own function computes something else; it ignores all that are not its parameters."""


def speed_up_prompts(model: Any, kernels: NativeKernels) -> int:
    """Lets attention modules on the CPU use the kernels for prompts; returns their number."""
    if not is_faster(kernels):
        return 0
    modules = [module for module in model.modules() if hasattr(module, "config")]
    for module in modules:
        module.__dict__["prompt_kernels"] = kernels
    return len(modules)


def _attend_prompt(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    kernels: NativeKernels | None = module.__dict__.get("prompt_kernels")
    if kernels is not None and dropout == 0 and _is_prompt(module, query, key, value, attention_mask, options):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        sees = None if attention_mask is None else attention_mask[0, 0]
        out = attend_prompt(kernels, query[0], key[0], value[0], scale, sees) if scale > 0 else None
        if out is not None:
            return out[None], None
    return sdpa_attention_forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )


def _is_prompt(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> bool:
    """Whether the kernels may compute it: one sequence in bf16 on the CPU, each token seeing a range of keys."""
    tokens, held = query.shape[2], key.shape[2]
    if (
        tokens < FEWEST_TOKENS
        or query.shape[0] != 1
        or {each.dtype for each in (query, key, value)} != {torch.bfloat16}
    ):
        return False
    if (
        query.device.type != "cpu"
        or key.device.type != "cpu"
        or query.shape[1] % key.shape[1]
        or key.shape[1] != value.shape[1]
    ):
        return False
    if any(options.get(name) is not None for name in _OTHERS):
        return False
    if mask is not None:
        return mask.dtype == torch.bool and mask.shape == (1, 1, tokens, held)
    causal = options.get("is_causal")
    return tokens == held and bool(getattr(module, "is_causal", True) if causal is None else causal)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _attending[-1].attend(module, query, key, value, attention_mask, options).to(query.dtype), None


def _mask(*_args: Any, mask_function: Callable[..., Any], **_options: Any) -> torch.Tensor | None:
    return _attending[-1].mask(mask_function)


ALL_ATTENTION_FUNCTIONS.register(PROMPTS, _attend_prompt)
ALL_ATTENTION_FUNCTIONS.register(_OURS, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_OURS, _mask)
