"""Writes a bank file: layers in any order, and finished layers survive a killed process.

The file is `NAME.part` next to the final one and is locked while it is written.  A layer is finished once its seal is
in the table, which is written after its records have reached the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.common.files import try_lock, unlock
from engine.common.sizes import rounded_down, rounded_up
from engine.experts.bank_file import read_header, read_table
from engine.experts.bank_header import BankHeader, UnusableBankError
from engine.experts.checksums import CHECKSUM_BYTES, CHECKSUMS
from engine.experts.direct_file import DirectFile, bytes_of
from engine.experts.record import RecordLayout, allocate_records

_CHUNK = 8 * 2**20
_WRITERS = 2
"""Concurrent writers: one writes while the other computes checksums."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCK_POLL_S = 0.1


def part_path(path: Path) -> Path:
    """Path of a bank under construction."""
    return path.with_name(path.name + ".part")


@contextmanager
def preparing(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """Holds the lock for building this bank; waits while another process holds it.

    Args:
        check: polled while waiting; raises to give up.
    """
    lock_path = path.with_name(path.name + ".lock")
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not try_lock(descriptor):
                check()
                time.sleep(_LOCK_POLL_S)
            # The previous holder may have unlinked the file, leaving this lock on a file no other process can open.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock_path)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        if os.name == "posix":  # elsewhere an open file cannot be deleted, so the empty file stays
            lock_path.unlink(missing_ok=True)
        unlock(descriptor)
        os.close(descriptor)


class BankWriter:
    """Writes the file next to `path` and renames it when it is complete.  Use it inside `preparing(path)`.

    Closing before `finish` keeps finished layers for the next attempt; a file without any is deleted.

    Raises:
        EngineError: `DISK_FULL`, before anything is written, if the file does not fit; `INVALID_REQUEST` if the folder
            is not writable.
    """

    def __init__(self, path: Path, header: BankHeader, *, direct: bool = True) -> None:
        self.path = path
        self.header = header
        self.finished: set[int] = set()
        self._checksum = CHECKSUMS[header.checksum]
        self._part = part_path(path)
        self._in_place = False
        with self._reporting_disk_full():
            self._file = DirectFile(self._part, writable=True, direct=direct)
        try:
            with self._reporting_disk_full():
                self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BankWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write_layer(self, layer: int, records: torch.Tensor, on_written: Callable[[int], None]) -> None:
        """Writes the records of one layer, uint8 [E, nbytes], and seals it once they have reached the disk.

        Padding inside a record is zeroed, so that the same model gives the same file.

        Args:
            on_written: called after every piece with its size in bytes; an exception from it stops the writing.

        Raises:
            EngineError: `DISK_FULL`.
        """
        layout, offset = self.header.layers[layer].layout, self.header.layer_offsets[layer]
        together = max(_CHUNK // layout.nbytes, 1)

        def write(first: int) -> list[bytes]:
            some = records[first : first + together]
            _clear_padding(some, layout)
            data, begin = bytes_of(some), offset + first * layout.nbytes
            for at in range(0, len(data), _CHUNK):
                if stopped.is_set():
                    break
                self._file.write(begin + at, data[at : at + _CHUNK])
            # Now, while the bytes are most likely still in the core's cache, and another thread is writing.
            return [self._checksum(bytes_of(record)) for record in some]

        stopped, under_way, checksums = threading.Event(), deque[Future[list[bytes]]](), list[bytes]()
        with ThreadPoolExecutor(_WRITERS, "bank-writer") as pool, self._reporting_disk_full():
            try:
                under_way.extend(pool.submit(write, first) for first in range(0, len(records), together))
                while under_way:
                    made = under_way[0].result()
                    under_way.popleft()
                    checksums += made
                    on_written(len(made) * layout.nbytes)
            except BaseException:
                stopped.set()
                for future in under_way:
                    future.cancel()
                raise
            self._file.sync()
            row = b"".join(checksums)
            self._file.write(self.header.table_rows[layer], memoryview(row + self.header.seal(layer, row)))
        self.finished.add(layer)

    def finish(self) -> None:
        """Atomically replaces any previous file with the complete one, and syncs the rename to disk."""
        if len(self.finished) != len(self.header.layers):
            raise ValueError(f"only {len(self.finished)} of {len(self.header.layers)} layers have been written")
        with self._reporting_disk_full():
            self._file.sync()
        self._file.close()
        os.replace(self._part, self.path)
        self._in_place = True
        _sync_folder(self.path.parent)

    def close(self) -> None:
        """Closes the file.  Idempotent."""
        self._file.close()
        if not self._in_place and not self.finished:
            self._part.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Keeps the layers finished by an earlier attempt at the same bank; otherwise starts from scratch."""
        try:
            earlier = read_header(self._part, self._file)
            rows = read_table(self._file, self.header) if earlier.encoded == self.header.encoded else []
        except (UnusableBankError, OSError, EOFError):
            rows = []
        if os.fstat(self._file.descriptor).st_size == self.header.nbytes:
            self.finished = {
                index for index, row in enumerate(rows) if row is not None and self._last_record_is_intact(index, row)
            }
        if not self.finished:
            os.ftruncate(self._file.descriptor, 0)
        self._require_space()
        if not self.finished:
            self._file.write(0, memoryview(self.header.encoded))
            os.ftruncate(self._file.descriptor, self.header.nbytes)

    def _last_record_is_intact(self, layer: int, row: bytes) -> bool:
        """Whether a sealed layer's last record is intact: a cheap check of the bytes most likely to be lost."""
        experts = self.header.layers[layer].num_experts
        record = allocate_records(1, self.header.layers[layer].layout, torch.device("cpu"))[0]
        target = bytes_of(record)
        self._file.read_into(self.header.record_offset(layer, experts - 1), target)
        return bool(self._checksum(target) == row[-CHECKSUM_BYTES:])

    def _missing_bytes(self) -> int:
        """Bytes of the file that are not yet allocated on disk."""
        try:
            held = getattr(self._part.stat(), "st_blocks", 0) * 512
        except OSError:
            held = 0
        return max(self.header.nbytes - held, 0)

    def _require_space(self) -> None:
        free = shutil.disk_usage(self._part.parent).free
        if self._missing_bytes() > free:
            raise self._disk_full()

    @contextmanager
    def _reporting_disk_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self._disk_full() from error
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{self._part} cannot be written ({error.strerror}): check the folder's permissions and the disk.",
            ) from error

    def _disk_full(self) -> EngineError:
        folder = self.path.parent
        missing, free = self._missing_bytes(), shutil.disk_usage(folder).free
        return EngineError(
            ErrorCode.DISK_FULL,
            f"Preparing the model's experts needs {rounded_up(missing)} more in {folder}, where {rounded_down(free)} "
            "are free and may be used: free some space there, or choose a data folder on another disk.",
        )


def _clear_padding(records: torch.Tensor, layout: RecordLayout) -> None:
    ends = [0, *(part.offset + part.nbytes for part in layout.parts)]
    starts = [*(part.offset for part in layout.parts), layout.nbytes]
    for end, start in zip(ends, starts, strict=True):
        if start > end:
            records[:, end:start] = 0


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
