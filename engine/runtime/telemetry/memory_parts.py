"""Memory by purpose, in parts that add up."""

from __future__ import annotations

import psutil

from engine.runtime.loaded_model import LoadedModel
from engine.telemetry.messages import MemoryPart

RAM = "ram"
_PROCESS = psutil.Process()


def memory_parts(loaded: LoadedModel, kv_bytes: int) -> tuple[MemoryPart, ...]:
    """Of this process's RAM, and of the budget of each device that the model runs on.

    Args:
        kv_bytes: that the held context takes.
    """
    parts: list[MemoryPart] = []
    devices = loaded.devices.devices if loaded.devices is not None else ()
    held = {"experts": 0, "weights": 0, "kv": 0}
    if loaded.bank is not None:
        held["experts"] += sum(layer.records.nbytes for layer in loaded.bank.layers.values() if _in_ram(layer.device))
    if loaded.disk_backed is not None:
        held["experts"] += loaded.disk_backed.ram.filled_nbytes
    if not devices and loaded.device.type == "cpu":
        held["weights"], held["kv"] = loaded.info.weights_bytes, kv_bytes
    resident = _PROCESS.memory_info().rss
    parts += [MemoryPart(RAM, purpose, nbytes) for purpose, nbytes in held.items()]
    # Weights may be mapped from a file and not all in RAM yet: what is left over is then nothing, and not less.
    other = max(0, resident - sum(held.values()))
    parts += [MemoryPart(RAM, "other", other), MemoryPart(RAM, "total", other + sum(held.values()))]
    for device in devices:
        use = device.memory.use()
        parts += [MemoryPart(device.name, str(kind), nbytes) for kind, nbytes in use.by_category.items()]
        # After others have taken memory more may be used than the budget still allows.
        free = max(0, use.total - use.used)
        parts += [MemoryPart(device.name, "free", free), MemoryPart(device.name, "total", use.used + free)]
    return tuple(parts)


def _in_ram(device: object) -> bool:
    return str(device) == "cpu"
