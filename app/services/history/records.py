"""Records of one dtype, in the chunks they arrived in; the oldest chunks are dropped."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from engine.telemetry.records import Records


class RecordHistory:
    """At least the last `most` records, in whole chunks; read by time range."""

    def __init__(self, most: int, empty: Records) -> None:
        self._most = most
        self._empty = empty
        self._pieces: deque[tuple[int, int, Records]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def most(self) -> int:
        return self._most

    @property
    def start_ns(self) -> int | None:
        """Beginning of the oldest record kept; None if there is none."""
        return min((first for first, _, _ in self._pieces), default=None)

    def add(self, records: Records) -> None:
        """Add records without copying: the caller must not write to them any more."""
        for piece in [records[at : at + self._most] for at in range(0, len(records), self._most)]:
            self._pieces.append((int(piece["start_ns"].min()), int(piece["end_ns"].max()), piece))
            self._count += len(piece)
        while len(self._pieces) > 1 and self._count - len(self._pieces[0][2]) >= self._most:
            self._count -= len(self._pieces.popleft()[2])

    def between(self, start_ns: int, end_ns: int) -> Records:
        """All that overlap [start, end), in order of arrival."""
        found = [piece for first, last, piece in self._pieces if last > start_ns and first < end_ns]
        if not found:
            return self._empty
        joined = joined_records(found)
        inside: NDArray[np.bool_] = (joined["end_ns"] > start_ns) & (joined["start_ns"] < end_ns)
        return joined[inside]

    def last(self, count: int) -> Records:
        """The last `count` to arrive."""
        found: list[Records] = []
        wanted = count
        for _, _, piece in reversed(self._pieces):
            if wanted <= 0:
                break
            found.append(piece[-wanted:])
            wanted -= len(found[-1])
        return joined_records(found[::-1]) if found else self._empty

    def copy(self) -> RecordHistory:
        """A copy that no longer changes with this one."""
        other = RecordHistory(self._most, self._empty)
        other._pieces, other._count = self._pieces.copy(), self._count
        return other


def joined_records(pieces: list[Records]) -> Records:
    """Concatenate chunks of one dtype.

    As bytes: numpy would compare the fields of each pair of chunks, which takes longer than copying them.
    """
    if len(pieces) == 1:
        return pieces[0]
    dtype = pieces[0].dtype
    raw = np.dtype((np.void, dtype.itemsize))
    return np.concatenate([np.ascontiguousarray(piece).view(raw) for piece in pieces]).view(dtype)
