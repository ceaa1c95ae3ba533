"""What a model computes on: the devices that were asked for, and the CPU's threads."""

from __future__ import annotations

import torch

from engine.common.config import EngineConfig
from engine.devices.cuda import cuda_count
from engine.devices.device import Device
from engine.devices.opening import open_devices
from engine.hardware.core_kinds import compute_threads
from engine.hardware.probe import usable_cpus


def open_compute_devices(config: EngineConfig) -> list[Device]:
    """The devices asked for beside the CPU; whoever asks closes them.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if this machine has no such device, `INVALID_REQUEST` if nothing is called so.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if cuda_count() else "cpu"
    if name == "cpu":
        return []
    return open_devices(name, config.vram_bytes)


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per fast core; never more than this process may use."""
    count = max(1, min(threads or compute_threads(), usable_cpus()))
    torch.set_num_threads(count)
    return count
