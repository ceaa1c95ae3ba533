"""The link between host and device: pinned and pageable memory, several sizes, one direction and both at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.common.files import new_folder
from engine.devices.device import Device, Direction, Event
from engine.devices.host_memory import PinnedMemory, allocate_host, available_ram, measure_pinnable
from engine.devices.memory_budget import MemoryCategory
from engine.experts.direct_file import DirectFile, bytes_of
from engine.experts.disk_tier import DEFAULT_READERS, PIECE_BYTES
from engine.experts.record import allocate_records
from engine.formats.tiles import RecordLayout
from engine.hardware.measured import CopyTime, DiskRead
from engine.measure.run import NotMeasuredError, Run


def write_rate(path: Path, nbytes: int, check: Callable[[], None] = lambda: None) -> float:
    """Bytes per second of writing a file of about `nbytes`, including the final sync.

    Args:
        check: called before each write; an exception from it stops writing.
    """
    block = _block()
    block.random_()
    count = max(1, nbytes // PIECE_BYTES)
    file = DirectFile(path, writable=True)
    try:
        begun_s = time.perf_counter()

        def write(number: int) -> None:
            check()
            file.write(number * PIECE_BYTES, bytes_of(block))

        _in_threads(write, count)
        file.sync()
        return count * PIECE_BYTES / (time.perf_counter() - begun_s)
    finally:
        file.close()


def read_rate(
    path: Path,
    depth: int = DEFAULT_READERS,
    block_bytes: int = PIECE_BYTES,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Bytes per second of reading a non-empty file.

    Args:
        depth: reads in flight.
        block_bytes: of one read, at most `PIECE_BYTES`.
        check: called before each read; an exception from it stops reading.
    """
    forget_cached([path])
    size = path.stat().st_size
    block_bytes = min(block_bytes, size)
    count = size // block_bytes
    blocks = [_block()[:block_bytes] for _ in range(depth)]
    file = DirectFile(path)
    try:
        begun_s = time.perf_counter()

        def read(number: int) -> None:
            check()
            block = blocks.pop()
            file.read_into(number * block_bytes, bytes_of(block))
            blocks.append(block)

        _in_threads(read, count, depth)
        return count * block_bytes / (time.perf_counter() - begun_s)
    finally:
        file.close()


def forget_cached(files: Iterable[Path]) -> None:
    """Drops these files from the page cache, where the system allows it: later reads go to the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _block() -> torch.Tensor:
    return allocate_records(1, RecordLayout((), PIECE_BYTES), torch.device("cpu"))[0]


def _in_threads(work: Callable[[int], None], count: int, threads: int = DEFAULT_READERS) -> None:
    with ThreadPoolExecutor(threads, "disk-rate") as pool:
        submitted = [pool.submit(work, number) for number in range(count)]
        try:
            for done in submitted:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_PREFIX = ".switchyard-measuring-"
_STALE_S = 3600.0
_ROOM = 4
"""Free space required, in sizes of the file: measuring must not fill the disk."""


@dataclass(frozen=True)
class DiskReads:
    """Every queue depth with every read size, up to the largest of `read_rate`."""

    file_bytes: int
    depths: tuple[int, ...]
    sizes: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "disk"

    def __call__(self, run: Run) -> None:
        with scratch_file(run.folder) as path:
            free = shutil.disk_usage(path.parent).free
            if free < _ROOM * self.file_bytes:
                raise NotMeasuredError(f"the disk of {run.folder} is nearly full")
            # On a very slow disk, write less of the file.
            write_rate(path, self.file_bytes, run.check)
            file = DirectFile(path)
            is_direct = file.is_direct
            file.close()
            # Large reads come first: experts are read that way.
            for size, depth in sorted(itertools.product(self.sizes, self.depths), key=lambda each: -each[0]):
                rates = [read_rate(path, depth, size, run.check)]
                while len(rates) < self.repeats and not run.is_late:
                    rates.append(read_rate(path, depth, size, run.check))
                run.found(DiskRead(depth, size, is_direct, statistics.median(rates)))


@contextmanager
def scratch_file(folder: Path) -> Iterator[Path]:
    """An empty file in the folder, which is created if missing; leftovers of a killed process are removed."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    new_folder(folder)
    for old in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_S:
                old.unlink()
    handle, name = tempfile.mkstemp(prefix=_PREFIX, dir=folder)
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


@dataclass(frozen=True)
class Copies:
    """Copies of these sizes, skipping those that do not fit on the device."""

    sizes: tuple[int, ...]
    repeats: int
    estimated_s: float
    name: str = "link to the graphics card"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        sizes = [size for size in self.sizes if 2 * size <= min(device.memory.free, run.cold_bytes)]
        if not sizes:
            raise NotMeasuredError(f"{device.name} has too little free memory")
        there = device.memory.allocate(2 * max(sizes), MemoryCategory.STAGING)
        pinned = device.host_memory.allocate(2 * max(sizes))
        pageable = allocate_host(2 * max(sizes))
        try:
            pinned.zero_()
            pageable.zero_()
            for size in sizes:
                for host, is_pinned in ((pinned, True), (pageable, False)):
                    self._one_way(run, device, there, host, size, is_pinned=is_pinned)
                self._both_ways(run, device, there, pinned, size)
        finally:
            device.synchronize()
            device.host_memory.release(pinned)
            device.memory.release(there)

    def _one_way(
        self, run: Run, device: Device, there: torch.Tensor, host: torch.Tensor, size: int, *, is_pinned: bool
    ) -> None:
        for direction in (Direction.H2D, Direction.D2H):
            spans = []
            for _ in range(self.repeats + 1):
                run.check()
                event = _copy(device, direction, there[:size], host[:size])
                event.wait()
                spans.append(event.ended_s - event.started_s)
            # The first copy includes one-time setup; of the others, the fastest was disturbed least.
            run.found(CopyTime(_name(device), direction, is_pinned, False, size, max(min(spans[1:]), 1e-9)))

    def _both_ways(self, run: Run, device: Device, there: torch.Tensor, host: torch.Tensor, size: int) -> None:
        best: dict[Direction, float] = {}
        for _ in range(self.repeats + 1):
            run.check()
            events = {
                Direction.H2D: _copy(device, Direction.H2D, there[:size], host[:size]),
                Direction.D2H: _copy(device, Direction.D2H, there[size : 2 * size], host[size : 2 * size]),
            }
            for event in events.values():
                event.wait()
            for direction, event in events.items():
                best[direction] = min(best.get(direction, 1e9), event.ended_s - event.started_s)
        for direction, seconds in best.items():
            run.found(CopyTime(_name(device), direction, True, True, size, max(seconds, 1e-9)))


@dataclass(frozen=True)
class PinnedLimit:
    """How much host memory can be pinned: tried in a separate process."""

    wanted_bytes: int
    estimated_s: float
    name: str = "pinned memory"

    def __call__(self, run: Run) -> None:
        device = run.needed_device()
        if not isinstance(device.host_memory, PinnedMemory):
            raise NotMeasuredError(f"{device.name} copies from pageable memory just as fast")
        run.check()
        wanted = min(self.wanted_bytes, available_ram())
        run.pinned_limit_bytes = measure_pinnable(
            wanted, device.torch_device.index or 0, timeout_s=self.estimated_s * 3
        )


def _copy(device: Device, direction: Direction, there: torch.Tensor, host: torch.Tensor) -> Event:
    if direction is Direction.H2D:
        return device.h2d_stream.copy(there, host, None, direction=direction)
    return device.d2h_stream.copy(host, there, None, direction=direction)


def _name(device: Device) -> str:
    return device.name.partition("#")[0]
