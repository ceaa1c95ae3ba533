"""The angles by which a model on a card rotates queries and keys, of few tokens by one launch for all its layers."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from engine.families.library import own_forward, take_over
from engine.kernels.cuda.compiled import STATES, Kernel
from engine.kernels.cuda.driver import OnCard, on_card
from engine.kernels.gpu.norms import is_alike

ANGLES_KERNEL = Kernel("angles.cu")


class CudaAngles(OnCard):
    """Angles on one card."""

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
        self.start(
            ANGLES_KERNEL, (len(positions), 1, 1), positions=positions, frequencies=frequencies, cosines=cosines,
            sines=sines, pairs=len(frequencies), times=times, step=step, states=cosines.dtype, scale=scale,
        )  # fmt: skip


_log = logging.getLogger(__name__)

_FEW_ROWS = 16
_TRIED = ((0, 3, 77, 1003, 100_003),)
_CHANGING = ("dynamic", "longrope")
"""Kinds of angles whose frequencies depend on how long the context is."""
_COMPLEX = 0
_TIMES = (2, 1, _COMPLEX)
"""How often the angles of a token are given: for both halves of a head, or once; or as complex numbers."""


class CardAngles:
    """The `forward` of the module that makes cosines and sines of positions."""

    def __init__(self, module: Any, kernel: CudaAngles, times: int) -> None:
        self.in_library = module.forward
        self._module, self._kernel, self._times = module, kernel, times

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """States [B, T, hidden] and positions [B or 1, T] -> what the library's gives."""
        frequencies = self._module.inv_freq
        if (
            position_ids.dtype != torch.int64
            or position_ids.dim() != 2
            or not 0 < position_ids.numel() <= _FEW_ROWS
            or x.dtype not in STATES
            or any(each.device != x.device for each in (position_ids, frequencies))
        ):
            return self.in_library(x, position_ids)
        rows, scale = position_ids.reshape(-1), float(self._module.attention_scaling)
        if self._times == _COMPLEX:
            return self._kernel.turned(rows, frequencies, scale).view(*position_ids.shape, -1)
        both = self._kernel(rows, frequencies, scale, x.dtype, self._times)
        return tuple(each.view(*position_ids.shape, -1) for each in both)


def speed_up_angles(module: Any, dtype: torch.dtype) -> bool:
    """Gives the module that makes angles, if it lies on a card, its forward, if that has been seen to give the same.

    Args:
        module: of the library, called with states and positions.
        dtype: of the model's states.
    """
    frequencies, kind = getattr(module, "inv_freq", None), str(getattr(module, "rope_type", ""))
    if (
        not isinstance(frequencies, torch.Tensor)
        or (frequencies.dim(), frequencies.dtype) != (1, torch.float32)
        or not isinstance(getattr(module, "attention_scaling", None), int | float)
        or any(each in kind for each in _CHANGING)
        or list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]
        or own_forward(module) is not None
        or dtype not in STATES
    ):
        return False
    kernel = on_card(frequencies.device, CudaAngles)
    made = _made(module, kernel, frequencies, dtype) if kernel is not None else None
    return made is not None and take_over([(module, made)]) > 0


@torch.inference_mode()
def _made(module: Any, kernel: CudaAngles, frequencies: torch.Tensor, dtype: torch.dtype) -> CardAngles | None:
    x = torch.zeros(1, len(_TRIED[0]), 1, dtype=dtype, device=frequencies.device)
    positions = torch.tensor(_TRIED, device=frequencies.device)
    try:
        wanted = module.forward(x, positions)
        for times in _TIMES:
            made = CardAngles(module, kernel, times)
            if _are_alike(made(x, positions), wanted):
                return made
    except Exception:  # any compiler or driver error, or whatever a module wants to be given: operators do it
        _log.info("angles are not computed by a kernel on %s", frequencies.device, exc_info=True)
    return None


def _are_alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and is_alike(*map(_as_real, (found, wanted)))
    return all(map(_are_alike, found, wanted))


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
