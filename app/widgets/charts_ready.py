"""Charts are drawn by pyqtgraph, which takes a quarter of a second to import: too long for the window's thread.

The window has it imported in the background once it is idle.  What shows a chart before that waits here, in a frame
that is there already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from PySide6.QtCore import QObject

from app.services.background import LatestTask

_MODULE = "app.widgets.chart"


def load_charts() -> None:
    importlib.import_module(_MODULE)


def are_ready() -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and hasattr(module, "hit_colour")  # what it defines last


def when_ready(owner: QObject, then: Callable[[], object]) -> None:
    """Calls `then` on the window's thread: at once if charts are ready, else when they are, unless `owner` is gone."""
    if are_ready():
        then()
    else:  # Python imports a module once, however many wait for it
        LatestTask(owner).ask(load_charts, lambda _done: then())
