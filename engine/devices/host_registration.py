"""Pins memory that exists already, through CUDA's (or ROCm's) runtime."""

from __future__ import annotations

import contextlib

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card of the process


def register(address: int, nbytes: int, device: torch.device) -> bool:
    """Pins [address, address + nbytes); whether that worked.  The address is page-aligned."""
    with torch.cuda.device(device):
        if _succeeded("cudaHostRegister", address, nbytes, _PORTABLE):
            return True
        _clear_last_error(device)
    return False


def unregister(address: int, device: torch.device) -> None:
    """Unpins what begins at `address`."""
    with torch.cuda.device(device):
        if not _succeeded("cudaHostUnregister", address):
            _clear_last_error(device)


def _succeeded(function: str, *arguments: int) -> bool:
    return int(getattr(torch.cuda.cudart(), function)(*arguments)) == 0  # type: ignore[no-untyped-call]


def _clear_last_error(device: torch.device) -> None:
    """The runtime keeps a refusal and hands it to the next kernel that is launched, which then seems to have failed."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)  # a kernel, not a memset: only launches look
