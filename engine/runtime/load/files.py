"""The files of weights in memory: mapped where that is safe, else read, from before the engine is imported on.

`Files` gives tensors their bytes.  Whole files arrive while the rest of a model is loaded; where there is no RAM for
them, or they go to a card, each tensor is read by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.headers import TensorEntry
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.experts.container import Container
from engine.experts.direct_file import unreadable
from engine.experts.early_reads import EARLY_READS
from engine.experts.file_image import FileImage
from engine.experts.layer_stream import LayerStream
from engine.experts.record import HugePages
from engine.runtime.load.tensor_reader import TensorReader, torch_dtype

_PIECE = 64 * 2**20
_LOOK_S = 0.05
_CHECKERS = 2
"""Threads that compute checksums: of what has just arrived, so that it is still in a core's cache."""


class Files:
    """The files of a model whose bytes are used as they are.

    Args:
        whole: those that are to be in memory as a whole; of all others tensors are read.
        container: of converted weights, if there are any: what arrives of it is compared with its checksums.
        stream: has the bytes of tensors that come and go.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if one cannot be opened, `NOT_ENOUGH_MEMORY`.
    """

    def __init__(
        self, whole: Iterable[Path] = (), container: Container | None = None, stream: LayerStream | None = None
    ) -> None:
        self._container, self._stream, self._pages = container, stream, HugePages()
        self._images: dict[Path, FileImage] = {}
        self._pool, self._checks = ThreadPoolExecutor(_CHECKERS, "arriving-file"), list[Future[None]]()
        self.on_progress: Callable[[int, int], None] = lambda _done, _total: None
        for path in dict.fromkeys(whole):
            try:
                self._images[path] = EARLY_READS.take(path)
            except OSError as error:
                self.close()
                raise unreadable(path, error) from error
            except MemoryError as error:
                self.close()
                raise EngineError(
                    ErrorCode.NOT_ENOUGH_MEMORY, f"There is no memory for {path.name}: {error}."
                ) from error
        if container is not None and container.path in self._images:
            self._checks = [self._pool.submit(self._check, entry) for entry in container.entries.values()]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are in memory as a whole."""
        return tuple(self._images)

    def is_whole(self, path: Path) -> bool:
        """Whether this file is one of them."""
        return path in self._images

    @property
    def nbytes(self) -> int:
        """Of these."""
        return sum(len(image.bytes) for image in self._images.values())

    def wait(self, cancelled: CancelCheck) -> None:
        """Until all of them are there.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: one cannot be read.
            UnusableContainerError: it is not what was converted.
            RequestCancelled: `cancelled()` was true.
        """
        before, total = 0, self.nbytes
        try:
            for path, image in self._images.items():
                for end in (*range(_PIECE, len(image.bytes), _PIECE), len(image.bytes)):
                    while not self._is_there(path, end, _LOOK_S):
                        if cancelled():
                            raise RequestCancelled
                    self.on_progress(before + end, total)
                before += len(image.bytes)
            for check in self._checks:
                check.result()
        finally:
            self.close()

    def close(self) -> None:
        """Stops reading.  Idempotent; the memory lives as long as anything refers to it."""
        for image in self._images.values():
            image.close()  # wakes who waits for it
        self._pool.shutdown(cancel_futures=True)

    def numbers(self, entry: TensorEntry) -> torch.Tensor | None:
        """A tensor that is stored number by number in a file that arrives, once it is there; None for any other.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: it cannot be read.
        """
        dtype = torch_dtype(entry)
        if dtype is None or entry.offset % dtype.itemsize or not entry.nbytes:
            return None
        if self._stream is not None and (streamed := self._stream.view(entry)) is not None:
            return streamed.view(dtype).view(entry.shape)
        if entry.file not in self._images:
            return None
        self._is_there(entry.file, entry.offset + entry.nbytes)
        return self._view(entry).view(dtype).view(entry.shape)

    def bytes_of(self, entry: TensorEntry, reader: TensorReader) -> torch.Tensor:
        """Those of a tensor, uint8 [bytes]; if its file arrives as a whole they are there once it has.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
            UnusableContainerError: they are not what was converted.
        """
        if self._stream is not None and (streamed := self._stream.view(entry)) is not None:
            return streamed
        if entry.file in self._images:
            return self._view(entry)
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

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        whole = self._images[entry.file].bytes
        return torch.frombuffer(whole[entry.offset : entry.offset + entry.nbytes], dtype=torch.uint8)

    def _is_there(self, path: Path, end: int, patience_s: float | None = None) -> bool:
        try:
            return self._images[path].wait_for(end, patience_s)
        except OSError as error:
            raise unreadable(path, error) from error

    def _check(self, entry: TensorEntry) -> None:
        assert self._container is not None
        count, size = entry.shape
        together = max(_PIECE // size, 1)
        for first in range(0, count, together):
            some = replace(entry, offset=entry.offset + first * size, nbytes=min(together, count - first) * size)
            self._is_there(entry.file, some.offset + some.nbytes)
            if not self._container.is_intact(entry.key, first, self._view(some).view(-1, size)):
                raise self._container.damaged(entry.key)
