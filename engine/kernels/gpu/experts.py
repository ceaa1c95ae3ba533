"""One layer's experts on a card: two launches for all visits (token-expert pairs) of a step, whatever their slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.formats.tiles import Pairing
from engine.kernels.cuda.products import CudaGroups
from engine.kernels.gpu.stored import (
    ALIGNMENT,
    CardKernels,
    ExpertGroups,
    RecordTable,
    group,
    known_groups,
    stored_matrix,
)
from engine.kernels.interface import (
    ByGroup,
    ExpertMath,
    GroupedKernel,
    LayerRecords,
    Upload,
)

_MANY_VISITS = 1024
"""From this many visits per expert, large blocks are used."""
_INNER_BYTES = 64 * 2**20
"""Limit of intermediate results; longer steps are split."""
_SUMMED_TOKENS = 1024
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def can_compute(layer: LayerRecords, math: ExpertMath) -> bool:
    """Whether the kernels support these experts; `engine.kernels.gpu.proof` says whether a card runs them."""
    layout, activation = layer.layout, math.activation
    if any(part.offset % ALIGNMENT for part in layout.parts) or layout.nbytes % ALIGNMENT:
        return False
    if layout.tiled:
        names = [part.name for part in layout.unquantised.parts if layout.is_tiled(part.name)]
        if not all(layout.tiled_shape(name).format.on_card for name in names):
            return False
        return activation is not None and (layout.pairing is activation.pairing or activation.pairing is Pairing.PLAIN)
    if layout.kinds:  # which are there only where every type is read
        return activation is not None
    dtypes = {part.dtype for part in layout.parts}
    return len(dtypes) == 1 and dtypes.pop() in _PLAIN


class CardExperts:
    """Computes one layer's experts without synchronising with the card, so its steps can be captured in a graph.

    Few visits: each one separately. Many: sorted by expert on the card, and computed in blocks by its matrix units, or
    by `many_tokens` where there are no kernels for that. An expert's output for a token is rounded to the type of the
    hidden states; sums over a token's experts are in fp32.
    """

    is_capturable = True

    def __init__(
        self, layer: LayerRecords, math: ExpertMath, kernels: CardKernels, many_tokens: GroupedKernel | None = None
    ) -> None:
        self.math = math
        self._kernels, self._many_tokens = kernels, many_tokens
        known = math.activation
        self._first = stored_matrix(
            layer, math.first, math.first_bias, known.pairing if known is not None else Pairing.PLAIN
        )
        self._down = stored_matrix(layer, "down_proj", math.down_bias, Pairing.PLAIN)
        many = kernels.many
        self._many = many if many is not None and many.takes(self._first) and many.takes(self._down) else None
        if self._many is not None or many_tokens is not None:
            self.fewest_in_groups = kernels.most_few + 1
        self._table = RecordTable(list(layer.pieces))
        self._experts = layer.num_experts
        self._dtype = self._down.dtype
        widest = max(self._first.rows, self._down.rows) * self._dtype.itemsize
        self.rows_at_once = max(256, _INNER_BYTES // widest)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        tokens, width = top_k_index.shape
        few_only, most_few = self._many is None, self._kernels.most_few
        if few_only and tokens * width > most_few and self._many_tokens is not None:
            return self._many_tokens(hidden_states, top_k_index, top_k_weights)
        hidden = hidden_states.to(self._dtype).contiguous()
        at_once = max(1, (most_few if few_only else self.rows_at_once) // max(width, 1))
        if tokens <= at_once:
            result = self._compute(hidden, top_k_index, top_k_weights)
        else:
            pieces = -(-tokens // at_once)
            cut = [tensor.tensor_split(pieces) for tensor in (hidden, top_k_index, top_k_weights)]
            result = torch.cat([self._compute(*piece) for piece in zip(*cut, strict=True)])
        return result if result.dtype == hidden_states.dtype else result.to(hidden_states.dtype)

    def for_groups(self, experts: Sequence[int], counts: Sequence[int], upload: Upload) -> ByGroup:
        many = self._many
        if many is None:
            assert self._many_tokens is not None
            return self._many_tokens.for_groups(experts, counts, upload)
        block = _block(sum(counts))
        groups = known_groups(experts, counts, self._experts, block).on(self._table.offsets.device, upload)

        def compute(rows: torch.Tensor) -> torch.Tensor:
            out = self._in_groups(many, rows.to(self._dtype), len(rows), groups, block, 1)
            if self.math.norm is not None:
                out = self.math.norm(out)
            return out.to(rows.dtype)

        return compute

    @property
    def finds_slots(self) -> bool:
        """Whether `in_slots` can be called."""
        return self.math.norm is None and self._dtype == torch.bfloat16

    def in_slots(self, hidden: torch.Tensor, ids: torch.Tensor, slot_of: torch.Tensor) -> torch.Tensor:
        """What each of a few rows' experts makes of it, for records that are slots.

        Args:
            hidden: bf16 [R, H], contiguous.
            ids: int64 [R * k].
            slot_of: int32 [experts]: the slot of each, or -1.

        Returns:
            bf16 [R * k, H]; zeros for experts without a slot.
        """
        few, width = self._kernels.few, len(ids) // len(hidden)
        inner = few.multiply_visits(self._first, self._table, hidden, ids, width, self.math.activation, slot_of=slot_of)
        return few.multiply_visits(self._down, self._table, self._gate(inner), ids, 1, slot_of=slot_of)

    def _compute(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, width = index.shape
        ids = index.reshape(-1).long()
        if not len(ids):
            return torch.zeros_like(hidden)
        few, many = self._kernels.few, self._many
        if many is not None and len(ids) > self._kernels.most_few:
            invalid = self._invalid(ids)
            block = _block(len(ids))
            groups = group(ids.masked_fill(invalid, self._experts), self._experts, block)
            out = self._in_groups(many, hidden, len(ids), groups, block, width).masked_fill_(invalid[:, None], 0)
        else:
            inner = few.multiply_visits(self._first, self._table, hidden, ids, width, self.math.activation)
            inner = self._gate(inner)
            if self.math.norm is None:
                return few.multiply_visits(self._down, self._table, inner, ids, 1, shares=weights.float().contiguous())
            out = few.multiply_visits(self._down, self._table, inner, ids, 1)
        if self.math.norm is not None:
            out = self.math.norm(out).masked_fill(self._invalid(ids)[:, None], 0)
        if width == 1:
            return torch.mul(out, weights.float(), out=torch.empty_like(out))
        result = torch.empty_like(hidden)
        rows, shares = out.view(tokens, width, -1), weights.float()[:, :, None]
        for begin in range(0, tokens, _SUMMED_TOKENS):
            some = slice(begin, begin + _SUMMED_TOKENS)
            result[some] = (rows[some].float() * shares[some]).sum(1)
        return result

    def _in_groups(
        self, many: CudaGroups, hidden: torch.Tensor, visits: int, groups: ExpertGroups, block: int, width: int
    ) -> torch.Tensor:
        activation = self.math.activation
        inner = many.multiply_groups(self._first, self._table, hidden, visits, groups, block, width, activation)
        return many.multiply_groups(self._down, self._table, self._gate(inner), visits, groups, block, 1)

    def _gate(self, inner: torch.Tensor) -> torch.Tensor:
        """Activations that the kernels do not support are left to the module."""
        return inner if self.math.activation is not None else self.math.gate(inner).contiguous()

    def _invalid(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids < 0) | (ids >= self._experts)


def _block(visits: int) -> int:
    return 64 if visits >= _MANY_VISITS else 16
