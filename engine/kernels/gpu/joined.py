"""Linear layers of the same input as one product: queries, keys and values, or gates and ups.

A card starts one launch instead of three, and a projection to a few hundred rows no longer leaves most of it idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard, cast

import torch

from engine.formats.tiles import TiledMatrix
from engine.formats.weight_format import TILE_ROWS
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.repack import Blocks

SIBLINGS = (("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Modules that transformers' attention and MLPs call with the same tensor, one after the other."""


Matrices = Sequence[TiledMatrix] | Sequence[Blocks]


def can_join(matrices: Sequence[TiledMatrix | Blocks]) -> TypeGuard[Matrices]:
    """Whether matrices are of one format and width, and end where a block of tiles does."""
    first = matrices[0]
    if len(matrices) < 2 or any(type(each) is not type(first) for each in matrices):
        return False
    if isinstance(first, Blocks):
        return all(isinstance(each, Blocks) and _kind(each) == _kind(first) for each in matrices)
    return all(isinstance(each, TiledMatrix) and _go_together(first, each) for each in matrices)


def _kind(blocks: Blocks) -> tuple[str, int]:
    return blocks.kind.name, blocks.columns


def _go_together(first: TiledMatrix, each: TiledMatrix) -> bool:
    return (
        each.shape.format is first.shape.format
        and each.shape.columns == first.shape.columns
        and each.shape.pairing is first.shape.pairing
        and each.shape.rows % TILE_ROWS == 0
        and (each.table is None or first.table is None or torch.equal(each.table, first.table))
    )


def _joined(matrices: Matrices) -> TiledMatrix | Blocks:
    if isinstance(matrices[0], Blocks):
        return Blocks(matrices[0].kind, torch.cat([each.in_order for each in cast("Sequence[Blocks]", matrices)]))
    tiles = cast("Sequence[TiledMatrix]", matrices)
    first = tiles[0]
    return TiledMatrix(
        replace(first.shape, rows=sum(each.shape.rows for each in tiles)),
        torch.cat([each.weights for each in tiles]),
        torch.cat([each.scales for each in tiles]),
        torch.cat([each.zeros for each in tiles if each.zeros is not None]) if first.zeros is not None else None,
        first.table,
    )


class JoinedLinears:
    """The forwards of some linear layers in tiles or blocks.

    Args:
        matrices: that `can_join`, on any device; copied to `device`.
        biases: of each, if any.

    Attributes:
        record: all of them, uint8 [1, bytes].
        forwards: of each layer.
    """

    def __init__(
        self,
        matrices: Matrices,
        biases: Sequence[torch.Tensor | None],
        device: torch.device,
        kernels: CardKernels,
    ) -> None:
        rows = [each.rows if isinstance(each, Blocks) else each.shape.rows for each in matrices]
        joined = _joined(matrices)
        bias = None
        if any(each is not None for each in biases):
            one = next(each for each in biases if each is not None)
            bias = torch.cat([b if b is not None else one.new_zeros(n) for b, n in zip(biases, rows, strict=True)])
        self._linear = CardLinear(joined, bias, device, kernels)
        self.record = self._linear.record
        ends = torch.tensor(rows).cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.forwards: list[Callable[[torch.Tensor], torch.Tensor]] = [
            _One(self, number, begin, end) for number, (begin, end) in enumerate(spans)
        ]
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._waiting: set[int] = set()

    def part(self, number: int, begin: int, end: int, input: torch.Tensor) -> torch.Tensor:
        """[.., columns] -> [.., end - begin]: the first layer that is asked computes all for a few tokens."""
        if not self._linear.is_for_few(input):
            return self._linear.rows(input, begin, end)
        if self._input is not input or number not in self._waiting:
            self._input, self._output = input, self._linear(input)
            self._waiting = set(range(len(self.forwards)))
        self._waiting.discard(number)
        assert self._output is not None
        mine = self._output[..., begin:end].contiguous()
        if not self._waiting:  # nobody else will ask: the next tensor may have the same place
            self._input = self._output = None
        return mine


class _One:
    """The `forward` of one of them."""

    def __init__(self, joined: JoinedLinears, number: int, begin: int, end: int) -> None:
        self._joined, self._mine = joined, (number, begin, end)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return self._joined.part(*self._mine, input)
