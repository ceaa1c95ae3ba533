"""The library's cache of a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionLayer,
)


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is untyped
    """The library's, which imports its compiler to mark each state's address: that took a second of a first prompt."""

    device: Any

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """As there; what a state holds is written into it by its caller."""
        if conv_states is not None:
            if self.device is None:
                self.dtype, self.device = conv_states.dtype, conv_states.device
            kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = kernel
            self.conv_states[state_idx] = conv_states.new_zeros((*conv_states.shape[:-1], kernel))
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True


def library_cache(model: Any) -> Cache | None:
    """What the model would make for itself; `None` if it insists on that."""
    if not model._supports_default_dynamic_cache():
        return None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [
        StateLayer(layer.number_of_states) if type(layer) is LinearAttentionLayer else layer for layer in cache.layers
    ]
    return cache
