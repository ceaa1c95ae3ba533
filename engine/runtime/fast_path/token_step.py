"""A whole step of one token, from its id to its logits, through layers that all have a fast path.

The library's model around the layers decides again for every token what never changes: masks that hide nothing, which
layers there are, which outputs were asked for, the angles of a position.  With small models that took as long as a
tenth of the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from engine.families import fast_path_of
from engine.runtime.native_decoder import SingleTokenLayer

_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose angles depend on the position alone, not on how long the context is."""

_PAGE = 256
"""Positions whose angles are computed together."""


class TokenStep:
    """Steps of single tokens through one model."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed, self._norm, self._head = inner.embed_tokens, inner.norm, model.lm_head
        self._layers: list[SingleTokenLayer] = [layer.__dict__["forward"] for layer in inner.layers]
        self._hooks = [hooks for layer in inner.layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._angles = _Angles(inner.rotary_emb)

    @classmethod
    def of(cls, model: Any) -> TokenStep | None:
        """That of a model, or `None` if it is of no known kind or some of its layers have no fast path."""
        if fast_path_of(model, "model") is None or model.model.embed_tokens.weight.dtype != torch.bfloat16:
            return None
        layers = model.model.layers
        if not all(isinstance(layer.__dict__.get("forward"), SingleTokenLayer) for layer in layers):
            return None
        return cls(model)

    def step(self, token: torch.Tensor, position_ids: torch.Tensor, start: int, cache: Cache) -> torch.Tensor | None:
        """Appends one token [1, 1], at position `start`, which is also in `position_ids` [1, 1].

        Returns:
            Its logits [1, V]; `None`, and nothing was done, if the library has to compute this step: the cache is not
            one to write into, or somebody listens to the layers.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        for hooks in self._hooks:
            if hooks:
                return None
        hidden = self._embed(token)
        angles = self._angles.at(start, hidden, position_ids)
        first = True
        for layer in self._layers:
            out = layer.step(hidden, cache, angles)
            if out is None:
                if first:
                    return None
                # A layer with a cache of another kind; a single token has nothing hidden from it.
                out = layer.in_library(
                    hidden,
                    attention_mask=None,
                    position_ids=position_ids,
                    past_key_values=cache,
                    use_cache=True,
                    position_embeddings=angles,
                )
            hidden, first = out, False
        logits: torch.Tensor = self._head(self._norm(hidden))
        return logits[:, -1]


class _Angles:
    """Cosines and sines of positions, as the model's rotary embedding gives them."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._is_fixed = getattr(rotary, "rope_type", None) in _FIXED_ANGLES
        self._page = -1
        self._rows: Any = ()

    def at(self, position: int, like: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """Of one position: a tensor, or cosine and sine, [1, 1, angles]."""
        if not self._is_fixed:
            return self._rotary(like, position_ids)
        page, row = divmod(position, _PAGE)
        if page != self._page:
            self._rows = self._of_page(page, like)
            self._page = page
        return self._rows[row]

    def _of_page(self, page: int, like: torch.Tensor) -> list[Any]:
        ids = torch.arange(page * _PAGE, (page + 1) * _PAGE, device=like.device).unsqueeze(0)
        found = self._rotary(like, ids)
        if isinstance(found, torch.Tensor):
            return [found[:, row : row + 1] for row in range(_PAGE)]
        return [tuple(part[:, row : row + 1] for part in found) for row in range(_PAGE)]
