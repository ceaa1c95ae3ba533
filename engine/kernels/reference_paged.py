"""Paged attention in torch operators: the reference for the native kernels, and their fallback."""

from __future__ import annotations

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, AttentionTerms, KvType, PagedLayer, Pieces


def attend_in_torch(
    layer: PagedLayer,
    terms: AttentionTerms,
    pieces: Pieces,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Like `engine.kernels.native.paged_attention.attend`, computed in fp32."""
    shape, outs, first = layer.shape, [], 0
    group = shape.heads // shape.kv_heads
    for piece in pieces.pieces:
        mine = slice(first, first + piece.tokens)
        first += piece.tokens
        end = piece.held + piece.tokens
        _write(layer, piece.pages, piece.held, keys[mine], values[mine])
        held_keys, held_values = _read(layer, piece.pages, end)
        q = queries[mine].float().transpose(0, 1) * terms.scale
        scores = q @ held_keys.repeat_interleave(group, 0).mT
        if terms.softcap:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        hidden = _hidden(piece.held, end, terms).to(scores.device)
        scores = scores.masked_fill(hidden, float("-inf"))
        if terms.sinks is not None:
            sinks = terms.sinks.view(-1, 1, 1).expand(-1, piece.tokens, 1)
            shares = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            shares = scores.softmax(-1)
        outs.append((shares @ held_values.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outs).to(queries.dtype).contiguous()


def _hidden(held: int, end: int, terms: AttentionTerms) -> torch.Tensor:
    """[new tokens, all tokens]: True where attention is masked."""
    position, other = torch.arange(held, end)[:, None], torch.arange(end)[None]
    hidden = other > position
    if terms.window:
        hidden |= (other <= position - terms.window) & (other >= terms.kept)
    return hidden


def _write(layer: PagedLayer, pages: torch.Tensor, held: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    positions = torch.arange(held, held + keys.shape[0])
    page, slot = pages[positions // PAGE_TOKENS].long(), positions % PAGE_TOKENS
    if layer.kv_type is KvType.INT8:
        assert layer.key_scales is not None
        assert layer.value_scales is not None
        keys, layer.key_scales[page, :, slot] = _quantised(keys)
        values, layer.value_scales[page, :, slot] = _quantised(values)
    layer.keys[page, :, :, slot] = keys.to(layer.keys.dtype)
    layer.values[page, :, slot] = values.to(layer.values.dtype)


def _quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = states.float().abs().amax(-1)
    return (states.float() * (127 / most.clamp(min=1e-30))[..., None]).round(), most / 127


def _read(layer: PagedLayer, pages: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[kv_heads, end, dim] each."""
    used = pages[: -(-end // PAGE_TOKENS)].long()
    keys = layer.keys[used].float()
    values = layer.values[used].float()
    if layer.key_scales is not None and layer.value_scales is not None:
        keys *= layer.key_scales[used][:, :, None]
        values *= layer.value_scales[used][..., None]
    shape = layer.shape
    keys = keys.permute(1, 0, 3, 2).reshape(shape.kv_heads, -1, shape.key_dim)
    values = values.transpose(0, 1).reshape(shape.kv_heads, -1, shape.value_dim)
    return keys[:, :end], values[:, :end]
