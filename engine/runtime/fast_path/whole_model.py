"""A few tokens through all decoder layers, the last norm and the head in one native call, of a sequence or several.

Between two calls a processor's threads wait and memory rests; with a call for each part of a layer that came to a
hundredth of a step of a large model, and to a tenth of a small one's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.formats import BF16
from engine.kernels.native.library import out_of_memory
from engine.kernels.native.linear import address_of, is_plain, is_readable, keeps_rows_apart, linear_struct
from engine.kernels.native.paged_attention import Pieces
from engine.kernels.native.structs import (
    AnglesStruct,
    LayerStruct,
    ModelStruct,
    PagesStruct,
    StreamsStruct,
)
from engine.runtime.fast_path.angles import Angles
from engine.runtime.fast_path.compressed_attention import CompressedAttention
from engine.runtime.fast_path.grouped_attention import GroupedAttention
from engine.runtime.fast_path.latent_attention import LatentAttention
from engine.runtime.fast_path.norms import epsilon_of, offset_of
from engine.runtime.fast_path.state_mixer import StateMixer

if TYPE_CHECKING:
    from engine.runtime.fast_path.decoder_layer import SingleTokenLayer


class WholeModel:
    """All layers of a model and its head.

    Args:
        streams: what adds up the last streams of hidden states, if there are several.
    """

    def __init__(self, layers: Sequence[SingleTokenLayer], norm: Any, head: Any, streams: Any = None) -> None:
        self._layers = layers
        self._streams = list[tuple[StreamsStruct, tuple[torch.Tensor, ...]]]()
        self._wide_norm = norm.weight.detach().float()
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
            elif isinstance(layer.attention, StateMixer):
                struct.delta = layer.attention.address
            elif isinstance(layer.attention, CompressedAttention):
                struct.compressed = layer.attention.address
            elif isinstance(layer.attention, GroupedAttention):
                struct.attention = layer.attention.address
            for place, module in enumerate(layer.streams or ()):
                struct.streams[place] = self._around(module)
            struct.block = layer.sparse.address if layer.sparse.is_there else None
            struct.chosen, struct.shares = layer.sparse.routing
            struct.angles = types.index(layer.attention.type)
        self._model = ModelStruct(
            ctypes.addressof(self._structs),
            norm.weight.data_ptr() if streams is None else None,
            address_of(head.bias),
            linear_struct(head),
            epsilon_of(norm),
            len(layers),
            offset_of(norm),
            *((self._wide_norm.data_ptr(), self._around(streams)) if streams is not None else ()),
        )
        self._vocabulary: int = self._model.head.rows
        self._logits = torch.bfloat16 if self._model.head.format == BF16.native else torch.float32

    @classmethod
    def of(cls, layers: Sequence[SingleTokenLayer], norm: Any, head: Any, streams: Any = None) -> WholeModel | None:
        """That of a model, or `None` if some part of it is of another kind."""
        if (
            any(layer.sparse is None for layer in layers)
            or type(norm) is not type(layers[0].norm)
            or not (is_plain(norm.weight) or streams is not None)
            or not (keeps_rows_apart(head) and is_readable(head))
        ):
            return None
        return cls(layers, norm, head, streams)

    def _around(self, module: Any) -> int:
        """The struct of what is round a part of a layer, or of what adds up the last streams."""
        rounds: int = getattr(module, "hc_sinkhorn_iters", 0)
        own = (module.fn, module.base, module.scale) if rounds else (module.hc_fn, module.hc_base, module.hc_scale)
        mix, base, scale = (each.detach().float().contiguous() for each in own)
        struct = StreamsStruct(
            mix.data_ptr(),
            base.data_ptr(),
            (ctypes.c_float * 3)(*scale.tolist()),
            module.input_norm.eps,
            module.hc_eps if rounds else module.eps,
            module.hc_mult,
            rounds,
        )
        self._streams.append((struct, (mix, base)))
        return ctypes.addressof(struct)

    def rows(
        self, hidden: torch.Tensor, held: Sequence[PagesStruct], pieces: Pieces, positions: dict[str, Any]
    ) -> torch.Tensor | None:
        """Hidden states [1, q, hidden] of the next tokens of several sequences, float32, contiguous -> logits [q, V]
        after each, as if each were alone, bit by bit.

        Logits are float32 unless the head is in bf16.

        Args:
            held: the pages of each layer, into which keys and values go.
            pieces: the sequences of these tokens.
            positions: their cosines and sines, by the type of the layers that they are for.

        Returns:
            `None`, and nothing was done, if these are not for one call.

        Raises:
            EngineError: `NOT_ENOUGH_MEMORY`.
        """
        angles = self._turn_to(positions, pieces.tokens)
        if angles is None:
            return None
        for struct, pages in zip(self._structs, held, strict=True):
            struct.held, struct.pieces = pages, pieces.address_for(pages)
        return self._compute(len(pieces.pieces), hidden, angles)

    def _turn_to(self, positions: dict[str, Any], tokens: int) -> list[Angles] | None:
        """The angles of so many tokens; `None` if they are of others, or no step may be computed now."""
        if any(layer.sparse is None or not layer.sparse.can_step for layer in self._layers):
            return None
        found = [attention.angles_of(positions[attention.type], tokens) for attention in self._rotating]
        angles = [each for each in found if each is not None]
        return angles if len(angles) == len(found) else None

    def _compute(self, pieces: int, hidden: torch.Tensor, angles: list[Angles]) -> torch.Tensor:
        for into, found in zip(self._angles, angles, strict=False):
            into.cos, into.sin, into.angle_step, into.token_step = found.arguments
        kernels, tokens = self._kernels, hidden.shape[1]
        logits = hidden.new_empty((tokens, self._vocabulary), dtype=self._logits)
        failed = kernels.model_step(
            kernels.pool,
            ctypes.addressof(self._model),
            pieces,
            tokens,
            hidden.data_ptr(),
            ctypes.addressof(self._angles),
            logits.data_ptr(),
        )
        if failed:
            raise out_of_memory()
        return logits


def one_by_one(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """`compute` for each token of [1, q, n] alone, joined."""
    if rows.shape[1] == 1:
        return compute(rows)
    return torch.cat([compute(row) for row in torch.split(rows, 1, dim=1)], dim=1)


def product(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer of each token of [1, q, n] as if alone; where the kernels compute it, in one call."""
    result: torch.Tensor = linear(rows) if keeps_rows_apart(linear) else one_by_one(linear, rows)
    return result
