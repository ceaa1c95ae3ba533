"""Cosines and sines of positions by the kernel in `angles.cu`: one launch for a step, where operators take nine."""

from __future__ import annotations

import ctypes

import torch

from engine.kernels.cuda.compiled import Kernel
from engine.kernels.cuda.driver import Launcher
from engine.kernels.cuda.norm import STATES

ANGLES_KERNEL = Kernel("angles.cu", "angles_kernel", 128)


class AngleArguments(ctypes.Structure):
    """`AngleArguments` in angles.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "frequencies", "cosines", "sines")),
        *((name, ctypes.c_int) for name in ("pairs", "times", "step", "states")),
        ("scale", ctypes.c_float),
    )


class CudaAngles:
    """Angles on one card."""

    def __init__(self, card: Launcher) -> None:
        self._card = card

    def __call__(
        self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype, times: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, times `scale`, of each position by each frequency.

        Args:
            positions: int64 [rows], contiguous.
            frequencies: float32 [pairs], contiguous.
            dtype: of the results, one in `STATES`.
            times: how often a row's angles are repeated.

        Returns:
            Both [rows, times x pairs], contiguous.
        """
        shape = len(positions), times * len(frequencies)
        cosines, sines = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
        self._launch(positions, frequencies, cosines, sines, scale, times=times, step=1)
        return cosines, sines

    def turned(self, positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
        """The same as complex numbers, complex64 [rows, pairs]."""
        both = torch.empty(len(positions), len(frequencies), 2, dtype=torch.float32, device=positions.device)
        self._launch(positions, frequencies, both, both.flatten()[1:], scale, times=1, step=2)
        return torch.view_as_complex(both)

    def _launch(
        self,
        positions: torch.Tensor,
        frequencies: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        scale: float,
        *,
        times: int,
        step: int,
    ) -> None:
        arguments = AngleArguments(
            positions=positions.data_ptr(), frequencies=frequencies.data_ptr(), cosines=cosines.data_ptr(),
            sines=sines.data_ptr(), pairs=len(frequencies), times=times, step=step, states=STATES[cosines.dtype],
            scale=scale,
        )  # fmt: skip
        self._card.launch(ANGLES_KERNEL, (len(positions), 1, 1), arguments)
