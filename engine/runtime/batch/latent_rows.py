"""Latent attention of many rows over pages of latents: a few tokens of each natively, prompts by the library's module.

Pages hold what the library's cache would, latents and rotary keys, which is a fiftieth of the keys and values that they
expand to.  The module expands those of a prompt's own tokens; what a row has read before is expanded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.paged_attention import PAGE_TOKENS, PagedLayer, Piece, Pieces
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.fast_path.latent_attention import LatentAttention
from engine.runtime.fast_path.norms import LayerNorms


class LatentRows:
    """The attention of one decoder layer, from the norm before it to the residual after it.

    Args:
        native: of the same layer.
        states: of its module, which is to have pages of latents.
    """

    def __init__(self, layer: Any, native: LatentAttention, states: PagedStates) -> None:
        self._module, self._norms = layer.self_attn, LayerNorms.of(layer)
        self._native, self._states = native, states

    @staticmethod
    def can(layer: Any) -> bool:
        """Whether the module of a layer that native steps know expands latents in a call of its own."""
        return hasattr(layer.self_attn, "expand_kv")

    def attend(self, hidden: torch.Tensor, pieces: Pieces, positions: Any) -> torch.Tensor:
        """Hidden states [1, T, H] plus attention, float32.

        Args:
            positions: the angles of these tokens, as the model gives them to its layers.
        """
        hidden = hidden.float()
        out = torch.empty_like(hidden)
        paged, struct = self._states.layer_of(self._module)
        for group in short_pieces(pieces):
            places, some = some_pieces(pieces, group)
            out[:, places] = self._native.rows(hidden[:, places], struct.held, some, _of_tokens(positions, places))
        if long := [place for place, piece in enumerate(pieces.pieces) if piece.tokens > MAX_TOKENS]:
            places, some = some_pieces(pieces, long)
            before = hidden[:, places]
            self._states.elsewhere = partial(_attend_expanded, paged, some)
            try:
                attended = self._module(
                    hidden_states=self._norms.before_attention(before),
                    attention_mask=None,
                    cache=_LatentPages(paged, some),
                    position_embeddings=_of_tokens(positions, places),
                )[0]
            finally:
                self._states.elsewhere = None
            out[:, places] = before + attended
        return out


class _LatentPages:
    """The cache that a module is given for prompts: latents go into pages, and it goes on with those of its tokens."""

    def __init__(self, paged: PagedLayer, pieces: Pieces) -> None:
        self._paged, self._pieces = paged, pieces

    def update(
        self, latents: torch.Tensor, rotary_keys: torch.Tensor, _layer: int, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all rows, [1, 1, T, rank] and [1, 1, T, rope]."""
        pages, rows = _where(self._pieces)
        for part, states in ((self._paged.keys, latents), (self._paged.values, rotary_keys)):
            part[pages, 0, rows] = states[0, 0].to(part.dtype)
        return latents, rotary_keys


def _attend_expanded(
    paged: PagedLayer,
    pieces: Pieces,
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The attention of each piece's tokens [1, heads, T, dim] to those before them -> [1, T, heads, value_dim].

    Args:
        keys, values: of these tokens.
    """
    results, attend = [], ALL_ATTENTION_FUNCTIONS["sdpa"]
    for begin, piece in zip(_begins(pieces), pieces.pieces, strict=True):
        of_piece = slice(begin, begin + piece.tokens)
        key, value, mask = keys[:, :, of_piece], values[:, :, of_piece], None
        if piece.held:
            latents, rotary_keys = (_held(part, piece) for part in (paged.keys, paged.values))
            before = module.expand_kv(latents.to(key.dtype), rotary_keys.to(key.dtype))
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
            seen = torch.ones(piece.tokens, key.shape[2], dtype=torch.bool).tril(piece.held)
            mask = seen[None, None]
        results.append(attend(module, queries[:, :, of_piece], key, value, mask, scaling=module.scaling)[0])
    return torch.cat(results, dim=1)


def _held(part: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What a piece's tokens follow, [1, 1, held, D]."""
    pages = piece.pages[: -(-piece.held // PAGE_TOKENS)].long()
    return part[pages].flatten(0, 2)[None, None, : piece.held]


def short_pieces(pieces: Pieces) -> Iterator[list[int]]:
    """The pieces that native calls compute, as many at once as one takes."""
    group, tokens = list[int](), 0
    for place, piece in enumerate(pieces.pieces):
        if piece.tokens > MAX_TOKENS:
            continue
        if tokens + piece.tokens > MAX_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += piece.tokens
    if group:
        yield group


def _begins(pieces: Pieces) -> list[int]:
    return [struct.first for struct in pieces.struct]


def some_pieces(pieces: Pieces, which: list[int]) -> tuple[torch.Tensor, Pieces]:
    """Some of the pieces, and the places of their tokens."""
    begins = _begins(pieces)
    places = [at for each in which for at in range(begins[each], begins[each] + pieces.pieces[each].tokens)]
    return torch.tensor(places), Pieces([pieces.pieces[each] for each in which])


def _of_tokens(positions: Any, places: torch.Tensor) -> Any:
    if positions is None or isinstance(positions, torch.Tensor):
        return positions if positions is None else positions[:, places]
    return tuple(each[:, places] for each in positions)


def _where(pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """The page of each token, and its row there."""
    pages, rows = [], []
    for piece in pieces.pieces:
        numbers = torch.arange(piece.held, piece.held + piece.tokens)
        pages.append(piece.pages[numbers // PAGE_TOKENS])
        rows.append(numbers % PAGE_TOKENS)
    return torch.cat(pages).long(), torch.cat(rows)
