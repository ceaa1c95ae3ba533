"""Launches the kernels: products of visits with stored matrices, with bias and activation."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from engine.formats import TiledFormat
from engine.kernels.activation import Activation
from engine.kernels.gpu.kernels_plain import plain_by_group, plain_by_visit
from engine.kernels.gpu.kernels_tiled import tiled_by_group, tiled_by_visit
from engine.kernels.gpu.stored import ExpertGroups, RecordTable, StoredMatrix

_ROWS, _COLUMNS = 8, 256
"""Block of a plain matrix per visit."""
_WORDS = 32
"""Vectors of a tile read at a time: 4 KiB of weights over both halves."""
_GROUP_OUTPUTS = 64


class TritonProducts:
    """`Products` and `GroupedProducts` by Triton's kernels."""

    name = "triton"
    most_visits = 32  # a token's experts differ, so up to here sorting gains nothing
    adds_up = False

    def multiply_visits(
        self,
        matrix: StoredMatrix,
        table: RecordTable,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        width: int,
        activation: Activation | None = None,
        *,
        shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Products.multiply_visits`."""
        assert shares is None
        ids = _only_first(x.device)[: len(x)] if ids is None else ids
        return multiply_visits(matrix, table, x, ids, width, activation)

    def takes(self, matrix: StoredMatrix) -> bool:  # noqa: ARG002
        """See `GroupedProducts.takes`."""
        return True

    def multiply_groups(
        self,
        matrix: StoredMatrix,
        table: RecordTable,
        x: torch.Tensor,
        visits: int,
        groups: ExpertGroups,
        block: int,
        width: int,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """See `GroupedProducts.multiply_groups`."""
        return multiply_groups(matrix, table, x, visits, groups, block, width, activation)


@cache
def _only_first(place: torch.device) -> torch.Tensor:
    return torch.zeros(TritonProducts.most_visits, dtype=torch.int64, device=place)


def multiply_visits(
    matrix: StoredMatrix,
    table: RecordTable,
    x: torch.Tensor,
    ids: torch.Tensor,
    width: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """See `Products.multiply_visits`."""
    visits = len(ids)
    out = x.new_empty(visits, matrix.outputs)
    after = _after(matrix, activation)
    if matrix.format is None:
        grid = (visits, triton.cdiv(matrix.outputs, _ROWS))
        args = (matrix.weights_at, matrix.bias_at, len(table), matrix.columns, matrix.rows, width)
        _launch(plain_by_visit, grid, (x, ids, table.offsets, table.base, out, *args), after, N=_ROWS, K=_COLUMNS)
        return out
    grid = (visits, triton.cdiv(matrix.rows, 32))
    _launch(
        tiled_by_visit, grid, (x, ids, table.offsets, table.base, out, *_tiles(matrix, table, width)), after,
        **constants_of(matrix.format), WORDS=_WORDS,
    )  # fmt: skip
    return out


def multiply_groups(
    matrix: StoredMatrix,
    table: RecordTable,
    x: torch.Tensor,
    visits: int,
    groups: ExpertGroups,
    block: int,
    width: int,
    activation: Activation | None = None,
) -> torch.Tensor:
    """See `GroupedProducts.multiply_groups`."""
    out = x.new_empty(visits, matrix.outputs)
    after = _after(matrix, activation)
    places = (x, groups.order, groups.block_expert, groups.block_begin, groups.ends, table.offsets, table.base, out)
    programs = len(groups.block_expert)
    after |= {"DOT": operand_type(matrix.dtype), "M": block}
    if matrix.format is None:
        grid = (programs, triton.cdiv(matrix.outputs, _GROUP_OUTPUTS))
        args = (matrix.weights_at, matrix.bias_at, len(table), matrix.columns, matrix.rows, width)
        _launch(
            plain_by_group, grid, (*places, *args), after, N=_GROUP_OUTPUTS, K=64 if matrix.dtype.itemsize == 2 else 32
        )
        return out
    grid = (programs, triton.cdiv(triton.cdiv(matrix.rows, 32), _GROUP_OUTPUTS // 16))
    _launch(
        tiled_by_group, grid, (*places, *_tiles(matrix, table, width)), after,
        **constants_of(matrix.format), BLOCKS=_GROUP_OUTPUTS // 16, WORDS=4 * matrix.format.code_bits,
    )  # fmt: skip
    return out


def operand_type(dtype: torch.dtype) -> Any:
    """Operand type of the matrix units; Triton's interpreter, which uses numpy, has no bf16."""
    if triton.knobs.runtime.interpret or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def constants_of(of_weights: TiledFormat) -> dict[str, Any]:
    """What the kernels of tiled matrices are compiled for."""
    return {
        "NIBBLES": of_weights.code_bits == 4,
        "ZEROS": of_weights.has_zeros,
        "TABLE": of_weights.table is not None,
        "SCALES": getattr(tl, of_weights.scale_type),
    }


def _tiles(matrix: StoredMatrix, table: RecordTable, width: int) -> tuple[int, ...]:
    at = (matrix.weights_at, matrix.scales_at, matrix.zeros_at, matrix.bias_at, matrix.table_at)
    return (*at, len(table), triton.cdiv(matrix.columns, 32), matrix.columns, matrix.rows, width)


def _after(matrix: StoredMatrix, activation: Activation | None) -> dict[str, Any]:
    limit = activation.limit if activation is not None else math.inf
    has_limit = math.isfinite(limit)
    return {
        "limit": limit if has_limit else 0.0,
        "alpha": activation.alpha if activation is not None else 1.0,
        "PAIRING": int(matrix.pairing),
        "HAS_BIAS": matrix.bias_at >= 0,
        "KIND": int(activation.kind) if activation is not None else -1,
        "HAS_LIMIT": has_limit,
    }


def _launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], after: dict[str, Any], **constants: Any) -> None:
    place = args[0].device
    if place.type == "cuda":
        # Triton launches on the current card, not on the tensors' card.
        with torch.cuda.device(place):
            kernel[grid](*args, **after, **constants)
    else:
        kernel[grid](*args, **after, **constants)
