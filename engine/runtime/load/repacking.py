"""Makes tiled matrices of what a quantised checkpoint stores: some are read while those before are repacked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import torch

from engine.checkpoint.expert_index import ExpertSource
from engine.checkpoint.headers import TensorEntry
from engine.common import footprint
from engine.experts.record_memory import RecordMemory
from engine.formats.tiles import TiledMatrix, TiledShape
from engine.formats.weight_format import TILE_ROWS
from engine.kernels.native.library import NativeKernels
from engine.kernels.repack import repack
from engine.runtime.load.blocks import Stored, StoredBlocks
from engine.runtime.load.tensor_reader import TensorReader

_BATCH = footprint.REPACKED_BYTES

Job = tuple[Sequence[Stored], TiledMatrix]
"""The rows of a matrix, or its gate and then its up rows, and the matrix."""

_Read = tuple[list[tuple[Stored, list[torch.Tensor]]], TiledMatrix]
"""Where the bytes of each source of a matrix have been read to."""


class Repacker:
    """Two rooms for what is read, and a thread that repacks one of them; a context manager.

    Matrices are complete after `finish`, or when the context is left without an error.
    """

    def __init__(self, reader: TensorReader, kernels: NativeKernels | None) -> None:
        self._reader, self._kernels = reader, kernels
        self._rooms: list[torch.Tensor] = []
        self._pool = ThreadPoolExecutor(1, "repack")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Repacker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            for future in self._pending:
                future.cancel()
            wait(self._pending)  # they write into memory that the caller takes back
            self._pool.shutdown()

    def add(self, jobs: Sequence[Job]) -> None:
        """Reads the sources; their matrices are made meanwhile and later.

        Raises:
            EngineError, RequestCancelled: as `TensorReader.read`.
        """
        for batch, nbytes in _batches([piece for job in jobs for piece in _in_pieces(job)]):
            if len(self._pending) > 1:
                self._pending.popleft().result()  # it has read from the room that is used now
            read = self._read(batch, self._room(nbytes))
            self._pending.append(self._pool.submit(_repack, read, self._kernels))

    def finish(self) -> None:
        """Waits for all matrices."""
        while self._pending:
            self._pending.popleft().result()

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._rooms) == 2:
            self._rooms.append(self._rooms.pop(0))
            if len(self._rooms[1]) < nbytes:
                self._rooms.pop()
        if len(self._rooms) < 2:
            self._rooms.append(RecordMemory(1, max(nbytes, _BATCH)).records[0])
        return self._rooms[-1]

    def _read(self, batch: Sequence[Job], room: torch.Tensor) -> list[_Read]:
        """Neighbours in a file become neighbours in the room, so that they are read at once."""
        parts = [part for sources, _ in batch for stored in sources for part in stored.sources]
        raw: dict[int, torch.Tensor] = {}
        used, runs = 0, list[_Run]()
        for index in sorted(range(len(parts)), key=lambda index: _place_of(parts[index])):
            file, offset = _place_of(parts[index])
            nbytes = parts[index].nbytes
            if runs and runs[-1].ends_at(file, offset, used):
                runs[-1].nbytes += nbytes
            else:
                runs.append(_Run(file, offset, used, nbytes))
            raw[index] = room[used : used + nbytes]
            used += _aligned(nbytes)
        self._reader.read_into((run.entry, room[run.begin : run.begin + run.nbytes]) for run in runs)
        numbers = iter(range(len(parts)))
        return [
            ([(stored, [raw[next(numbers)] for _ in stored.sources]) for stored in sources], target)
            for sources, target in batch
        ]


@dataclass(slots=True)
class _Run:
    """Bytes of a file, and where in a room they begin."""

    file: Path
    offset: int
    begin: int
    nbytes: int

    def ends_at(self, file: Path, offset: int, place: int) -> bool:
        """Whether what is there goes on with it, in the file and in the room."""
        return file == self.file and offset == self.offset + self.nbytes and place == self.begin + self.nbytes

    @property
    def entry(self) -> TensorEntry:
        """The same as a tensor of bytes."""
        return TensorEntry(self.file, "neighbours", "U8", (self.nbytes,), self.offset, self.nbytes)


def _place_of(part: TensorEntry | ExpertSource) -> tuple[Path, int]:
    if isinstance(part, TensorEntry):
        return part.file, part.offset
    return part.entry.file, part.entry.offset + (part.row or 0) * part.nbytes


def _repack(batch: list[_Read], kernels: NativeKernels | None) -> None:
    repack([([stored.in_memory(raw) for stored, raw in read], target) for read, target in batch], kernels)


def _in_pieces(job: Job) -> list[Job]:
    """A large matrix in blocks as several of fewer rows, each of which a room has space for."""
    sources, matrix = job
    stored, shape = sources[0], matrix.shape
    whole = len(sources) == 1 and isinstance(stored, StoredBlocks) and stored.order is None
    entry = stored.sources[0]
    if not whole or type(entry) is not TensorEntry or entry.nbytes <= _BATCH:
        return [job]
    assert isinstance(stored, StoredBlocks)
    row = entry.nbytes // stored.rows
    step = max(_BATCH // row // TILE_ROWS, 1) * TILE_ROWS
    pieces: list[Job] = []
    for begin in range(0, stored.rows, step):
        rows = min(step, stored.rows - begin)
        part = replace(entry, shape=(rows, *entry.shape[1:]), offset=entry.offset + begin * row, nbytes=rows * row)
        blocks = slice(begin // TILE_ROWS, -(-(begin + rows) // TILE_ROWS))
        target = TiledMatrix(
            TiledShape(rows, shape.columns, shape.format),
            matrix.weights[blocks],
            matrix.scales[blocks],
            matrix.zeros[blocks] if matrix.zeros is not None else None,
            matrix.table,
        )
        pieces.append(([StoredBlocks(stored.kind, part, rows)], target))
    return pieces


def _aligned(nbytes: int) -> int:
    """Numbers of any type may begin after so many bytes."""
    return -(-nbytes // 16) * 16


def _batches(jobs: Sequence[Job]) -> Iterator[tuple[list[Job], int]]:
    """Jobs that are read at once, and their bytes."""
    batch: list[Job] = []
    held = 0
    for job in jobs:
        nbytes = sum(_aligned(part.nbytes) for stored in job[0] for part in stored.sources)
        if batch and held + nbytes > _BATCH:
            yield batch, held
            batch, held = [], 0
        batch.append(job)
        held += nbytes
    if batch:
        yield batch, held
