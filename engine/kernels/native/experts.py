"""One call into the native kernels for all experts of a layer, for decode steps and prefills."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from engine.formats import BF16
from engine.formats.tiles import Pairing
from engine.kernels.interface import ExpertKernel, ExpertMath, LayerRecords, are_even
from engine.kernels.native.library import NativeKernels, out_of_memory
from engine.kernels.native.structs import IN_BLOCKS, ExpertsStruct, RecordPartStruct

MAX_TOKENS = 8
"""Up to this many tokens a step counts as decode, bound by reading weights from RAM; more: prefill or batch."""


def can_compute(layer: LayerRecords, math: ExpertMath) -> bool:
    """Whether the native kernels support these experts: in RAM, known formats, known activation, no norm."""
    activation, layout = math.activation, layer.layout
    if layer.device.type != "cpu" or activation is None or math.norm is not None:
        return False
    if layout.kinds:
        others = [part for part in layout.unquantised.parts if not layout.blocks_of(part.name)]
        return all(len(part.shape) == 1 and part.dtype == torch.bfloat16 for part in others)
    if layout.tiled:
        known = all(
            layout.tiled_shape(part.name).format.native is not None
            if layout.is_tiled(part.name)
            else part.dtype == torch.bfloat16
            for part in layout.unquantised.parts
        )
        return known and (layout.pairing is activation.pairing or activation.pairing is Pairing.PLAIN)
    return {part.dtype for part in layout.parts} == {torch.bfloat16}


class NativeExperts:
    """Computes one layer's experts natively for bf16 tokens; other types go to `many_tokens`.

    Several tokens are grouped by expert: large groups convert the expert's weights to the layout of matrix instructions
    first; small ones multiply while the weights stream by.
    """

    def __init__(
        self, layer: LayerRecords, math: ExpertMath, kernels: NativeKernels, many_tokens: ExpertKernel
    ) -> None:
        self._beginnings, first_of = _beginnings(layer)
        self.struct = _struct(layer, math, self._beginnings, first_of)
        self._layer = layer  # the struct points into its records
        self._address = ctypes.addressof(self.struct)
        self._kernels = kernels
        self._many_tokens = many_tokens

    @property
    def native(self) -> NativeExperts:
        """This, also for who wraps it."""
        return self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`."""
        if hidden_states.dtype != torch.bfloat16:
            return self._many_tokens(hidden_states, top_k_index, top_k_weights)
        return self._compute(hidden_states, top_k_index, top_k_weights)

    def _compute(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden_states, index = hidden_states.contiguous(), index.contiguous()
        if index.dtype != torch.int64:
            index = index.long()
        weights = weights.float().contiguous()
        out = torch.empty_like(hidden_states)
        pointers = (tensor.data_ptr() for tensor in (hidden_states, index, weights, out))
        if self._kernels.experts(self._kernels.pool, self._address, *index.shape, *pointers):
            raise out_of_memory()
        return out


_Starts = ctypes.Array[ctypes.c_void_p]


def _beginnings(layer: LayerRecords) -> tuple[_Starts | None, Mapping[str, int]]:
    """Where experts begin that are not at equal distances: those of records, or of each part that lies by itself, and
    at which of them that part's are."""
    if layer.stacked or (len(layer.pieces) == 1 and all(map(are_even, layer.rows.values()))):
        return None, {}
    if len(layer.pieces) > 1:
        starts = [piece.data_ptr() + row * layer.layout.nbytes for piece in layer.pieces for row in range(len(piece))]
        return (ctypes.c_void_p * len(starts))(*starts), {}
    starts = [row.data_ptr() for rows in layer.rows.values() for row in rows]
    first_of = {name: at * layer.num_experts for at, name in enumerate(layer.rows)}
    return (ctypes.c_void_p * len(starts))(*starts), first_of


def _struct(
    layer: LayerRecords, math: ExpertMath, beginnings: _Starts | None, first_of: Mapping[str, int]
) -> ExpertsStruct:
    layout, activation = layer.layout, math.activation
    assert activation is not None
    offsets = {part.name: part.offset for part in layout.parts}
    base = layer.pieces[0].data_ptr()

    def place(name: str) -> tuple[int, int]:
        """Where a part of the first expert is, and how far that of the next one is from it, as `SwitchyardRecordPart`
        has them."""
        if beginnings is not None:
            return (0, first_of[name]) if first_of else (offsets[name], 0)
        first, *others = (row.data_ptr() for row in layer.rows[name][:2])
        return first - base, others[0] - first if others else 0

    def part(name: str, bias: str | None) -> RecordPartStruct:
        biases, bias_step = place(bias) if bias else (0, 0)
        if layout.kinds:
            places = [(*place(own), kind.id) for own, kind in layout.blocks_of(name)]
            (at, step, kind), (second, second_step, second_kind) = (*places, (0, 0, -1))[:2]
            steps = (step, second_step, bias_step)
            return RecordPartStruct(
                at, second, -1, -1, -1, biases, *steps, IN_BLOCKS, kind, second_kind, bias is not None
            )
        number = BF16.native
        if layout.is_tiled(name):
            number = layout.tiled_shape(name).format.native
        weights, *others = (offsets.get(f"{name}{suffix}", -1) for suffix in ("", "_scales", "_zeros", "_table"))
        steps = (layout.nbytes if beginnings is None else 0,) * 3
        return RecordPartStruct(weights, 0, *others, biases, *steps, number, 0, -1, bias is not None)

    hidden, inner = next(part.shape for part in layout.unquantised.parts if part.name == "down_proj")
    return ExpertsStruct(
        base,
        part(math.first, math.first_bias),
        part("down_proj", math.down_bias),
        layer.num_experts,
        hidden,
        inner,
        Pairing.HALVES if layout.kinds and activation.pairing else activation.pairing,
        activation.kind,
        activation.limit,
        activation.alpha,
        ctypes.addressof(beginnings) if beginnings is not None else None,
    )
