"""A sweep of a few rows with one token each: two native calls a layer, and nothing of the library around them.

Arguments that layers are called with, routing and grouping of experts take as long for a few rows as for hundreds; a
few chats at once would spend half of their time there.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.common import clock
from engine.families import fast_path_of
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import PagedLayerStruct, Pieces
from engine.kernels.native.rows import attention_rows
from engine.kernels.native.structs import AttentionStruct
from engine.runtime.batch.packed_attention import PagedStates
from engine.runtime.fast_path.angles import Rotations
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.fast_path.dense_rows import one_by_one, product
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER


class FewRows:
    """The model of a known kind all of whose layers are native, some with experts.

    A dense model's rows have the same logits, bit by bit, whatever is beside them, which a second way would end.

    Args:
        attention: of each layer.
        states: their pages.
    """

    def __init__(
        self, model: Any, attention: list[AttentionStruct], states: PagedStates, kernels: NativeKernels
    ) -> None:
        inner = model.model
        self._embed = inner.embed_tokens
        self._norm, self._head = inner.norm, model.lm_head
        self._modules, self._attention = list(inner.layers), attention
        self._layers: list[SingleTokenLayer] = [layer.__dict__["forward"] for layer in inner.layers]
        self._angles = Rotations(inner.rotary_emb, {layer.attention.type for layer in self._layers})
        self._states, self._kernels = states, kernels
        self._hooks = [
            hooks
            for module in (*inner.layers, inner.norm)
            for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]

    @classmethod
    def of(
        cls, model: Any, attention: dict[int, AttentionStruct], states: PagedStates, kernels: NativeKernels
    ) -> FewRows | None:
        """That of a model, or `None` if it is of no known kind or some of its layers have no fast path."""
        if fast_path_of(model, "model") is None or model.model.embed_tokens.weight.dtype != torch.bfloat16:
            return None
        forwards = [layer.__dict__.get("forward") for layer in model.model.layers]
        known = all(isinstance(each, SingleTokenLayer) and each.is_native for each in forwards)
        if not known or not any(each.sparse.has_experts for each in forwards) or len(attention) < len(forwards):
            return None
        return cls(model, [attention[index] for index in range(len(forwards))], states, kernels)

    def takes(self, tokens: int) -> bool:
        """Whether it computes so many rows now: nobody listens to a layer, or has its routing recorded."""
        return tokens <= MAX_TOKENS and not any(self._hooks) and all(layer.is_native for layer in self._layers)

    def __call__(self, ids: list[int], positions: list[int], pieces: Pieces) -> torch.Tensor:
        """Logits [R, V] after one token of each row.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        rows = self._embed(torch.tensor([ids]))
        angles = self._angles.of(rows, torch.tensor([positions]))
        hidden = rows.float()
        for layer, module, struct in zip(self._layers, self._modules, self._attention, strict=True):
            paged: PagedLayerStruct = self._states.layer_of(module.self_attn)[1]
            cos, sin = angles[layer.attention.type]
            begun_ns = clock.now_ns()
            out = attention_rows(self._kernels, struct, paged, pieces, hidden[0], cos[0], sin[0])[None]
            if RECORDER.on:
                RECORDER.dense(lanes.ATTENTION, begun_ns, clock.now_ns(), layer.number)
            assert layer.sparse is not None
            hidden = layer.sparse.step(out)
        logits: torch.Tensor = product(self._head, one_by_one(self._norm, hidden))[0]
        return logits
