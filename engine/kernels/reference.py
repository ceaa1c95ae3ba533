"""Expert computation and paged attention in plain torch: every fast path is tested against this.

Experts follow transformers' experts interface (`transformers.integrations.moe`), honouring its attributes; weights are
the module's own stacked parameters. Paged attention also runs here where there are no native kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.native.paged_attention import PAGE_TOKENS, AttentionTerms, KvType, PagedLayer, Pieces, pages_seen


def reference_experts(
    module: Any,
    weights: dict[str, torch.Tensor],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, token by token, summed in fp32.

    Args:
        module: has the attributes of the interface (`has_gate`, `has_bias`, `is_transposed`, ...).
        weights: the parameters by name, in the module's layout: `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I],
            or both with the last two dimensions swapped if `module.is_transposed`; `up_proj` in place of `gate_up_proj`
            if not `module.has_gate`; `*_bias` if `module.has_bias`.
        hidden_states: [T, H].
        top_k_index, top_k_weights: [T, k]; an invalid id contributes nothing.

    Returns:
        [T, H], of the type of `hidden_states`.
    """
    first = "gate_up_proj" if module.has_gate else "up_proj"
    result = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for token in range(hidden_states.shape[0]):
        for choice in range(top_k_index.shape[1]):
            expert = int(top_k_index[token, choice])
            if not 0 <= expert < module.num_experts:
                continue
            inner = _linear(module, weights, first, expert, hidden_states[token])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            out = _linear(module, weights, "down_proj", expert, inner)
            if module.has_post_expert_norm:
                out = module.post_expert_norm(out)
            result[token] += out.float() * top_k_weights[token, choice].float()
    return result.to(hidden_states.dtype)


def _linear(
    module: Any, weights: dict[str, torch.Tensor], name: str, expert: int, vector: torch.Tensor
) -> torch.Tensor:
    matrix = weights[name][expert]
    out = vector @ (matrix if module.is_transposed else matrix.T)
    return out + weights[f"{name}_bias"][expert] if module.has_bias else out


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
        positions = torch.arange(piece.held, end)
        pages = pages_seen(piece, has_window=bool(terms.window))
        page = pages[positions // PAGE_TOKENS].long()
        store_tokens(layer, page, positions % PAGE_TOKENS, keys[mine], values[mine])
        seen = max(0, piece.held - terms.window + 1) if terms.window and not terms.kept else 0
        held_keys, held_values = _read(layer, pages, seen, end)
        q = queries[mine].float().transpose(0, 1) * terms.scale
        scores = q @ held_keys.repeat_interleave(group, 0).mT
        if terms.softcap:
            scores = terms.softcap * torch.tanh(scores / terms.softcap)
        hidden = _hidden(piece.held, end, terms)[:, seen:].to(scores.device)
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


def store_tokens(
    layer: PagedLayer, page: torch.Tensor, slot: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Writes keys and values [T, kv_heads, dim] into pages, each token in its page [T] and its place there [T]."""
    if layer.kv_type is KvType.INT8:
        assert layer.key_scales is not None
        assert layer.value_scales is not None
        keys, layer.key_scales[page, :, slot] = _quantised(keys)
        values, layer.value_scales[page, :, slot] = _quantised(values)
    layer.keys[page, :, slot] = keys.to(layer.keys.dtype)
    layer.values[page, :, slot] = values.to(layer.values.dtype)


def _quantised(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = states.float().abs().amax(-1)
    return (states.float() * (127 / most.clamp(min=1e-30))[..., None]).round(), most / 127


def _read(layer: PagedLayer, pages: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[kv_heads, end - first, dim] each."""
    begin = first // PAGE_TOKENS
    used = pages[begin : -(-end // PAGE_TOKENS)].long()
    keys = layer.keys[used].float()
    values = layer.values[used].float()
    if layer.key_scales is not None and layer.value_scales is not None:
        keys *= layer.key_scales[used][..., None]
        values *= layer.value_scales[used][..., None]
    shape = layer.shape
    keys = keys.transpose(0, 1).reshape(shape.kv_heads, -1, shape.key_dim)
    values = values.transpose(0, 1).reshape(shape.kv_heads, -1, shape.value_dim)
    rows = slice(first - begin * PAGE_TOKENS, end - begin * PAGE_TOKENS)
    return keys[:, rows], values[:, rows]
