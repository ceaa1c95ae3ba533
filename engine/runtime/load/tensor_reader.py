"""Reads tensors of a checkpoint into memory of our own: whole or by row, counted, and cancellable.

Plain reads rather than a memory map: a file that shrinks or a disk that fails is then an error with a name instead of
a signal that kills the process, and nothing stays tied to the file once the model is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from numpy.typing import NDArray

from engine.checkpoint.gguf.types import BY_NAME, BlockType
from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry, as_array, is_blocks, is_packed, unpacked
from engine.checkpoint.quantised.packings import ByRows, Codes
from engine.checkpoint.stored import format_of_codes, in_rows, order_of
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.direct_file import OpenFiles, bytes_of
from engine.experts.record import empty_in_huge_pages
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import Blocks, unpack_into

_CHUNK = 4 * 2**20
"""Bytes of one request: the disk's full rate, and a copy of them stays in a core's cache."""

_THREADS = 4
"""Requests in flight.  More copies than cores gain nothing, fewer requests leave the disk idle meanwhile."""

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
class StoredBlocks:
    """A tensor in blocks, of which whole rows may come in another order.

    Attributes:
        source: what is read.
        rows: how many it has; `order` says which of them come one after the other, if not all as they are.
    """

    kind: BlockType
    source: TensorEntry
    rows: int
    order: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.source.nbytes // self.rows // self.kind.nbytes * self.kind.elements

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """What is read, the parts of `StoredCodes` as well."""
        return (self.source,)

    def in_memory(self, raw: Sequence[torch.Tensor]) -> Blocks:
        """The same once its sources have been read: uint8 [bytes] of each."""
        return Blocks(self.kind, raw[0].view(self.rows, -1), self.order)


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A matrix whose codes, scales and zeros are tensors of their own."""

    source: PackedEntry
    packing: ByRows

    @property
    def rows(self) -> int:
        """How many it has."""
        return self.source.shape[0]

    @property
    def columns(self) -> int:
        """Weights of a row."""
        return self.source.shape[1]

    @property
    def sources(self) -> tuple[TensorEntry, ...]:
        """See `StoredBlocks`."""
        return self.source.sources

    def in_memory(self, raw: Sequence[torch.Tensor]) -> Codes:
        """See `StoredBlocks`.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`.
        """
        entries = self.source.sources
        arrays = [as_array(entry, each.numpy()) for entry, each in zip(entries, raw, strict=True)]
        return self.packing.codes_of(entries, arrays, slice(0, self.rows))


Stored = StoredBlocks | StoredCodes


def stored_of(entry: TensorEntry) -> Stored | None:
    """A matrix as a checkpoint stores it quantised; `None` if it does not, or no record keeps its codes."""
    if isinstance(entry, PackedEntry) and isinstance(entry.packing, ByRows):
        return StoredCodes(entry, entry.packing) if format_of_codes(entry) is not None else None
    found = blocks_of(entry)
    return found if found is not None and is_blocks(found.kind.name) else None


def blocks_of(entry: TensorEntry) -> StoredBlocks | None:
    """The rows of a matrix, or of a row of a stack of them, in blocks or of plain numbers; `None` if it is stored
    otherwise."""
    stored, order = in_rows(entry), None
    if stored is None or stored.shape[:-2] not in ((), (1,)) or len(stored.shape) < 2:
        return None
    if stored is not entry:
        if len(stored.shape) > 2:
            return None
        assert isinstance(entry, PackedEntry)
        order = torch.from_numpy(order_of(entry))
    return StoredBlocks(BY_NAME[stored.dtype], stored, stored.shape[-2], order)


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

    def read_arrays(self, entry: TensorEntry) -> list[NDArray[Any]]:
        """What a packed tensor is made of, as `as_array` gives it.

        Raises:
            As `read`.
        """
        sources = entry.sources if isinstance(entry, PackedEntry) else (entry,)
        raw = [torch.empty(source.nbytes, dtype=torch.uint8) for source in sources]
        self.read_into(zip(sources, raw, strict=True))
        return [as_array(source, each.numpy()) for source, each in zip(sources, raw, strict=True)]

    def _unpacked(self, entry: TensorEntry) -> torch.Tensor:
        blocks = blocks_of(entry)
        dtype = torch.float32 if entry.dtype == "F32" else self._dtype
        if blocks is not None and self._kernels is not None:
            raw = [torch.empty(blocks.source.nbytes, dtype=torch.uint8)]
            self.read_into([(blocks.source, raw[0])])
            matrix = empty_in_huge_pages((blocks.rows, blocks.columns), dtype=dtype)
            unpack_into(blocks.in_memory(raw), matrix, self._kernels)
            return matrix.view(entry.shape)
        arrays, made, at = self.read_arrays(entry), torch.empty(entry.shape, dtype=dtype), 0
        for piece in unpacked(entry, arrays):
            made[at : at + len(piece)] = torch.from_numpy(piece)
            at += len(piece)
        return made

    def read_into(self, places: Iterable[tuple[TensorEntry, torch.Tensor]]) -> None:
        """Fills contiguous CPU tensors, each with exactly the bytes of its source.

        Raises:
            As `read`.
        """
        ranges: list[Range] = []
        for source, tensor in places:
            if tensor.nbytes != source.nbytes:
                raise ValueError(f"{source.nbytes} bytes at {source.offset} of {source.file}, not {tensor.nbytes}")
            ranges.append((source.file, source.offset, bytes_of(tensor.reshape(-1).view(torch.uint8))))
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
