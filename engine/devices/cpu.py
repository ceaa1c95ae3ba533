"""The CPU as a device: its memory is the host's, and work runs immediately."""

from __future__ import annotations

import torch

from engine.devices.copy_log import CopyLog
from engine.devices.device import Device
from engine.devices.host_memory import PageableMemory, allocate_host, available_ram
from engine.devices.inline_stream import InlineStream
from engine.devices.memory_budget import MemoryBudget


def open_cpu(total: int | None = None) -> Device:
    """Opens the CPU.

    Args:
        total: memory budget in bytes; None: what is available now.
    """
    log = CopyLog()
    compute, h2d, d2h, small = (InlineStream(f"cpu {name}", log) for name in ("compute", "h2d", "d2h", "small copies"))

    def close() -> None:
        for stream in (compute, h2d, d2h, small):
            stream.close()

    return Device(
        name="cpu",
        torch_device=torch.device("cpu"),
        memory=MemoryBudget("cpu", available_ram() if total is None else total, allocate_host),
        host_memory=PageableMemory(),
        compute_stream=compute,
        h2d_stream=h2d,
        d2h_stream=d2h,
        small_copy_stream=small,
        copy_log=log,
        on_close=close,
    )
