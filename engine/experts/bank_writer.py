"""A bank file under construction: layers are written in any order, what is finished survives a kill.

The file is `NAME.part` beside the finished one and is locked while somebody writes it.  A layer counts once its seal
is in the table, which is written after its records have reached the disk.
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
"""Requests in flight: one is written while the other's checksums are computed."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCK_POLL_S = 0.1


def part_path(path: Path) -> Path:
    """Where a bank is while it is made."""
    return path.with_name(path.name + ".part")


@contextmanager
def preparing(path: Path, check: Callable[[], None]) -> Iterator[None]:
    """Holds the right to make this bank; waits for another process that has it.

    Args:
        check: called again and again while waiting; raises to give up.
    """
    lock_path = path.with_name(path.name + ".lock")
    while True:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while not try_lock(descriptor):
                check()
                time.sleep(_LOCK_POLL_S)
            # Whoever had it before may have deleted the file: then this lock is on a file that nobody else sees.
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
        if os.name == "posix":  # elsewhere an open file cannot be deleted: the empty file stays
            lock_path.unlink(missing_ok=True)
        unlock(descriptor)
        os.close(descriptor)


class BankWriter:
    """Writes the file beside `path` and renames it when it is complete.  Use it inside `preparing(path)`.

    Closing it before `finish` keeps finished layers for the next attempt; a file without any is deleted.

    Raises:
        EngineError: `DISK_FULL`, before anything is written, if the file will not fit; `INVALID_REQUEST` if the folder
            cannot be written.
    """

    def __init__(self, path: Path, header: BankHeader, *, direct: bool = True) -> None:
        self.path = path
        self.header = header
        self.finished: set[int] = set()
        self._checksum = CHECKSUMS[header.checksum]
        self._part = part_path(path)
        self._in_place = False
        with self._disk_full_is_told():
            self._file = DirectFile(self._part, writable=True, direct=direct)
        try:
            with self._disk_full_is_told():
                self._take_up()
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

        Bytes between the parts of a record are set to zero, so that the same model gives the same file.

        Args:
            on_written: told how many more bytes were written, after every piece; what it raises stops the writing.

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
            # While these bytes are in the core's cache at best; another thread is writing meanwhile.
            return [self._checksum(bytes_of(record)) for record in some]

        stopped, under_way, checksums = threading.Event(), deque[Future[list[bytes]]](), list[bytes]()
        with ThreadPoolExecutor(_WRITERS, "bank-writer") as pool, self._disk_full_is_told():
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
        """Puts the complete file in place of whatever was there, in one step that a power failure does not undo."""
        if len(self.finished) != len(self.header.layers):
            raise ValueError(f"only {len(self.finished)} of {len(self.header.layers)} layers have been written")
        with self._disk_full_is_told():
            self._file.sync()
        self._file.close()
        os.replace(self._part, self.path)
        self._in_place = True
        _sync_folder(self.path.parent)

    def close(self) -> None:
        """Closes the file; calling it twice is harmless."""
        self._file.close()
        if not self._in_place and not self.finished:
            self._part.unlink(missing_ok=True)

    def _take_up(self) -> None:
        """Keeps what an earlier attempt at the same bank has finished; starts again otherwise."""
        try:
            earlier = read_header(self._part, self._file)
            rows = read_table(self._file, self.header) if earlier.encoded == self.header.encoded else []
        except (UnusableBankError, OSError, EOFError):
            rows = []
        if os.fstat(self._file.descriptor).st_size == self.header.nbytes:
            self.finished = {index for index, row in enumerate(rows) if row is not None and self._ends_well(index, row)}
        if not self.finished:
            os.ftruncate(self._file.descriptor, 0)
        self._require_space()
        if not self.finished:
            self._file.write(0, memoryview(self.header.encoded))
            os.ftruncate(self._file.descriptor, self.header.nbytes)

    def _ends_well(self, layer: int, row: bytes) -> bool:
        """Whether a sealed layer's last record is what it should be: cheap, and the likeliest to be missing."""
        experts = self.header.layers[layer].num_experts
        record = allocate_records(1, self.header.layers[layer].layout, torch.device("cpu"))[0]
        target = bytes_of(record)
        self._file.read_into(self.header.record_offset(layer, experts - 1), target)
        return bool(self._checksum(target) == row[-CHECKSUM_BYTES:])

    def _missing_bytes(self) -> int:
        """What the disk has yet to give."""
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
    def _disk_full_is_told(self) -> Iterator[None]:
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
    """The rename itself has to reach the disk, too."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
