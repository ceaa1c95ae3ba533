"""The files of weights in memory: mapped where that is safe, else read, from before the engine is imported on.

`Files` gives tensors their bytes.  Whole files arrive while the rest of a model is loaded; where there is no RAM for
them, or they go to a card, each tensor is read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.container import Container
from engine.experts.early_reads import EARLY_READS
from engine.experts.file_image import FileImage
from engine.experts.ranges import unreadable
from engine.experts.record_memory import HugePages
from engine.runtime.load.tensor_reader import TensorReader, torch_dtype

_PIECE = 64 * 2**20
_LOOK_S = 0.05
_CHECKERS = 2
"""Threads that compute checksums: of what has just arrived, so that it is still in a core's cache."""


class ArrivingFile:
    """A file on its way into memory; see `engine.runtime.loaded_model.Arriving`.

    Args:
        container: what its tensors are compared with as they arrive, if it is a file of converted weights.
    """

    def __init__(self, path: Path, container: Container | None = None) -> None:
        self.path = path
        self.done = 0
        self.on_progress: Callable[[int, int], None] = lambda _done, _total: None
        self._container, self._pool = container, ThreadPoolExecutor(_CHECKERS, "arriving-file")
        try:
            self.image: FileImage = EARLY_READS.take(path)
        except OSError as error:
            raise unreadable(path, error) from error
        except MemoryError as error:
            raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, f"There is no memory for {path.name}: {error}.") from error
        self._checks: list[Future[None]] = []
        for entry in container.entries.values() if container is not None else ():
            self._checks.append(self._pool.submit(self._check, entry))

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return len(self.image.bytes)

    def bytes_of(self, entry: TensorEntry) -> torch.Tensor:
        """Those of a tensor, uint8 [bytes], which are there after `wait`."""
        return torch.frombuffer(self.image.bytes[entry.offset : entry.offset + entry.nbytes], dtype=torch.uint8)

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Until all of it is there.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: it cannot be read.
            UnusableContainerError: it is not what was converted.
            RequestCancelled: `cancelled()` was true.
        """
        try:
            while self.done < self.nbytes:
                end = min(self.done + _PIECE, self.nbytes)
                while not self.image.wait_for(end, _LOOK_S):
                    if cancelled():
                        raise RequestCancelled
                self.done = end
                self.on_progress(end, self.nbytes)
            for check in self._checks:
                check.result()
        except OSError as error:
            raise unreadable(self.path, error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Stops reading.  Idempotent; the memory lives as long as anything refers to it."""
        self.image.close()  # wakes who waits for it
        self._pool.shutdown(cancel_futures=True)

    def _check(self, entry: TensorEntry) -> None:
        assert self._container is not None
        count, size = entry.shape
        together = max(_PIECE // size, 1)
        for first in range(0, count, together):
            some = replace(entry, offset=entry.offset + first * size, nbytes=min(together, count - first) * size)
            self.image.wait_for(some.offset + some.nbytes)
            if not self._container.is_intact(entry.key, first, self.bytes_of(some).view(-1, size)):
                raise self._container.damaged(entry.key)


class Files:
    """The files of a model whose bytes are used as they are.

    Args:
        whole: those that are to be in memory as a whole; of all others tensors are read.
        container: of converted weights, if there are any.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if one cannot be opened, `NOT_ENOUGH_MEMORY`.
    """

    def __init__(self, whole: Iterable[Path], container: Container | None = None) -> None:
        self._container, self._pages = container, HugePages()
        self._arriving: dict[Path, ArrivingFile] = {}
        try:
            for path in dict.fromkeys(whole):
                own = container if container is not None and container.path == path else None
                self._arriving[path] = ArrivingFile(path, own)
        except BaseException:
            for each in self._arriving.values():
                each.close()
            raise

    @property
    def arriving(self) -> Sequence[ArrivingFile]:
        """The files, until they have been read."""
        return list(self._arriving.values())

    def is_whole(self, path: Path) -> bool:
        """Whether this file is on its way into memory."""
        return path in self._arriving

    def numbers(self, entry: TensorEntry) -> torch.Tensor | None:
        """A tensor that is stored number by number in a file that arrives, once it is there; None for any other.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: it cannot be read.
        """
        arriving, dtype = self._arriving.get(entry.file), torch_dtype(entry)
        if arriving is None or dtype is None or entry.offset % dtype.itemsize or not entry.nbytes:
            return None
        try:
            arriving.image.wait_for(entry.offset + entry.nbytes)
        except OSError as error:
            raise unreadable(entry.file, error) from error
        return arriving.bytes_of(entry).view(dtype).view(entry.shape)

    def bytes_of(self, entry: TensorEntry, reader: TensorReader) -> torch.Tensor:
        """Those of a tensor, uint8 [bytes]; if its file arrives as a whole they are there once it has.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
            UnusableContainerError: they are not what was converted.
        """
        arriving = self._arriving.get(entry.file)
        if arriving is not None:
            return arriving.bytes_of(entry)
        raw = self._pages.empty((entry.nbytes,), dtype=torch.uint8)
        self.read_into(entry, raw, reader)
        return raw

    def read_into(self, entry: TensorEntry, raw: torch.Tensor, reader: TensorReader) -> None:
        """The same into memory of the caller's, uint8 [bytes].

        Raises:
            As `bytes_of`.
        """
        reader.read_into([(replace(entry, dtype="U8", shape=(entry.nbytes,)), raw)])
        container = self._container
        is_its = container is not None and container.path == entry.file
        if container is not None and is_its and not container.is_intact(entry.key, 0, raw.view(entry.shape)):
            raise container.damaged(entry.key)
