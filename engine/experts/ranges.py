"""Ranges of files, and records that are made of them: read while a model is loaded, or from disk as they are needed.

Of a model's own files a record is gate, up and down, each where the file has it; of converted weights it is one range,
with a checksum.  Where a range begins on a page it is read past the page cache; else through it, and dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.container import Container
from engine.experts.direct_file import DirectFile, bytes_of
from engine.experts.record import LayerSpec, RecordTable

Place = tuple[Path, int]
"""A file, and where in it something begins."""


class OpenFiles:
    """Files that ranges are read from, opened with the first; safe to use from several threads.

    Args:
        direct: whether to leave nothing of them in the page cache.
    """

    def __init__(self, *, direct: bool) -> None:
        self._direct, self._files = direct, dict[Path, DirectFile]()

    @property
    def are_direct(self) -> bool:
        """Whether aligned reads of all of them bypass the page cache."""
        return all(file.is_direct for file in self._files.values())

    def open(self, path: Path) -> DirectFile:
        """The file at this path.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if it cannot be opened.
        """
        file = self._files.get(path)
        if file is None:
            try:
                file = self._files[path] = DirectFile(path, direct=self._direct)
            except OSError as error:
                raise unreadable(path, error) from error
        return file

    def read(self, path: Path, offset: int, target: memoryview) -> int:
        """Fills memory; returns its size.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: it cannot be read.
        """
        try:
            self.open(path).read_into(offset, target)
        except (OSError, EOFError) as error:
            raise unreadable(path, error) from error
        return len(target)

    def close(self) -> None:
        """Closes all of them.  Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [offset, offset + nbytes) of every record of a layer.

    Attributes:
        places: where those of each expert lie; or in RAM, one expert's behind the other's.
    """

    offset: int
    nbytes: int
    places: Sequence[Place] | memoryview


def converted_part(container: Container, spec: LayerSpec) -> list[Part]:
    """The records of a layer of a file of converted weights."""
    begin, size = container.entries[spec.name].offset, spec.layout.nbytes
    return [Part(0, size, [(container.path, begin + expert * size) for expert in range(spec.num_experts)])]


class RecordRanges:
    """What a `DiskTier` reads.

    Args:
        parts: of each layer's records, in their order.
        container: that records lie in, or some of them.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED` if a file cannot be opened.
    """

    def __init__(
        self, table: RecordTable, parts: Sequence[Sequence[Part]], container: Container | None = None, *, direct: bool
    ) -> None:
        self.table, self._parts, self._container = table, parts, container
        self._files = OpenFiles(direct=direct)
        try:
            for each in (part.places for layer in parts for part in layer if not isinstance(part.places, memoryview)):
                for path in {place[0] for place in each}:
                    self._files.open(path)
        except BaseException:
            self.close()
            raise
        self.is_direct = bool(container) and self._files.are_direct

    @classmethod
    def of(cls, container: Container, layers: Sequence[LayerSpec], *, direct: bool = True) -> RecordRanges:
        """The records of these layers of a file of converted weights.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED` if the file cannot be opened.
        """
        return cls(
            RecordTable(tuple(layers)), [converted_part(container, spec) for spec in layers], container, direct=direct
        )

    def fill(self, layer: int, begin: int, target: memoryview) -> None:
        """Bytes of a layer's records, one behind the other, from this one on.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: they cannot be read.
        """
        done, nbytes = 0, self.table.layers[layer].layout.nbytes
        while done < len(target):
            expert, start = divmod(begin + done, nbytes)
            end = min(nbytes, start + len(target) - done)
            self._fill(layer, expert, start, target[done : done + end - start])
            done += end - start

    def is_intact(self, layer: int, expert: int, record: torch.Tensor) -> bool:
        """Whether these are the bytes of a record, if that can be told."""
        name = self.table.layers[layer].name
        container = self._container
        return container is None or name not in container.entries or container.is_intact(name, expert, record[None])

    def damaged(self, layer: int, expert: int) -> EngineError:
        """The error for a record that is not intact."""
        name = self.table.layers[layer].name
        where = f" in {self._container.path}" if self._container is not None else ""
        return EngineError(
            ErrorCode.CHECKPOINT_DAMAGED, f"Expert {expert} of {name} is damaged{where}: check the disk."
        )

    def rewrite(self, layer: int, expert: int, record: torch.Tensor) -> None:
        """Overwrites a damaged record with the same one, made again.

        Raises:
            EngineError: `CHECKPOINT_DAMAGED`: it is another one, or cannot be written.
        """
        places = self._parts[layer][0].places
        assert not isinstance(places, memoryview)
        path, offset = places[expert]
        if not self.is_intact(layer, expert, record):
            raise self.damaged(layer, expert)
        try:
            writable = DirectFile(path, writable=True)
            try:
                writable.write(offset, bytes_of(record))
                writable.sync()
            finally:
                writable.close()
        except OSError as error:
            raise EngineError(
                ErrorCode.CHECKPOINT_DAMAGED, f"{path} cannot be repaired ({error.strerror}): check the disk."
            ) from error

    def close(self) -> None:
        """Closes the files.  Idempotent."""
        self._files.close()

    def _fill(self, layer: int, expert: int, begin: int, target: memoryview) -> None:
        end, at = begin + len(target), begin
        for part in self._parts[layer]:
            first, last = max(begin, part.offset), min(end, part.offset + part.nbytes)
            if first >= last:
                continue
            if first > at:
                target[at - begin : first - begin] = bytes(first - at)  # padding
            start, room = first - part.offset, target[first - begin : last - begin]
            if isinstance(part.places, memoryview):
                start += expert * part.nbytes
                room[:] = part.places[start : start + len(room)]
            else:
                path, offset = part.places[expert]
                self._files.read(path, offset + start, room)
            at = last
        if end > at:
            target[at - begin :] = bytes(end - at)


def unreadable(path: Path, error: OSError | EOFError) -> EngineError:
    """The error for a file of weights."""
    why = error.strerror if isinstance(error, OSError) else "it is cut short, or has become shorter"
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{path} cannot be read ({why or type(error).__name__}): check the disk, or download the model again.",
    )
