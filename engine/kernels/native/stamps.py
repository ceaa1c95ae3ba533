"""The stamps of native steps of few tokens: when each ran, and whom it chose."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from engine.kernels.native.structs import StampCountsStruct
from engine.telemetry.layer_log import STAMP, Stamped

_AT_ONCE = 2**12
_MOST_CHOSEN = 2**16
"""Experts that one call takes: more than any step chooses."""


class NativeStamps:
    """Where native code stamps its steps: one ring for all of the process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.switchyard_stamps.restype = ctypes.POINTER(StampCountsStruct)
        library.switchyard_take_stamps.restype = ctypes.c_int64
        library.switchyard_take_stamps.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._library = library
        self._counts = StampCountsStruct()
        # Kept: to map and unmap as much memory several times a second would halt the threads that compute.
        self._some, self._ids = np.empty(_AT_ONCE, STAMP), np.empty(_MOST_CHOSEN, np.int32)

    def switch(self, on: bool) -> None:
        """Steps are stamped from now on, or no more; without memory for them, none are."""
        counts = self._library.switchyard_stamps(int(on))
        if counts:
            self._counts = counts.contents

    @property
    def written(self) -> int:
        """Stamps so far."""
        return int(self._counts.written)

    @property
    def dropped(self) -> int:
        """Those that were not taken in time."""
        return int(self._counts.dropped)

    @property
    def chosen(self) -> int:
        """Experts that all steps have chosen."""
        return int(self._counts.chosen)

    @property
    def ended_ns(self) -> int:
        """End of the last step."""
        return int(self._counts.ended_ns)

    @property
    def taken(self) -> int:
        """Stamps that have been taken."""
        return int(self._counts.taken)

    def take(self, most: int) -> tuple[Stamped, NDArray[np.int32]]:
        """The oldest stamps, at most `most`, and the experts that they chose, one after the other.

        One caller at a time.
        """
        stamps, chosen = [np.empty(0, STAMP)], [np.empty(0, np.int32)]
        some, ids = self._some, self._ids
        while most > 0:
            wanted = min(most, _AT_ONCE)
            taken = self._library.switchyard_take_stamps(wanted, some.ctypes.data, len(ids), ids.ctypes.data)
            stamps.append(some[:taken].copy())
            chosen.append(ids[: int(some["count"][:taken].sum())].copy())
            most -= taken
            if not taken:
                break
        return np.concatenate(stamps), np.concatenate(chosen)
