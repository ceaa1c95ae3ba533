"""Reads tensors of a checkpoint into memory of our own: whole or by row, counted, and cancellable.

Plain reads rather than a memory map: a file that shrinks or a disk that fails is then an error with a name instead of
a signal that kills the process, and nothing stays tied to the file once the model is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numpy.typing import NDArray

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, as_array, is_packed, unpacked
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.direct_file import bytes_of
from engine.experts.ranges import OpenFiles, Place
from engine.experts.record import empty_in_huge_pages
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import unpack_into
from engine.runtime.load.blocks import blocks_of

_CHUNK = 4 * 2**20
"""Bytes of one request: the disk's full rate, and a copy of them stays in a core's cache."""

_THREADS = 4
"""Requests in flight.  More copies than cores gain nothing, fewer requests leave the disk idle meanwhile."""

_DTYPES = {
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


def place_of(source: TensorEntry | ExpertSource) -> Place:
    """Where the bytes of a stored tensor, or of a row of one, begin."""
    if isinstance(source, TensorEntry):
        return source.file, source.offset
    return source.entry.file, source.entry.offset + (source.row or 0) * source.nbytes


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """The type of a tensor that is stored number by number; `None` if torch has none for it, or it is packed."""
    return None if is_packed(entry) else _DTYPES.get(entry.dtype)


class TensorReader:
    """Open files of one checkpoint; a context manager that closes them.  For one thread, which others read for.

    Args:
        on_progress: called with (bytes read, bytes in all) now and then.
        cancelled: asked before every chunk.
        total: bytes that will be read in all.
        direct: whether to leave nothing in the page cache, for what is read once.
        dtype: what packed tensors are unpacked to, unless they are of 32-bit numbers.
        kernels: unpack blocks, where there are any: a hundred times as fast as without.
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
    ) -> None:
        self._dtype, self._kernels = dtype, kernels
        self._on_progress, self._cancelled, self._total = on_progress, cancelled, total
        self._done = self._reported = 0
        self._files = OpenFiles(direct=direct)
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._files.close()
        if kind is None:
            self._on_progress(self._total, self._total)

    def read(
        self, source: TensorEntry | ExpertSource, empty: Callable[..., torch.Tensor] = torch.empty
    ) -> torch.Tensor:
        """The tensor, or for a row of one the row with a leading dimension of 1; `empty` allocates it, like torch's,
        if it is stored as numbers.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`, naming the file, or `MODEL_UNSUPPORTED` for an unknown number format.
            RequestCancelled: `cancelled()` was true.
        """
        entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
        if is_packed(entry):
            return self._unpacked(entry, row)
        dtype = torch_dtype(entry)
        if dtype is None:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{entry.file} stores {entry.key} in the number format {entry.dtype}, which Switchyard cannot read.",
            )
        shape = entry.shape if row is None else (1, *entry.shape[1:])
        tensor = empty(shape, dtype=dtype)
        self.read_into([(source, tensor)])
        return tensor

    def read_arrays(self, entry: TensorEntry, row: int | None = None) -> list[NDArray[Any]]:
        """What a packed tensor is made of, as `as_array` gives it, all of it or a row of each source.

        Raises:
            As `read`.
        """
        sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
        parts = [source if row is None else ExpertSource(source, source.key, row) for source in sources]
        raw = [torch.empty(part.nbytes, dtype=torch.uint8) for part in parts]
        self.read_into(zip(parts, raw, strict=True))
        rows = None if row is None else 1
        return [as_array(source, each.numpy(), rows) for source, each in zip(sources, raw, strict=True)]

    def _unpacked(self, entry: TensorEntry, row: int | None) -> torch.Tensor:
        blocks = blocks_of(entry if row is None else ExpertSource(entry, entry.key, row))
        dtype = torch.float32 if entry.dtype == "F32" else self._dtype
        if blocks is not None and self._kernels is not None:
            raw = [torch.empty(blocks.source.nbytes, dtype=torch.uint8)]
            self.read_into([(blocks.source, raw[0])])
            matrix = empty_in_huge_pages((blocks.rows, blocks.columns), dtype=dtype)
            unpack_into(blocks.in_memory(raw), matrix, self._kernels)
            return matrix if row is None else matrix[None]
        arrays = self.read_arrays(entry, row)
        made = torch.empty(entry.shape if row is None else (1, *entry.shape[1:]), dtype=dtype)
        at = 0
        for piece in unpacked(entry, arrays):
            made[at : at + len(piece)] = torch.from_numpy(piece)
            at += len(piece)
        return made

    def read_into(self, places: Iterable[tuple[TensorEntry | ExpertSource, torch.Tensor]]) -> None:
        """Fills contiguous CPU tensors, each with exactly the bytes of its source.

        Raises:
            As `read`.
        """
        ranges: list[Range] = []
        for source, tensor in places:
            file, offset = place_of(source)
            if tensor.nbytes != source.nbytes:
                raise ValueError(f"{source.nbytes} bytes at {offset} of {file}, not {tensor.nbytes}")
            ranges.append((file, offset, bytes_of(tensor.reshape(-1).view(torch.uint8))))
        self.read_ranges(ranges)

    def read_ranges(self, ranges: Sequence[Range]) -> None:
        """Fills memory from files, with several reads at a time.

        Raises:
            As `read`.
        """
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


class LazyTensor:
    """Stands in for a safetensors slice in the library's loading: read when indexed, then forgotten.

    Args:
        read: gives the tensor.
        dtype: of what it gives, in safetensors' words.
    """

    def __init__(self, entry: TensorEntry, read: Callable[[TensorEntry], torch.Tensor], dtype: str = "") -> None:
        self._entry, self._read = entry, read
        self._dtype = dtype or ("BF16" if is_packed(entry) else entry.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read(self._entry)[index]

    def get_shape(self) -> list[int]:
        """As a safetensors slice."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As a safetensors slice."""
        return self._dtype

    def is_floating_point(self) -> bool:
        """As a tensor."""
        return self._dtype.startswith(("F", "BF"))
