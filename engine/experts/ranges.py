"""Ranges of files, and records that are made of them: read while a model is loaded, or from disk as they are needed.

Of a model's own files a record is gate, up and down, each where the file has it; of converted weights it is one range,
with a checksum.  Where a range begins on a page it is read past the page cache; else through it, and dropped again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.common.errors import EngineError, ErrorCode
from engine.experts.direct_file import DirectFile

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


def unreadable(path: Path, error: OSError | EOFError) -> EngineError:
    """The error for a file of weights."""
    why = error.strerror if isinstance(error, OSError) else "it is cut short, or has become shorter"
    return EngineError(
        ErrorCode.CHECKPOINT_DAMAGED,
        f"{path} cannot be read ({why or type(error).__name__}): check the disk, or download the model again.",
    )
