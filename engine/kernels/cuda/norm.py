"""Root mean square norms, of residual sums too, by the kernel in `norm.cu`: one launch, where operators take nine."""

from __future__ import annotations

import ctypes

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.products import pointer

NORM_KERNEL = Kernel("norm.cu", "norm_kernel", 128)
STATES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `state_at` in states.h has them."""


class NormArguments(ctypes.Structure):
    """`NormArguments` in norm.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "added", "sum", "out", "weights")),
        ("step", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("width", "states", "weight_states", "rounds_once")),
        *((name, ctypes.c_float) for name in ("epsilon", "offset", "added_scale")),
    )


class CudaNorm:
    """Norms on one card."""

    def __init__(self, card: Launcher) -> None:
        self._card = card

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, *, offset: float, rounds_once: bool
    ) -> torch.Tensor:
        """x / sqrt(mean(x^2) + epsilon) * (weight + offset), in fp32.

        Args:
            x: [rows, width] of a type in `STATES`, elements of a row contiguous.
            weight: [width], contiguous, of a type in `STATES`; `None`: there is none, and no offset.
            rounds_once: whether the weight multiplies before rounding to x's type, not after.

        Returns:
            [rows, width], contiguous, of x's type.
        """
        out = x.new_empty(x.shape)
        self._launch(x, weight, out, epsilon=epsilon, offset=offset, rounds_once=rounds_once)
        return out

    def add(
        self,
        x: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        offset: float,
        rounds_once: bool,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + added * scale, each rounded to x's type, and its norm.

        Args:
            added: as x, contiguous.
        """
        out, both = x.new_empty(x.shape), x.new_empty(x.shape)
        self._launch(x, weight, out, added, both, epsilon=epsilon, offset=offset, rounds_once=rounds_once, scale=scale)
        return both, out

    def _launch(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        out: torch.Tensor,
        added: torch.Tensor | None = None,
        both: torch.Tensor | None = None,
        *,
        epsilon: float,
        offset: float,
        rounds_once: bool,
        scale: float = 1.0,
    ) -> None:
        rows, width = x.shape
        arguments = NormArguments(
            x=x.data_ptr(), added=pointer(added), sum=pointer(both), out=out.data_ptr(), weights=pointer(weight),
            step=x.stride(0), width=width, states=STATES[x.dtype],
            weight_states=STATES[weight.dtype] if weight is not None else 0,
            rounds_once=rounds_once, epsilon=epsilon, offset=offset, added_scale=scale,
        )  # fmt: skip
        self._card.launch(NORM_KERNEL, (rows, 1, 1), arguments)
