"""Pins existing memory through the CUDA (or ROCm) runtime."""

from __future__ import annotations

import contextlib

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card of the process


def register(address: int, nbytes: int, device: torch.device) -> bool:
    """Pins [address, address + nbytes); returns whether that worked.  The address is page-aligned."""
    with torch.cuda.device(device):
        if _succeeded("cudaHostRegister", address, nbytes, _PORTABLE):
            return True
        _clear_last_error(device)
    return False


def unregister(address: int, device: torch.device) -> None:
    """Unpins the range at `address`."""
    with torch.cuda.device(device):
        if not _succeeded("cudaHostUnregister", address):
            _clear_last_error(device)


def _succeeded(function: str, *arguments: int) -> bool:
    return int(getattr(torch.cuda.cudart(), function)(*arguments)) == 0  # type: ignore[no-untyped-call]


def _clear_last_error(device: torch.device) -> None:
    """Clears the runtime's sticky error, which would otherwise be reported by the next kernel launch."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)  # a kernel, not a memset: only launches check
