"""Page-aligned memory of the host; pinned for cards: scarce, refused without warning, and limited on every machine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import torch

from engine.common.files import write_private
from engine.common.paths import cache_dir, python_module
from engine.hardware.surroundings import available_ram as available_ram

PAGE = 4096
"""Alignment in bytes of all allocations, so that they can be pinned and read from disk directly."""

_WORTH_ASKING = 4 * 2**20
"""Allocations of this size are asked to be in pages of 2 MiB."""
_MADV_HUGEPAGE = 14
_WORTH_A_LOOK = 64 * 2**20
"""Allocations of this size check free RAM first: the system overcommits."""


class HostMemory:
    """Allocator of staging buffers and banks: of this class for devices without pinning, so that all is pageable."""

    pinned_bytes = 0

    def expect(self, nbytes: int) -> None:
        """Announces future allocations: measuring the pinning limit takes seconds."""

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:  # noqa: ARG002
        """Page-aligned bytes [nbytes] on the CPU, not initialised, pinned as far as possible.

        Args:
            unit: bytes copied at a time: no copy may cross a multiple of it.  None: all at once.
        """
        return allocate_host(nbytes)

    def share(self, nbytes: int) -> torch.Tensor:
        """As `allocate`, for little: what the device's kernels read and write themselves while they run.

        Raises:
            MemoryError: not enough free memory, or the driver does not pin it.
        """
        return allocate_host(nbytes)

    def release(self, memory: torch.Tensor) -> None:
        """Unpins memory from `allocate` or `share`; it is freed with the last tensor that uses it."""

    def close(self) -> None:
        """Unpins everything."""


def allocate_host(nbytes: int) -> torch.Tensor:
    """Page-aligned bytes [nbytes] on the CPU, not initialised, in huge pages where it is large enough for them."""
    if nbytes >= _WORTH_A_LOOK and nbytes > (free := available_ram()):
        raise MemoryError(f"{nbytes:,} bytes requested, but only {free:,} are free")
    memory = aligned(nbytes, torch.device("cpu"))
    if nbytes >= _WORTH_ASKING and sys.platform == "linux":
        # Processors end what they fetch ahead at each page's end; where the system refuses, pages stay small.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)
    return memory


def aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Page-aligned bytes [nbytes] from torch's allocator."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % PAGE
    return raw[skip : skip + nbytes]


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card of the process
_MAPPED = 2  # cudaHostRegisterMapped: the card's kernels read and write it


def register(address: int, nbytes: int, device: torch.device, how: int = _PORTABLE) -> bool:
    """Pins [address, address + nbytes); returns whether that worked.  The address is page-aligned."""
    return _succeeded("cudaHostRegister", device, address, nbytes, how)


def unregister(address: int, device: torch.device) -> None:
    """Unpins the range at `address`."""
    _succeeded("cudaHostUnregister", device, address)


def _succeeded(function: str, device: torch.device, *arguments: int) -> bool:
    with torch.cuda.device(device):
        if int(getattr(torch.cuda.cudart(), function)(*arguments)) == 0:  # type: ignore[no-untyped-call]
            return True
        # The runtime's sticky error would be reported by the next launch: of a kernel, as only launches check.
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=device).fill_(1)
    return False


_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 2**20
UNMEASURED_BYTES = 2**30
"""Limit before `measure_pinnable` has run: any machine allows this much."""
_KEEP_BACK = 0.9
"""Fraction of the measured limit to use: other programs pin memory too."""
_RAM_SHARE = 0.8


def measure_pinnable(wanted: int, device_index: int = 0, *, timeout_s: float = 60.0) -> int:
    """Measures in a child process how much memory can be pinned, chunk by chunk, up to `wanted` bytes or for so long.

    Pinning too much can be slow, upset the driver or get the process killed; this process is safe from that.

    Returns:
        bytes, 0 if nothing can be pinned; with a safety margin if below `wanted`.
    """
    wanted = min(wanted, int(available_ram() * _RAM_SHARE))
    command, variables = python_module("engine.devices.host_memory")
    child = subprocess.Popen(
        [*command, str(wanted), str(CHUNK_BYTES), str(device_index)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env={**os.environ, **variables},
    )
    with child:
        try:
            printed, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
    # A child killed while writing may leave half a line.
    complete = printed[: printed.rfind("\n") + 1].split()
    pinned = max((int(word) for word in complete if word.isdecimal()), default=0)
    return wanted if pinned >= wanted else int(pinned * _KEEP_BACK)


class PinnedMemory(HostMemory):
    """Host memory for one card, pinned in chunks as far as `limit` and the driver allow.

    A chunk that the driver refuses stays pageable; the next allocation tries again.
    """

    def __init__(self, device: torch.device, limit: int = UNMEASURED_BYTES) -> None:
        self._device = device
        self.limit = limit
        self._lock = threading.Lock()
        self._allocated: dict[int, tuple[torch.Tensor, list[tuple[int, int]]]] = {}

    def expect(self, nbytes: int) -> None:
        """See `HostMemory.expect`.  The limit is measured once and saved for this machine and driver."""
        if nbytes <= self.limit:
            return
        path = _kept_limit(self._device)
        try:
            tried, pinnable = map(int, path.read_text().split())
        except (OSError, ValueError):
            tried = pinnable = 0
        if tried < nbytes and pinnable == tried:  # never measured, or everything tried could be pinned
            tried, pinnable = nbytes, measure_pinnable(nbytes, self._device.index or 0)
            try:
                write_private(path, f"{tried} {pinnable}\n")
            except OSError as error:  # measured again next time
                _log.warning("could not save the pinning limit: %s", error)
        self.limit = max(self.limit, min(pinnable, nbytes))

    def allocate(self, nbytes: int, *, unit: int | None = None) -> torch.Tensor:
        memory = allocate_host(nbytes)
        # A copy must lie within one registration, so chunks are whole units.
        chunk = nbytes if unit is None or unit % PAGE else max(1, CHUNK_BYTES // unit) * unit
        chunks: list[tuple[int, int]] = []
        with self._lock:
            for offset in range(0, nbytes, max(1, chunk)):
                size = min(chunk, nbytes - offset)
                if self.pinned_bytes + size > self.limit:
                    break
                address = memory.data_ptr() + offset
                if not register(address, size, self._device):
                    _log.warning("%s: the driver refused to pin %d bytes, which stay pageable", self._device, size)
                    break
                chunks.append((address, size))
                self.pinned_bytes += size
            self._allocated[memory.untyped_storage().data_ptr()] = memory, chunks
        return memory

    def share(self, nbytes: int) -> torch.Tensor:
        """See `HostMemory.share`.  It counts little, so that no limit holds."""
        memory = allocate_host(-(-nbytes // PAGE) * PAGE)
        with self._lock:
            if not register(memory.data_ptr(), memory.nbytes, self._device, _PORTABLE | _MAPPED):
                raise MemoryError(f"{self._device}: the driver does not map {nbytes:,} bytes of the host's memory")
            self.pinned_bytes += memory.nbytes
            chunks = [(memory.data_ptr(), memory.nbytes)]
            self._allocated[memory.untyped_storage().data_ptr()] = memory, chunks
        return memory

    def release(self, memory: torch.Tensor) -> None:
        """See `HostMemory.release`.  No copy from or to it may be in flight."""
        with self._lock:
            _, chunks = self._allocated.pop(memory.untyped_storage().data_ptr(), (memory, []))
            self._unpin(chunks)

    def close(self) -> None:
        with self._lock:
            for _, chunks in self._allocated.values():
                self._unpin(chunks)
            self._allocated.clear()

    def _unpin(self, chunks: list[tuple[int, int]]) -> None:
        for address, size in chunks:
            unregister(address, self._device)
            self.pinned_bytes -= size


def _kept_limit(device: torch.device) -> Path:
    """The file with "bytes tried, bytes pinned" for a card and its driver."""
    machine = f"{platform.node()} {torch.cuda.get_device_name(device)} {torch.version.cuda}"
    mark = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return cache_dir() / "pinnable" / f"{mark}.txt"


def main(arguments: list[str]) -> int:
    """Entry of `python -m engine.devices.host_memory WANTED_BYTES CHUNK_BYTES DEVICE_INDEX`: pins until that fails.

    Prints the bytes pinned so far after every chunk.  The memory is released at exit.
    """
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
