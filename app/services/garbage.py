"""Collects cyclic garbage on the GUI thread only.

Python collects it on whichever thread allocates when it is due.  A Qt object that is destroyed on another thread than
its own cannot stop its timers: they fire at freed memory, and the window crashes.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import QObject, QTimer

_EVERY_MS = 500


class GarbageCollection(QObject):
    """Takes over from Python's automatic collection, for the rest of the process."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent)
        gc.disable()
        looking = QTimer(self, interval=_EVERY_MS)
        looking.timeout.connect(collect_if_due)
        looking.start()


def collect_if_due() -> None:
    """Collects the oldest generation that has reached its threshold, as Python would; call it on the GUI thread."""
    thresholds = gc.get_threshold()  # 0: never
    for generation, count in reversed(list(enumerate(gc.get_count()))):
        if 0 < thresholds[generation] < count:
            gc.collect(generation)
            return
