"""Where a model runs: which device was asked for, which there is, and what of the model fits on it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from engine.config import EngineConfig
from engine.errors import EngineError, ErrorCode
from engine.hardware.probe import usable_cpus
from engine.runtime.memory import gigabytes

_CPU = torch.device("cpu")
_VRAM_HEADROOM = 2**30
"""For the context's KV, activations and the driver's own use."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the parts of a model go.

    Attributes:
        dense: device of everything but the experts.
        experts: device of the bank, and so where experts are computed.
        note: says so when something does not run where it was asked to; else empty.
    """

    dense: torch.device
    experts: torch.device
    note: str = ""


def requested_device(config: EngineConfig) -> torch.device | None:
    """The device asked for; `None` for `auto`.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if this machine has no such device, `INVALID_REQUEST` if nothing is called so.
    """
    name = config.device
    if name == "auto":
        return None
    if name == "cpu":
        return _CPU
    if name.startswith("emulated:"):
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE,
            "Emulated graphics cards are not part of Switchyard yet: use cpu, cuda or auto.",
        )
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no device called {name!r}: use auto, cpu or cuda.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number or 0) >= count:
        what = f"no graphics card number {number}" if count else "no graphics card that torch can use"
        raise EngineError(
            ErrorCode.DEVICE_UNAVAILABLE, f"This machine has {what}: use auto or cpu, or run `switchyard doctor`."
        )
    return torch.device("cuda", int(number or 0))


def place(config: EngineConfig, dense_bytes: int, expert_bytes: int) -> Placement:
    """Puts a model's parts where they fit.

    Raises:
        EngineError: see `requested_device`; `NOT_ENOUGH_MEMORY` if a graphics card was asked for by name and even the
            non-expert weights do not fit it.
    """
    asked = requested_device(config)
    device = asked or (torch.device("cuda", 0) if torch.cuda.is_available() else _CPU)
    if device.type == "cpu":
        return Placement(_CPU, _CPU)
    free, _ = torch.cuda.mem_get_info(device)
    usable = max(0, free - _VRAM_HEADROOM)
    if config.vram_bytes is not None:
        usable = min(usable, config.vram_bytes)
    if dense_bytes > usable:
        sizes = f"{gigabytes(dense_bytes)} of the card's memory, of which {gigabytes(usable)}"
        need = f"even without its experts needs {sizes}"
        if asked is not None:
            raise EngineError(
                ErrorCode.NOT_ENOUGH_MEMORY, f"The model {need} can be used: use --device cpu or a smaller model."
            )
        return Placement(_CPU, _CPU, f"Runs on the CPU: the model {need} are free.")
    if expert_bytes and dense_bytes + expert_bytes > usable:
        return Placement(
            device,
            _CPU,
            f"Experts run on the CPU: they need {gigabytes(expert_bytes)}, and "
            f"{gigabytes(usable - dense_bytes)} of the card's memory are left for them.",
        )
    return Placement(device, device)


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per physical core; never more than this process may use."""
    physical = psutil.cpu_count(logical=False) or 1
    count = max(1, min(threads or physical, usable_cpus()))
    torch.set_num_threads(count)
    return count
