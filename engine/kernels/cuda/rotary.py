"""Norms of queries and keys and their rotation by the kernel in `rotary.cu`: one launch instead of dozens."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.norm import STATES

ROTARY_KERNEL = Kernel("rotary.cu", "rotary_kernel", 128)
_HEADS_OF_BLOCK = 4


class HeadsOf(ctypes.Structure):
    """`HeadsOf` in rotary.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "weights")),
        *((name, ctypes.c_int64) for name in ("row_step", "head_step")),
        ("heads", ctypes.c_int),
    )


class RotaryArguments(ctypes.Structure):
    """`RotaryArguments` in rotary.cu."""

    _fields_ = (
        ("queries", HeadsOf),
        ("keys", HeadsOf),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines")),
        ("angle_row_step", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("dim", "rotated", "angle_step", "is_interleaved", "rounds_once")),
        *((name, ctypes.c_int) for name in ("norms_all_heads", "norm_rounds_once")),
        *((name, ctypes.c_int) for name in ("states", "weight_states", "angle_states")),
        *((name, ctypes.c_float) for name in ("epsilon", "offset")),
    )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and keys before they are rotated.

    Attributes:
        query_weight, key_weight: contiguous, of one type in `STATES`: [dim], or [heads x dim] if `all_heads`.
        epsilon: added to the mean square.
        offset: added to weights.
        rounds_once: whether the weight multiplies before rounding, not after.
        all_heads: whether the mean is over all heads together.
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float
    offset: float
    rounds_once: bool
    all_heads: bool


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """What a family means by a rotation.

    Attributes:
        is_interleaved: pairs are neighbouring elements, not half of the rotated ones apart.
        angle_step: from a pair's angle to the next one's.
        angles_of_pair: how often the angle of each pair is there.
        rounds_once: whether only the result is rounded to the states' type, not each product.
    """

    is_interleaved: bool
    angle_step: int
    angles_of_pair: int
    rounds_once: bool


class CudaRotary:
    """Rotations on one card."""

    def __init__(self, card: Launcher) -> None:
        self._card = card

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        form: RotaryForm,
        norms: HeadNorms | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms and rotates one token's heads, or several tokens'.

        Args:
            queries: [rows, heads, dim] of a type in `STATES`, elements of a head contiguous.
            keys: [rows, kv_heads, dim] of the same type.
            cosines, sines: [rows or 1, angles] with the same strides; those of each row, or of all.
            norms: applied before.

        Returns:
            Both, contiguous.
        """
        dim = queries.shape[2]
        outs = [x.new_empty(x.shape) for x in (queries, keys)]
        weights = (norms.query_weight, norms.key_weight) if norms is not None else (None, None)
        described = [
            HeadsOf(
                x=x.data_ptr(), out=out.data_ptr(), weights=weight.data_ptr() if weight is not None else None,
                row_step=x.stride(0), head_step=x.stride(1), heads=x.shape[1],
            )
            for x, out, weight in zip((queries, keys), outs, weights, strict=True)
        ]  # fmt: skip
        arguments = RotaryArguments(
            queries=described[0], keys=described[1], cosines=cosines.data_ptr(), sines=sines.data_ptr(),
            angle_row_step=cosines.stride(0) if len(cosines) > 1 else 0, dim=dim,
            rotated=2 * (cosines.shape[1] // form.angles_of_pair), angle_step=form.angle_step,
            is_interleaved=form.is_interleaved, rounds_once=form.rounds_once, states=STATES[queries.dtype],
            angle_states=STATES[cosines.dtype],
        )  # fmt: skip
        if norms is not None:
            arguments.norms_all_heads, arguments.norm_rounds_once = norms.all_heads, norms.rounds_once
            arguments.weight_states = STATES[norms.query_weight.dtype]
            arguments.epsilon, arguments.offset = norms.epsilon, norms.offset
        heads = queries.shape[1] + keys.shape[1]
        self._card.launch(ROTARY_KERNEL, (-(-heads // _HEADS_OF_BLOCK), len(queries), 1), arguments)
        return outs[0], outs[1]
