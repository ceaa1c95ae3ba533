"""The lowest tier: a model's experts in its files, read by several threads and verified on every read."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from engine.common import clock
from engine.common.errors import EngineError, ErrorCode
from engine.experts.container import Container
from engine.experts.direct_file import DirectFile, OpenFiles, Part, bytes_of
from engine.experts.record import LayerSpec, RecordTable
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

_log = logging.getLogger(__name__)

PIECE_BYTES = 2 * 2**20
"""Size of a read request: large enough for full bandwidth, small enough to split one record among several threads."""

DEFAULT_READERS = 8
"""Requests in flight.  A thread waiting for I/O costs nothing, and fewer would not saturate a fast disk."""

_URGENT, _LATER = 0, 1


@dataclass(slots=True, eq=False)
class _Piece:
    """One I/O request: the bytes [begin, end) of a read."""

    read: Read
    begin: int
    end: int
    begun: bool = False


class Read(Future[None]):
    """A read of a record; done when that is in memory and its checksum has been verified."""

    def __init__(self, layer: int, expert: int, target: memoryview) -> None:
        super().__init__()
        self.layer, self.expert, self.target = layer, expert, target
        ends = [*range(PIECE_BYTES, len(target), PIECE_BYTES), len(target)]
        self.pieces = [_Piece(self, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self.pieces_left = len(self.pieces)
        self.error: BaseException | None = None
        self.begun_ns = 0
        self.is_urgent = True
        self.set_running_or_notify_cancel()  # not cancellable: its target is written to until it is done


class DiskTier:
    """Records on disk and the threads that read them.

    Args:
        layers: that it has records of.
        parts: of each layer's records, in their order.
        container: that records lie in, or some of them.
        direct: whether to leave nothing of them in the page cache.
        readers: maximum requests in flight.
        repair: makes a record (layer, expert) again, uint8 [nbytes], which is then written where it was damaged.
            Called by one reader thread at a time.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        parts: Sequence[Sequence[Part]],
        container: Container | None = None,
        *,
        direct: bool = True,
        readers: int = DEFAULT_READERS,
        repair: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.table, self._parts, self._container, self._repair = RecordTable(tuple(layers)), parts, container, repair
        self._files = OpenFiles(direct=direct)
        try:
            for places in (part.places for layer in parts for part in layer if not isinstance(part.places, memoryview)):
                for path in {path for path, _ in places}:
                    self._files.open(path)
        except BaseException:
            self._files.close()
            raise
        self._layer_numbers = [lanes.layer_number(layer.name) for layer in self.table.layers]
        self._repairing = threading.Lock()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, _Piece]] = []
        self._sequence = itertools.count()
        self._closed = False
        self._later_under_way = 0
        self._most_later = max(readers // 2, 1)
        self._under_way = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self.records_read = 0
        self.bytes_read = 0
        self.records_repaired = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"disk-reader-{number}", daemon=True) for number in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def busy_s(self) -> float:
        with self._lock:
            return self._busy_s + (clock.now() - self._busy_since_s if self._under_way else 0.0)

    @property
    def note(self) -> str:
        if not self.records_repaired:
            return ""
        return (
            f"{self.records_repaired} of the converted experts on disk were damaged and have been made again of the "
            "model's files: check the disk."
        )

    @property
    def is_direct(self) -> bool:
        return self._container is not None and self._files.are_direct

    def read(self, layer: int, expert: int, into: torch.Tensor, *, urgent: bool = True) -> Read:
        """Starts reading a record into `into`, uint8 [nbytes], contiguous; page-aligned is fastest.

        `into` must stay allocated until the result is done.  Its exception is an EngineError: `CHECKPOINT_DAMAGED`
        (also for a wrong checksum that could not be repaired), `INTERNAL` if the tier is closed first.
        """
        target = bytes_of(into)
        spec = self.table.layers[layer]
        if len(target) != spec.layout.nbytes or not 0 <= expert < spec.num_experts:
            raise ValueError(f"{len(target)} bytes are not expert {expert} of layer {layer}")
        read = Read(layer, expert, target)
        read.is_urgent = urgent
        with self._work:
            if self._closed:
                raise EngineError(ErrorCode.INTERNAL, "An expert was requested after the model had been closed.")
            self._push(_URGENT if urgent else _LATER, read.pieces)
        return read

    def hurry(self, read: Read) -> None:
        """Makes `read` urgent: its pieces that have not started move ahead of all that are not urgent."""
        with self._work:
            read.is_urgent = True
            self._push(_URGENT, [piece for piece in read.pieces if not piece.begun])

    def close(self) -> None:
        with self._work:
            self._closed = True
            waiting = {piece for _, _, piece in self._queue if not piece.begun}
            self._queue.clear()
            self._work.notify_all()
        closed = EngineError(ErrorCode.INTERNAL, "The model was closed while an expert was being read.")
        for piece in waiting:
            self._end(piece.read, closed)
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _push(self, urgency: int, pieces: list[_Piece]) -> None:
        for piece in pieces:
            heapq.heappush(self._queue, (urgency, next(self._sequence), piece))
        self._work.notify(len(pieces))

    def _serve(self) -> None:
        while (taken := self._next()) is not None:
            urgency, piece = taken
            read, error = piece.read, None
            try:
                if read.error is None:
                    self._fill(read.layer, read.expert, piece.begin, read.target[piece.begin : piece.end])
            except BaseException as failure:  # of any kind, because the read must end for its waiters
                error = failure
            self._done(urgency)
            self._end(read, error)

    def _next(self) -> tuple[int, _Piece] | None:
        with self._work:
            while True:
                # Keep readers free of non-urgent pieces, or an urgent one would find all of them busy.
                while self._queue and (self._queue[0][0] == _URGENT or self._later_under_way < self._most_later):
                    urgency, _, piece = heapq.heappop(self._queue)
                    if piece.begun:  # queued twice, by `hurry`
                        continue
                    piece.begun = True
                    piece.read.begun_ns = piece.read.begun_ns or clock.now_ns()
                    self._later_under_way += urgency == _LATER
                    if not self._under_way:
                        self._busy_since_s = clock.now()
                    self._under_way += 1
                    return urgency, piece
                if self._closed:
                    return None
                self._work.wait()

    def _done(self, urgency: int) -> None:
        with self._lock:
            self._later_under_way -= urgency == _LATER
            self._under_way -= 1
            if not self._under_way:
                self._busy_s += clock.now() - self._busy_since_s

    def _end(self, read: Read, error: BaseException | None) -> None:
        """One piece of `read` has ended; after the last one, verifies the records."""
        with self._lock:
            read.error = read.error or error
            read.pieces_left -= 1
            if read.pieces_left:
                return
        error = read.error
        try:
            if error is None or self._may_be_repaired(error):
                if error is not None or not self._is_intact(read.layer, read.expert, read.target):
                    self._repair_record(read.layer, read.expert, read.target)
                error = None
        except BaseException as failure:
            error = failure
        target, read.target, read.pieces = read.target, memoryview(b""), []
        if error is not None:
            read.set_exception(error)
            return
        with self._lock:
            self.records_read += 1
            self.bytes_read += len(target)
        if RECORDER.on:
            name, now_ns = lanes.READ if read.is_urgent else lanes.READ_AHEAD, clock.now_ns()
            layer = self._layer_numbers[read.layer]
            RECORDER.span(lanes.DISK, name, read.begun_ns, now_ns, layer, read.expert, len(target), 1)
        del target
        read.set_result(None)

    def _may_be_repaired(self, error: BaseException) -> bool:
        """Whether rewriting the record may fix a failed read."""
        is_read_error = isinstance(error, EngineError) and error.code is ErrorCode.CHECKPOINT_DAMAGED
        return is_read_error and self._repair is not None

    def _repair_record(self, layer: int, expert: int, record: memoryview) -> None:
        name = self.table.layers[layer].name
        where = f" in {self._container.path}" if self._container is not None else ""
        damaged = EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"Expert {expert} of {name} is damaged{where}: check the disk."
        )
        if self._repair is None:
            raise damaged
        with self._repairing:
            if self._read_again(layer, expert, record):  # another reader may have repaired it meanwhile
                return
            _log.warning("%s Rebuilding it from the model's files.", damaged.message)
            try:
                self._rewrite(layer, expert, self._repair(layer, expert))
            except (EngineError, OSError) as error:
                raise damaged from error
            if not self._read_again(layer, expert, record):
                raise damaged
        with self._lock:
            self.records_repaired += 1

    def _rewrite(self, layer: int, expert: int, record: torch.Tensor) -> None:
        places = self._parts[layer][0].places
        assert not isinstance(places, memoryview)
        path, offset = places[expert]
        if not self._is_intact(layer, expert, bytes_of(record)):
            return
        writable = DirectFile(path, writable=True)
        try:
            writable.write(offset, bytes_of(record))
            writable.sync()
        finally:
            writable.close()

    def _read_again(self, layer: int, expert: int, record: memoryview) -> bool:
        try:
            self._fill(layer, expert, 0, record)
        except EngineError:
            return False
        return self._is_intact(layer, expert, record)

    def _is_intact(self, layer: int, expert: int, record: memoryview) -> bool:
        name, container = self.table.layers[layer].name, self._container
        if container is None or name not in container.entries:
            return True
        return container.is_intact(name, expert, torch.frombuffer(record, dtype=torch.uint8)[None])

    def _fill(self, layer: int, expert: int, begin: int, target: memoryview) -> None:
        """Bytes of a record from this one on."""
        at, end = begin, begin + len(target)
        for part in self._parts[layer]:
            first, last = max(begin, part.offset), min(end, part.offset + part.nbytes)
            if first >= last:
                continue
            if first > at:
                target[at - begin : first - begin] = bytes(first - at)  # padding
            room, within = target[first - begin : last - begin], first - part.offset
            if isinstance(part.places, memoryview):
                own = expert * part.nbytes + within
                room[:] = part.places[own : own + len(room)]
            else:
                path, offset = part.places[expert]
                self._files.read(path, offset + within, room)
            at = last
        if end > at:
            target[at - begin :] = bytes(end - at)
