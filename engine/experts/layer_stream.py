"""Decoder layers that come from disk for each pass: while one is computed, the next is read, and the last one leaves.

Kernels keep the addresses of weights, so these stay where they are and their pages come and go: files are mapped, a
thread reads what is next, and what has been used is given back.  A layer that is needed out of turn is brought all the
same, and one that nobody brought is read by the system, page by page: nothing but the time depends on the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.headers import TensorEntry
from engine.common import clock
from engine.common.errors import CancelCheck, RequestCancelled, never_cancelled
from engine.common.footprint import LAYERS_AT_ONCE
from engine.experts.direct_file import DirectFile, unreadable
from engine.experts.file_image import MappedFile
from engine.hardware.surroundings import count_as_used
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER

STANDS_IN = "stands_in"
"""Attribute of a function that takes the place of a layer's `forward` and uses none of its weights."""
_PAGE = 4096
_PIECE = 8 * 2**20
_CLOSE = 2**16
"""Bytes between tensors that are read with them."""


def _mapped(path: Path) -> MappedFile:
    try:
        file = DirectFile(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        mapped = MappedFile(file, is_held=False)
    except (OSError, ValueError) as error:
        file.close()
        raise unreadable(path, error if isinstance(error, OSError) else EOFError()) from error
    mapped.watch()
    return mapped


@dataclass(frozen=True, slots=True)
class _Range:
    file: MappedFile
    begin: int
    end: int


class LayerStream:
    """The layers of a model that are not held.

    Attributes:
        nbytes: of all of them; bytes_read: so far.
    """

    def __init__(self, layers: Mapping[int, Sequence[TensorEntry]], window: int) -> None:
        self.nbytes = sum(entry.nbytes for entries in layers.values() for entry in entries)
        self.window, self.bytes_read = window, 0
        self._cancelled: CancelCheck = never_cancelled
        self._files: dict[Path, MappedFile] = {}
        try:
            for path in sorted({entry.file for entries in layers.values() for entry in entries}):
                self._files[path] = _mapped(path)
        except BaseException:
            self._close_files()
            raise
        self._places = {(entry.file, entry.offset) for entries in layers.values() for entry in entries}
        self._ranges = {layer: self._pages_of(entries) for layer, entries in layers.items()}
        self._order = sorted(self._ranges)
        self._coming: dict[int, Future[None]] = {}  # layers that are there or being read
        self._wanted, self._used, self._last = set[int](), set[int](), -1
        self._pool, self._closed = ThreadPoolExecutor(1, "layers-from-disk"), False
        count_as_used(window)

    def view(self, entry: TensorEntry) -> torch.Tensor | None:
        """The bytes of a tensor that comes and goes, uint8; None for all others."""
        if (entry.file, entry.offset) not in self._places:
            return None
        memory = memoryview(self._files[entry.file].memory)
        return torch.frombuffer(memory[entry.offset : entry.offset + entry.nbytes], dtype=torch.uint8)

    def follow(self, modules: Sequence[Any]) -> None:
        for layer, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._before, layer))

    def _before(self, layer: int, module: Any, _arguments: Any) -> None:
        if not getattr(module.forward, STANDS_IN, False):
            self.enter(layer)

    @contextmanager
    def until(self, cancelled: CancelCheck) -> Iterator[None]:
        """Inside, whoever waits for a layer is told once this comes true: `RequestCancelled`, out of the forward, whose
        cache must not be used afterwards."""
        before, self._cancelled = self._cancelled, cancelled
        try:
            yield
        finally:
            self._cancelled = before

    def enter(self, layer: int) -> None:
        """Until the weights of this layer are there; those of the layers before are given back."""
        for before in self._used - {layer}:
            self._give_back(before)
        if layer not in self._ranges:
            self._read_ahead()
            return
        if layer not in self._coming:  # not the one that follows
            self._give_back(*self._coming)
            self._begin(layer)
        self._used.add(layer)
        self._read_ahead()
        future = self._coming[layer]
        while not wait([future], 0.1).done:
            if self._cancelled():
                raise RequestCancelled
        failure = None if future.cancelled() else future.exception() or self._shortened(layer)
        if failure is not None:
            self._give_back(*self._coming)
            self._last = -1
            if isinstance(failure, OSError | EOFError):
                raise unreadable(self._ranges[layer][0].file.file.path, failure) from failure
            raise failure

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(cancel_futures=True)
        self._give_back(*self._coming)
        self._close_files()
        count_as_used(-self.window)

    def _close_files(self) -> None:
        for mapped in self._files.values():
            mapped.file.close()

    def _pages_of(self, entries: Sequence[TensorEntry]) -> list[_Range]:
        found: list[_Range] = []
        for entry in sorted(entries, key=lambda each: (each.file, each.offset)):
            file, begin = self._files[entry.file], entry.offset // _PAGE * _PAGE
            end = min(-(-(entry.offset + entry.nbytes) // _PAGE) * _PAGE, -(-file.nbytes // _PAGE) * _PAGE)
            if found and found[-1].file is file and begin - found[-1].end <= _CLOSE:
                found[-1] = _Range(file, found[-1].begin, max(end, found[-1].end))
            else:
                found.append(_Range(file, begin, end))
        return found

    def _shortened(self, layer: int) -> EOFError | None:
        try:
            for each in {id(each.file): each.file for each in self._ranges[layer]}.values():
                each.check()
        except EOFError as error:
            return error
        return None

    def _begin(self, layer: int) -> None:
        self._wanted.add(layer)  # before the thread looks
        self._last, self._coming[layer] = layer, self._pool.submit(self._bring, layer)

    def _read_ahead(self) -> None:
        while self._last >= 0 and len(self._coming) < LAYERS_AT_ONCE:
            following = self._order[(self._order.index(self._last) + 1) % len(self._order)]
            if following in self._coming:
                break
            self._begin(following)

    def _give_back(self, *layers: int) -> None:
        for layer in layers:
            self._used.discard(layer)
            self._wanted.discard(layer)
            future = self._coming.pop(layer, None)
            if future is not None and not future.cancel():  # at once, or when it has stopped
                future.add_done_callback(lambda _, layer=layer: self._drop(layer))  # type: ignore[misc]

    def _drop(self, layer: int) -> None:
        for each in self._ranges[layer]:
            each.file.leave(each.begin, each.end)

    def _bring(self, layer: int) -> None:
        begun_ns = clock.now_ns()
        self._read(layer)
        if RECORDER.on:
            nbytes = sum(each.end - each.begin for each in self._ranges[layer])
            RECORDER.span(lanes.DISK, lanes.READ_AHEAD, begun_ns, clock.now_ns(), layer, nbytes=nbytes)

    def _read(self, layer: int) -> None:
        for each in self._ranges[layer]:
            for begin in range(each.begin, each.end, _PIECE):
                if self._closed or layer not in self._wanted:
                    return
                each.file.check()
                nbytes = min(_PIECE, each.end - begin)
                each.file.bring(begin, nbytes)
                self.bytes_read += nbytes
