"""Buffers for what goes between a device and the CPU."""

from __future__ import annotations

import pytest
import torch

from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.activations import Activations
from engine.hardware.profiles import read_profile

ROOM = 700 * 1024


def test_a_buffer_is_as_small_as_needed_where_no_more_is_left() -> None:
    device = open_emulated(read_profile("slow-link"), vram_bytes=ROOM)
    activations = Activations(device)
    try:
        taken = device.memory.allocate(ROOM - 300 * 1024, MemoryCategory.EXPERTS)
        rows = (270 * 1024 // 512, 256)  # with what is rounded up: 512 KiB
        out = activations.outgoing(rows, torch.bfloat16)
        out.copy_(torch.randn(rows))
        landed, event = activations.to_device(out)
        event.wait()
        assert torch.equal(landed, out)
        with pytest.raises(DeviceMemoryError):
            activations.rows((301 * 1024 // 2,), torch.bfloat16)
        assert device.memory.free == 300 * 1024 - landed.nbytes
        assert activations.shrink() == landed.nbytes
        assert device.memory.free == 300 * 1024
        assert activations.shrink() == 0
        device.memory.release(taken)
        assert activations.rows((301 * 1024 // 2,), torch.bfloat16).nbytes == 301 * 1024 // 2 * 2
    finally:
        activations.close()
        device.close()
