"""One forward pass of a decoder-only model over a cache: what to pass, decided once."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.runtime.fast_path.token_step import TokenStep
from engine.runtime.rotary import kinds_by_length


class StepModel:
    """Calls a transformers model the way its own `generate` does, without what `generate` does around it.

    Positions are slices of one tensor, no attention mask is passed (there is no padding), and only the last position's
    logits are asked for.

    Args:
        model: a causal language model in eval mode.
        context_tokens: longest context; positions are laid out for it, and for more if more is needed.
    """

    def __init__(self, model: Any, context_tokens: int) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._model = model
        self._device: torch.device = model.device
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._wants_positions = "position_ids" in parameters
        self._positions = self._lay_out(context_tokens)
        self._single = TokenStep.of(model)
        trained = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", context_tokens)
        self._angles_grow = "dynamic" in kinds_by_length(model) and context_tokens > trained

    @property
    def attends_in_chunks(self) -> bool:
        """Whether some layers attend to the tokens since the last multiple of a length (Llama 4)."""
        config = self._model.config.get_text_config(decoder=True)
        return "chunked_attention" in (getattr(config, "layer_types", None) or ())

    @property
    def why_not_repeated(self) -> str:
        """Why a step cannot be repeated as it was for the token before; empty if it can."""
        return "rotary embeddings that follow the length of the context" if self._angles_grow else ""

    def _lay_out(self, tokens: int) -> torch.Tensor:
        return torch.arange(tokens, device=self._device).unsqueeze(0)

    def __call__(self, tokens: torch.Tensor, cache: Cache | None, start: int) -> tuple[torch.Tensor, Cache]:
        """Runs `tokens` [B, q] int64 at positions `start`, ..., `start + q - 1` and appends them to the cache.

        Returns:
            logits [B, V] of the last position in the model's precision, and the cache (the model's own, if `cache` was
            `None`).
        """
        end = start + tokens.shape[1]
        if end > self._positions.shape[1]:
            self._positions = self._lay_out(2 * end)
        positions = self._positions[:, start:end]
        if self._single is not None and cache is not None and tokens.numel() == 1:
            logits = self._single.step(tokens, positions, start, cache)
            if logits is not None:
                return logits, cache
        if tokens.shape[0] > 1:
            # One row per sequence, as `generate` passes them: some families keep them beside the cache.
            positions = positions.expand(tokens.shape[0], -1)
        return self.at(positions, tokens, cache)

    def at(self, positions: torch.Tensor, tokens: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache]:
        """The same at positions [B, q] that are in a tensor."""
        extra = {**self._last_only, "position_ids": positions} if self._wants_positions else self._last_only
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, return_dict=True, **extra)
        return output.logits[:, -1], output.past_key_values
