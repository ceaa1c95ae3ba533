"""The dense parts of a model for a few tokens at once, each as it would come out alone.

A product of a matrix with several vectors reads the weights once.  All else is computed token by token: torch sums and
rounds in another order where it has more to do, and what is tried ahead must not change an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.kernels.native.linear import keeps_rows_apart


def one_by_one(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """`compute` for each token of [1, q, n] alone, joined."""
    if rows.shape[1] == 1:
        return compute(rows)
    return torch.cat([compute(row) for row in torch.split(rows, 1, dim=1)], dim=1)


def product(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer of each token of [1, q, n] as if alone; where the kernels compute it, in one call."""
    result: torch.Tensor = linear(rows) if keeps_rows_apart(linear) else one_by_one(linear, rows)
    return result
