"""Disk throughput: bytes per second, bypassing the page cache, in large blocks, several at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.experts.direct_file import DirectFile, bytes_of
from engine.experts.disk_tier import DEFAULT_READERS, PIECE_BYTES
from engine.experts.record import RecordLayout, allocate_records


def write_rate(path: Path, nbytes: int, check: Callable[[], None] = lambda: None) -> float:
    """Bytes per second of writing a file of about `nbytes`, including the final sync.

    Args:
        check: called before each write; an exception from it stops writing.

    Raises:
        OSError: the disk failed.
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

    Raises:
        OSError: the disk failed.
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
