"""Reads tensors of a checkpoint into memory of our own: whole or by row, counted, and cancellable.

Plain reads rather than a memory map: a file that shrinks or a disk that fails is then an error with a name instead of
a signal that kills the process, and nothing stays tied to the file once the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.headers import TensorEntry
from engine.errors import EngineError, ErrorCode
from engine.runtime.cancellation import RequestCancelled

_CHUNK = 32 * 2**20
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


def torch_dtype(entry: TensorEntry) -> torch.dtype | None:
    """The type of a stored tensor; `None` if torch has none for it."""
    return _DTYPES.get(entry.dtype)


class TensorReader:
    """Open files of one checkpoint; a context manager that closes them.  For one thread.

    Args:
        on_progress: told (bytes read, bytes in all) now and then.
        cancelled: asked before every chunk.
        total: bytes that will be read in all.
    """

    def __init__(self, on_progress: Callable[[int, int], None], cancelled: Callable[[], bool], total: int) -> None:
        self._on_progress, self._cancelled, self._total = on_progress, cancelled, total
        self._done = self._reported = 0
        self._files: dict[Path, FileIO] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._files.values():
            stream.close()

    def read(self, source: TensorEntry | ExpertSource) -> torch.Tensor:
        """The tensor, or for a row of one the row with a leading dimension of 1.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`, naming the file, or `MODEL_UNSUPPORTED` for an unknown number format.
            RequestCancelled: `cancelled()` was true.
        """
        entry, row = (source, None) if isinstance(source, TensorEntry) else (source.entry, source.row)
        dtype = torch_dtype(entry)
        if dtype is None:
            raise EngineError(
                ErrorCode.MODEL_UNSUPPORTED,
                f"{entry.file} stores {entry.key} in the number format {entry.dtype}, which Switchyard cannot read.",
            )
        shape = entry.shape if row is None else (1, *entry.shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        self.read_into(source, tensor)
        return tensor

    def read_into(self, source: TensorEntry | ExpertSource, tensor: torch.Tensor) -> None:
        """Fills a contiguous CPU tensor with exactly the bytes of the source."""
        entry = source if isinstance(source, TensorEntry) else source.entry
        nbytes = source.nbytes
        skip = 0 if isinstance(source, TensorEntry) or source.row is None else source.row * nbytes
        if tensor.nbytes != nbytes:
            raise ValueError(f"{entry.key} has {nbytes} bytes, not {tensor.nbytes}")
        if not nbytes:
            return
        target = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy is a buffer
        for begin in range(0, nbytes, _CHUNK):
            if self._cancelled():
                raise RequestCancelled
            part = target[begin : begin + _CHUNK]
            self._fill(entry.file, entry.offset + skip + begin, part)
            self._count(len(part))

    def _fill(self, file: Path, position: int, part: memoryview) -> None:
        try:
            if file not in self._files:
                self._files[file] = file.open("rb", buffering=0)
            stream = self._files[file]
            stream.seek(position)
            count = _read_fully(stream, part)
        except OSError as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED,
                f"{file} cannot be read ({error.strerror}): check the disk, or download the model again.",
            ) from error
        if count != len(part):
            raise EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file} is cut short: download or copy the model again.")

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done - self._reported >= self._total // 200 or self._done >= self._total:
            self._reported = self._done
            self._on_progress(min(self._done, self._total), self._total)


def _read_fully(stream: FileIO, part: memoryview) -> int:
    """Fills `part` as far as the file goes: one read may end early (Linux stops at 2 GB)."""
    done = 0
    while done < len(part) and (count := stream.readinto(part[done:])):
        done += count
    return done


class LazyTensor:
    """Stands in for a safetensors slice in the library's loading: read when indexed, then forgotten."""

    def __init__(self, reader: TensorReader, entry: TensorEntry) -> None:
        self._reader, self._entry = reader, entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._reader.read(self._entry)[index]

    def get_shape(self) -> list[int]:
        """As a safetensors slice."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """As a safetensors slice."""
        return self._entry.dtype

    def is_floating_point(self) -> bool:
        """As a tensor."""
        return self._entry.dtype.startswith(("F", "BF"))
