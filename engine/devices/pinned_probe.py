"""The child process of `pinned_memory.measure_pinnable`: pins memory until that fails, and reports progress.

python -m engine.devices.pinned_probe WANTED_BYTES CHUNK_BYTES DEVICE_INDEX
"""

from __future__ import annotations

import sys

import torch

from engine.devices.host_memory import aligned
from engine.devices.pinned_memory import register


def main(arguments: list[str]) -> int:
    """Prints the bytes pinned so far after every chunk.  The memory is released at exit."""
    wanted, chunk, index = (int(argument) for argument in arguments)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return 0
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    kept: list[torch.Tensor] = []
    pinned = 0
    while pinned < wanted:
        size = min(chunk, wanted - pinned)
        memory = aligned(size, torch.device("cpu"))
        if not register(memory.data_ptr(), size, device):
            break
        kept.append(memory)
        pinned += size
        sys.stdout.write(f"{pinned}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
