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


class DenseRows:
    """A decoder layer's norm and gated MLP, with the residual."""

    def __init__(self, layer: Any) -> None:
        self._norm, self._mlp = layer.post_attention_layernorm, layer.mlp

    @classmethod
    def of(cls, layer: Any) -> DenseRows | None:
        """That of a layer, or `None` if it has experts, or an MLP of another kind."""
        mlp = layer.mlp
        is_gated = all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        return cls(layer) if is_gated and not hasattr(mlp, "experts") else None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, q, hidden] -> the same, with the MLP's result added."""
        mlp = self._mlp
        normed = one_by_one(self._norm, hidden)
        inner = one_by_one(mlp.act_fn, product(mlp.gate_proj, normed)) * product(mlp.up_proj, normed)
        return hidden + product(mlp.down_proj, inner)
