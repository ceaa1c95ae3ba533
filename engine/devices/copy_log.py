"""Reports finished copies to listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One successful copy.

    Attributes:
        stream: its name, including the device's.
        direction: `h2d`, `d2h` or `d2d`.
        nbytes: payload.
        started_s, ended_s: on `time.perf_counter`'s clock.
    """

    stream: str
    direction: str
    nbytes: int
    started_s: float
    ended_s: float


Listener = Callable[[CopyRecord], None]


class CopyLog:
    """Listeners to a device's copies.

    They are called before the copy's event is done, on whichever thread notices the end of the copy, so they must be
    fast. Without listeners a copy costs one look at an empty tuple.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` for every copy from now on; call the result to unsubscribe."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def ended(self, stream: str, direction: str, nbytes: int, started_s: float, ended_s: float) -> None:
        """Called by streams."""
        for listener in self._listeners:
            try:
                listener(CopyRecord(stream, direction, nbytes, started_s, ended_s))
            except Exception:
                _log.exception("a copy listener failed")
