"""Reads the tensors of a checkpoint: from files that are in memory as a whole, from layers that come and go, or each by
itself into memory of our own, counted and cancellable.

Plain reads where a file is not mapped: one that shrinks or a disk that fails is then an error with a name instead of a
signal that kills the process, and nothing stays tied to the file once the model is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, as_array, is_blocks, is_packed, unpacked
from engine.checkpoint.quantised.packings import ByRows, Codes
from engine.checkpoint.stored import format_of_codes, in_rows, order_of
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.experts.container import Container
from engine.experts.direct_file import OpenFiles, bytes_of, unreadable
from engine.experts.file_image import EARLY_READS, FileImage
from engine.experts.record import HugePages, empty_in_huge_pages
from engine.experts.whole_layer import LayerStream
from engine.formats.ggml import GGML, BlockType
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import Blocks, unpack_into

_CHUNK = 4 * 2**20
"""Bytes of one request: the disk's full rate, and a copy of them stays in a core's cache."""
_THREADS = 4
"""Requests in flight.  More copies than cores gain nothing, fewer requests leave the disk idle meanwhile."""
_PIECE = 64 * 2**20
_LOOK_S = 0.05
_CHECKERS = 2
"""Threads that compute checksums: of what has just arrived, so that it is still in a core's cache."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


Range = tuple[Path, int, memoryview]
"""A file, where in it something begins, and the memory for that."""


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """The type of a tensor that is stored number by number; `None` if torch has none for it, or it is packed."""
    return None if is_packed(entry) else DTYPES.get(entry.dtype)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix as files have it: in blocks or plain numbers of ggml's types, or as codes beside their scales.

    Attributes:
        rows: that are stored.
        sources: what is read: one tensor, or the parts of codes.
        kind: of blocks and plain numbers.
        order: which of their rows come one after the other, if not all as they are.
        packing: of codes.
    """

    rows: int
    columns: int
    sources: tuple[TensorEntry, ...]
    kind: BlockType | None = None
    order: torch.Tensor | None = None
    packing: ByRows | None = None

    def blocks(self, raw: torch.Tensor) -> Blocks:
        """Those in the bytes of all sources, one behind the other."""
        assert self.kind is not None
        return Blocks(self.kind, raw.view(self.rows, -1), self.order)

    def in_memory(self, raw: Sequence[torch.Tensor]) -> Blocks | Codes:
        """The same of the bytes of each source."""
        if self.packing is None:
            return self.blocks(raw[0] if len(raw) == 1 else torch.cat(list(raw)))
        arrays = [as_array(entry, each.numpy()) for entry, each in zip(self.sources, raw, strict=True)]
        return self.packing.codes_of(self.sources, arrays, slice(0, self.rows))


def stored_of(entry: TensorEntry) -> Stored | None:
    """A matrix as a checkpoint stores it quantised; `None` if it does not, or no record keeps its codes."""
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        if format_of_codes(entry) is None:
            return None
        return Stored(entry.shape[0], entry.shape[1], entry.sources, packing=entry.packing)
    found = blocks_of(entry)
    return found if found is not None and found.kind is not None and is_blocks(found.kind.name) else None


def blocks_of(entry: TensorEntry) -> Stored | None:
    """The rows of a matrix, or of a row of a stack of them, in blocks or of plain numbers."""
    stored, order = in_rows(entry), None
    if stored is None or stored.shape[:-2] not in ((), (1,)) or len(stored.shape) < 2:
        return None
    if stored is not entry:
        if len(stored.shape) > 2:
            return None
        assert isinstance(entry, PackedEntry)
        order = torch.from_numpy(order_of(entry)) if len(entry.sources) == 1 else None
    kind, rows = GGML[stored.dtype], stored.shape[-2]
    sources = entry.sources if isinstance(entry, PackedEntry) and len(entry.sources) > 1 else (stored,)
    return Stored(rows, stored.nbytes // rows // kind.nbytes * kind.elements, sources, kind, order)


def _split(raw: torch.Tensor, sources: Sequence[TensorEntry]) -> Sequence[torch.Tensor]:
    return torch.split(raw, [source.nbytes for source in sources])


class TensorReader:
    """The files of one model; a context manager that closes what tensors are read from.  For one thread, which others
    read for.

    Args:
        on_progress: called with (bytes read, bytes in all) now and then.
        cancelled: asked before every chunk.
        total: bytes that will be read in all, whole files apart.
        direct: whether to leave nothing in the page cache, for what is read once.
        dtype: what packed tensors are unpacked to, unless they are of 32-bit numbers.
        kernels: unpack blocks, where there are any: a hundred times as fast as without.
        whole: files that are to be in memory as a whole, which may arrive while the rest is read, until `wait`.
        container: of converted weights, if there are any: what arrives of it is compared with its checksums.
        stream: has the bytes of tensors that come and go.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a whole file cannot be opened, `NOT_ENOUGH_MEMORY`.
    """

    def __init__(
        self,
        on_progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
        total: int,
        *,
        direct: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        kernels: NativeKernels | None = None,
        whole: Iterable[Path] = (),
        container: Container | None = None,
        stream: LayerStream | None = None,
    ) -> None:
        self._dtype, self._kernels = dtype, kernels
        self._on_progress, self._cancelled, self._total = on_progress, cancelled, total
        self._done = self._reported = 0
        self._files = OpenFiles(direct=direct)
        self._pool: ThreadPoolExecutor | None = None
        self._container, self._stream, self._pages = container, stream, HugePages()
        self._images: dict[Path, FileImage] = {}
        self._checkers, self._checks = ThreadPoolExecutor(_CHECKERS, "arriving-file"), list[Future[None]]()
        for path in dict.fromkeys(whole):
            try:
                self._images[path] = EARLY_READS.take(path)
                self._images[path].watch()
            except (OSError, MemoryError) as error:
                self.close()
                if isinstance(error, OSError):
                    raise unreadable(path, error) from error
                raise EngineError(
                    ErrorCode.NOT_ENOUGH_MEMORY, f"There is no memory for {path.name}: {error}."
                ) from error
        if container is not None and container.path in self._images:
            self._checks = [self._checkers.submit(self._check, entry) for entry in container.entries.values()]

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._files.close()
        if kind is None:
            self._on_progress(self._total, self._total)

    @property
    def whole_files(self) -> tuple[Path, ...]:
        return tuple(self._images)

    def wait(self, on_progress: Callable[[int, int], None], cancelled: CancelCheck) -> None:
        """Until all of these are there; nothing is read afterwards."""
        before, total = 0, sum(len(image.bytes) for image in self._images.values())
        try:
            for path, image in self._images.items():
                for end in (*range(_PIECE, len(image.bytes), _PIECE), len(image.bytes)):
                    while not self._is_there(path, end, _LOOK_S):
                        if cancelled():
                            raise RequestCancelled
                    on_progress(before + end, total)
                before += len(image.bytes)
            for check in self._checks:
                check.result()
        finally:
            self.close()

    def close(self) -> None:
        """Stops reading whole files.  Idempotent; the memory lives as long as anything refers to it."""
        for image in self._images.values():
            image.close()  # wakes who waits for it
        self._checkers.shutdown(cancel_futures=True)

    def read(self, entry: TensorEntry, empty: Callable[..., torch.Tensor] = torch.empty) -> torch.Tensor:
        """The tensor; `empty` allocates it, like torch's, if it is stored as numbers.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`, naming the file, or `MODEL_UNSUPPORTED` for an unknown number format.
            RequestCancelled: `cancelled()` was true.
        """
        if is_packed(entry):
            return self._unpacked(entry)
        dtype = torch_dtype(entry)
        if dtype is None:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{entry.file} stores {entry.key} in the number format {entry.dtype}, which Switchyard cannot read.",
            )
        tensor = empty(entry.shape, dtype=dtype)
        self.read_into([(entry, tensor)])
        return tensor

    def in_memory(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor where its file has it, once it is there, if that is in memory and stores it number by number; else
        as `read`, in huge pages."""
        dtype = torch_dtype(entry)
        if dtype is not None and entry.offset % dtype.itemsize == 0 and entry.nbytes:
            found = self._stream.view(entry) if self._stream is not None else None
            if found is None and entry.file in self._images:
                self._is_there(entry.file, entry.offset + entry.nbytes)
                found = self._view(entry)
            if found is not None:
                return found.view(dtype).view(entry.shape)
        return self.read(entry, empty_in_huge_pages)

    def bytes_of(self, entry: TensorEntry) -> torch.Tensor:
        """Those of a tensor, uint8 [bytes]; if its file arrives as a whole they are there once it has."""
        if self._stream is not None and (streamed := self._stream.view(entry)) is not None:
            return streamed
        if entry.file in self._images:
            return self._view(entry)
        raw = self._pages.empty((entry.nbytes,), dtype=torch.uint8)
        self.read_bytes(entry, raw)
        return raw

    def blocks_of(self, stored: Stored) -> Blocks:
        """A matrix as it lies; what several tensors have of it is brought together."""
        if len(stored.sources) == 1:
            return stored.blocks(self.bytes_of(stored.sources[0]))
        raw = self._pages.empty((sum(source.nbytes for source in stored.sources),), dtype=torch.uint8)
        for source, own in zip(stored.sources, _split(raw, stored.sources), strict=True):
            if source.file in self._images:  # which may still arrive
                self._is_there(source.file, source.offset + source.nbytes)
                own.copy_(self._view(source))
            else:
                self.read_bytes(source, own)
        return stored.blocks(raw)

    def read_bytes(self, entry: TensorEntry, raw: torch.Tensor) -> None:
        self.read_into([(entry, raw)])
        container = self._container
        is_its = container is not None and container.path == entry.file
        if container is not None and is_its and not container.is_intact(entry.key, 0, raw.view(entry.shape)):
            raise container.damaged(entry.key)

    def read_arrays(self, entry: TensorEntry) -> list[NDArray[Any]]:
        sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
        raw = [torch.empty(source.nbytes, dtype=torch.uint8) for source in sources]
        self.read_into(zip(sources, raw, strict=True))
        return [as_array(source, each.numpy()) for source, each in zip(sources, raw, strict=True)]

    def _unpacked(self, entry: TensorEntry) -> torch.Tensor:
        blocks = blocks_of(entry)
        dtype = torch.float32 if entry.dtype == "F32" else self._dtype
        if blocks is not None and self._kernels is not None:
            raw = torch.empty(sum(source.nbytes for source in blocks.sources), dtype=torch.uint8)
            self.read_into(zip(blocks.sources, _split(raw, blocks.sources), strict=True))
            matrix = empty_in_huge_pages((blocks.rows, blocks.columns), dtype=dtype)
            unpack_into(blocks.blocks(raw), matrix, self._kernels)
            return matrix.view(entry.shape)
        arrays, made, at = self.read_arrays(entry), torch.empty(entry.shape, dtype=dtype), 0
        for piece in unpacked(entry, arrays):
            made[at : at + len(piece)] = torch.from_numpy(piece)
            at += len(piece)
        return made

    def read_into(self, places: Iterable[tuple[TensorEntry, torch.Tensor]]) -> None:
        """Fills contiguous CPU tensors, each with exactly the bytes of its source."""
        ranges: list[Range] = []
        for source, tensor in places:
            if tensor.nbytes != source.nbytes:
                raise ValueError(f"{source.nbytes} bytes at {source.offset} of {source.file}, not {tensor.nbytes}")
            ranges.append((source.file, source.offset, bytes_of(tensor.reshape(-1).view(torch.uint8))))
        self.read_ranges(ranges)

    def read_ranges(self, ranges: Sequence[Range]) -> None:
        under_way: deque[Future[int]] = deque()
        is_small = len(ranges) == 1 and len(ranges[0][2]) <= _CHUNK  # one such by itself is not worth a thread
        try:
            for path, offset, target in ranges:
                self._files.open(path)  # before other threads use it
                for begin in range(0, len(target), _CHUNK):
                    if self._cancelled():
                        raise RequestCancelled
                    piece = path, offset + begin, target[begin : begin + _CHUNK]
                    if self._pool is None and is_small:
                        self._count(self._files.read(*piece))
                        continue
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(_THREADS, "tensor-reader")
                    under_way.append(self._pool.submit(self._files.read, *piece))
                    if len(under_way) > 2 * _THREADS:
                        self._count(under_way.popleft().result())
            while under_way:
                self._count(under_way.popleft().result())
        finally:
            for future in under_way:
                future.cancel()
            wait(under_way)  # they write into memory that the caller takes back

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done - self._reported >= self._total // 200 or self._done >= self._total:
            self._reported = self._done
            self._on_progress(min(self._done, self._total), self._total)

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
            some = entry.rows(first, min(together, count - first))
            self._is_there(entry.file, some.offset + some.nbytes)
            if not self._container.is_intact(entry.key, first, self._view(some).view(-1, size)):
                raise self._container.damaged(entry.key)


class LazyTensor:
    """Stands in for a safetensors slice in the library's loading: read when indexed, then forgotten."""

    def __init__(self, entry: TensorEntry, read: Callable[[TensorEntry], torch.Tensor], dtype: str = "") -> None:
        self._entry, self._read = entry, read
        self._dtype = dtype or ("BF16" if is_packed(entry) else entry.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(self._entry)[index]

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def is_floating_point(self) -> bool:
        return self._dtype.startswith(("F", "BF"))
