"""A graphics card through `torch.cuda`: NVIDIA's, and AMD's with a ROCm build of torch."""

from __future__ import annotations

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.copy_log import CopyLog
from engine.devices.cuda_clock import CudaClock, new_stream
from engine.devices.cuda_graphs import CudaCapture, capture_stream
from engine.devices.cuda_stream import CudaStream
from engine.devices.device import Device
from engine.devices.host_memory import aligned
from engine.devices.memory_budget import MemoryBudget
from engine.devices.pinned_memory import PinnedMemory

HEADROOM_BYTES = 2**30
"""Bytes left to the driver, torch's workspaces and the desktop."""


def cuda_count() -> int:
    """Number of cards that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def open_cuda(index: int = 0, vram_bytes: int | None = None) -> Device:
    """Opens a card.

    Args:
        vram_bytes: memory budget; None: all free memory except `HEADROOM_BYTES`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if there is no such card, or it does not respond.
    """
    count = cuda_count()
    if index >= count:
        what = f"no graphics card number {index}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"This machine has {what}: use cpu, or run `switchyard doctor`."
        )
    name = f"cuda:{index}"
    place = torch.device("cuda", index)
    try:
        free, _ = torch.cuda.mem_get_info(place)
        clock = CudaClock(place)
        # Weight copies may take long; activations need a stream of higher priority.
        queues = (
            torch.cuda.default_stream(place),
            new_stream(place),
            new_stream(place),
            new_stream(place, priority=-1),
        )
        to_capture = capture_stream(place)
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            f"Graphics card {name} does not respond ({text}): restart the computer or use --device cpu.",
        ) from error
    usable = max(0, free - HEADROOM_BYTES)
    log = CopyLog()
    roles = ("compute", "h2d", "d2h", "small copies")
    compute, h2d, d2h, small = (
        CudaStream(f"{name} {role}", queue, clock, log) for role, queue in zip(roles, queues, strict=True)
    )
    pinned = PinnedMemory(place)

    def allocate(nbytes: int) -> torch.Tensor:
        memory = aligned(nbytes, place)
        # torch may return memory that its current stream still uses, while other streams will write to it.
        torch.cuda.current_stream(place).synchronize()
        return memory

    def close() -> None:
        for stream in (compute, h2d, d2h, small):
            stream.close()
        pinned.close()

    return Device(
        name=name,
        torch_device=place,
        memory=MemoryBudget(name, usable if vram_bytes is None else min(usable, vram_bytes), allocate),
        host_memory=pinned,
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=close,
        compute_follows_caller=True,
        new_capture=lambda: CudaCapture(place, to_capture),
    )
