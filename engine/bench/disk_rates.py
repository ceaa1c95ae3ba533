"""What the disk can do: bytes per second past the page cache, in large pieces, several at a time."""

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


def write_rate(path: Path, nbytes: int) -> float:
    """Bytes per second of writing a file of about `nbytes`, until it has reached the disk.

    Raises:
        OSError: the disk's.
    """
    piece = _piece()
    piece.random_()
    count = max(1, nbytes // PIECE_BYTES)
    file = DirectFile(path, writable=True)
    try:
        begun_s = time.perf_counter()
        _in_threads(lambda number: file.write(number * PIECE_BYTES, bytes_of(piece)), count)
        file.sync()
        return count * PIECE_BYTES / (time.perf_counter() - begun_s)
    finally:
        file.close()


def read_rate(path: Path) -> float:
    """Bytes per second of reading a file that is not empty.

    Raises:
        OSError: the disk's.
    """
    forget_cached([path])
    size = path.stat().st_size
    piece_bytes = min(PIECE_BYTES, size)
    count = size // piece_bytes
    pieces = [_piece()[:piece_bytes] for _ in range(DEFAULT_READERS)]
    file = DirectFile(path)
    try:
        begun_s = time.perf_counter()

        def read(number: int) -> None:
            piece = pieces.pop()
            file.read_into(number * piece_bytes, bytes_of(piece))
            pieces.append(piece)

        _in_threads(read, count)
        return count * piece_bytes / (time.perf_counter() - begun_s)
    finally:
        file.close()


def forget_cached(files: Iterable[Path]) -> None:
    """Lets the system drop what it keeps of these files, where it can be told to: what follows comes from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _piece() -> torch.Tensor:
    return allocate_records(1, RecordLayout((), PIECE_BYTES), torch.device("cpu"))[0]


def _in_threads(work: Callable[[int], None], count: int) -> None:
    with ThreadPoolExecutor(DEFAULT_READERS, "disk-rate") as pool:
        for done in [pool.submit(work, number) for number in range(count)]:
            done.result()
