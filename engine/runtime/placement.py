"""Where a model runs: which devices were asked for, which there are, and what of the model fits on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.devices.cuda import cuda_count
from engine.devices.device import Device
from engine.devices.opening import open_devices
from engine.hardware.core_kinds import compute_threads
from engine.hardware.probe import usable_cpus
from engine.planner.footprint import FEWEST_KV_TOKENS as FEWEST_KV_TOKENS
from engine.planner.footprint import KV_TOKENS as KV_TOKENS
from engine.planner.footprint import ROOMY_KV_TOKENS, SHORT_TOKENS, device_needs, piece_tokens
from engine.runtime.memory import gigabytes

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Bytes that a model needs on devices.

    Attributes:
        dense: weights other than experts, on each device.
        experts: all of them.
        kv: for one token of context, on all devices together.
        activations: for one token of a prompt while it is computed.
    """

    dense: tuple[int, ...]
    experts: int
    kv: int
    activations: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a model go.

    Attributes:
        devices: that it runs on; none if that is the CPU alone.
        all_experts: whether all experts are held on the device, and none in RAM.
        piece_tokens: how much of a prompt the devices have room to compute at once.
        note: says so when something does not run where it was asked to; else empty.
    """

    devices: tuple[Device, ...] = ()
    all_experts: bool = False
    piece_tokens: int = SHORT_TOKENS
    note: str = ""

    @property
    def dense(self) -> torch.device:
        """Where what is not split between devices is."""
        return self.devices[0].torch_device if self.devices else _CPU

    @property
    def experts(self) -> torch.device:
        """Where the bank is that all experts are in."""
        return self.dense if self.all_experts else _CPU


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


def place(config: EngineConfig, devices: Sequence[Device], needs: ModelNeeds, context_tokens: int) -> Placement:
    """Puts a model's parts where they fit; what was wished for and does not fit is said in the note."""
    if not devices:
        return Placement()
    pieces = []
    for device, dense in zip(devices, needs.dense, strict=True):
        piece = piece_tokens(device.memory.free - dense, needs.activations, context_tokens)
        least = device_needs(dense, piece, needs.activations, -(-needs.kv // len(devices)), context_tokens)
        if least > device.memory.free:
            return Placement(
                note=f"Runs on the CPU: even without its experts the model needs {gigabytes(least)} of {device.name}, "
                f"of which {gigabytes(device.memory.free)} can be used."
            )
        pieces.append(piece)
    as_usual = config.cache_slots is None and config.misses == "mixed" and len(devices) == 1
    context = (context_tokens if config.context_tokens else min(context_tokens, ROOMY_KV_TOKENS)) * needs.kv
    needed = needs.dense[0] + needs.experts + min(pieces) * needs.activations + context
    return Placement(
        tuple(devices),
        all_experts=not needs.experts or (as_usual and needed <= devices[0].memory.free),
        piece_tokens=min(pieces),
    )


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per fast core; never more than this process may use."""
    count = max(1, min(threads or compute_threads(), usable_cpus()))
    torch.set_num_threads(count)
    return count
