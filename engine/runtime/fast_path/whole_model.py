"""A few tokens through all decoder layers, the last norm and the head in one native call.

Between two calls a processor's threads wait and memory rests; with a call for each part of a layer that came to a
hundredth of a step of a large model, and to a tenth of a small one's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.formats import BF16
from engine.kernels.native.linear import (
    address_of,
    is_plain,
    is_readable,
    keeps_rows_apart,
    linear_struct,
    out_of_memory,
)
from engine.kernels.native.structs import AnglesStruct, LayerStruct, ModelStruct
from engine.runtime.fast_path.delta_net import DeltaNet
from engine.runtime.fast_path.latent_attention import LatentAttention
from engine.runtime.fast_path.norms import epsilon_of, offset_of

if TYPE_CHECKING:
    from engine.runtime.fast_path.decoder_layer import SingleTokenLayer


class WholeModel:
    """All layers of a model and its head."""

    def __init__(self, layers: Sequence[SingleTokenLayer], norm: Any, head: Any) -> None:
        self._layers = layers
        self._attentions = [layer.attention for layer in layers]
        self._kernels = self._attentions[0].kernels
        self._structs = (LayerStruct * len(layers))()
        types = sorted({attention.type for attention in self._attentions})
        self._rotating = [
            max((each for each in self._attentions if each.type == name), key=lambda each: each.rotated)
            for name in types
        ]
        self._angles = (AnglesStruct * len(types))()
        for struct, layer in zip(self._structs, layers, strict=True):
            assert layer.sparse is not None
            if isinstance(layer.attention, LatentAttention):
                struct.latent = layer.attention.address
            elif isinstance(layer.attention, DeltaNet):
                struct.delta = layer.attention.address
            else:
                struct.attention = layer.attention.address
            struct.block = layer.sparse.address
            struct.chosen, struct.shares = layer.sparse.routing
            struct.angles = types.index(layer.attention.type)
        self._model = ModelStruct(
            ctypes.addressof(self._structs),
            norm.weight.data_ptr(),
            address_of(head.bias),
            linear_struct(head),
            epsilon_of(norm),
            len(layers),
            offset_of(norm),
        )
        self._address = ctypes.addressof(self._model)
        self._vocabulary: int = self._model.head.rows
        self._logits = torch.bfloat16 if self._model.head.format == BF16.native else torch.float32

    @classmethod
    def of(cls, layers: Sequence[SingleTokenLayer], norm: Any, head: Any) -> WholeModel | None:
        """That of a model, or `None` if some part of it is of another kind."""
        if (
            any(layer.sparse is None for layer in layers)
            or type(norm) is not type(layers[0].norm)
            or not is_plain(norm.weight)
            or not (keeps_rows_apart(head) and is_readable(head))
        ):
            return None
        return cls(layers, norm, head)

    def step(self, hidden: torch.Tensor, cache: Any, positions: dict[str, Any]) -> torch.Tensor | None:
        """Hidden states [1, q, hidden] of the next tokens, float32, contiguous -> logits [q, V] after each.

        Logits are float32 unless the head is in bf16.

        Args:
            cache: takes their keys and values.
            positions: their cosines and sines, by the type of the layers that they are for.

        Returns:
            `None`, and nothing was done, if these are not for one call.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        tokens = hidden.shape[1]
        if any(layer.sparse is None or not layer.sparse.can_step for layer in self._layers):
            return None
        held = [attention.angles_of(positions[attention.type], tokens) for attention in self._rotating]
        if not all(held) or not all(attention.can_claim(tokens, cache) for attention in self._attentions):
            return None
        for into, found in zip(self._angles, held, strict=True):
            assert found is not None
            into.cos, into.sin, into.angle_step, into.token_step = found.arguments
        for struct, attention in zip(self._structs, self._attentions, strict=True):
            rows = attention.claim(tokens, cache)
            assert rows is not None
            (
                struct.type,
                struct.keys,
                struct.values,
                struct.key_scales,
                struct.value_scales,
                struct.capacity,
                struct.length,
            ) = rows
        logits = hidden.new_empty((tokens, self._vocabulary), dtype=self._logits)
        kernels = self._kernels
        start, out = hidden.data_ptr(), logits.data_ptr()
        if kernels.model_step(kernels.pool, self._address, tokens, start, ctypes.addressof(self._angles), out):
            raise out_of_memory()
        return logits
