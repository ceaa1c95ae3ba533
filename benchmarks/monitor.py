"""`switchyard bench monitor`: processor time of the window while its Monitor shows a fast decode."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.bench.report import Report, in_turn
from engine.bench.startup import GUI_WAIT_LIMIT_MS, home_with, run_window
from engine.checkpoint.library import resolve
from engine.common.errors import EngineError, ErrorCode

_FIGURES = {
    "share_of_a_core": ("window with the Monitor open, of a core", 100.0, "%", 10.0),
    "longest_wait_ms": ("longest wait of a GUI event", 1.0, "ms", GUI_WAIT_LIMIT_MS),
    "longest_work_ms": ("longest work of the GUI's thread at a time", 1.0, "ms", GUI_WAIT_LIMIT_MS),
    "tokens_per_s": ("the starter meanwhile", 1.0, "tokens/s", None),
}
"""What the window reports -> name, scale, unit, and what it must not exceed."""


def bench_monitor(seconds: int, repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds the rows.  The window is the real one, on the display if there is one, otherwise offscreen.

    Args:
        seconds: of decoding before measuring; each of the two measurements takes half of that.
    """
    starter = resolve("starter")

    def run(_repeat: int) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
            variables = {"SWITCHYARD_MONITOR_SECONDS": str(seconds)}
            document = run_window(
                home_with(starter, Path(home)), "SWITCHYARD_MONITOR_REPORT", variables, "benchmarks.monitor_window"
            )
        if document["error"]:
            raise EngineError(ErrorCode.INTERNAL, f"Nothing was decoded in the window: {document['error']}")
        return {name: float(str(document[name])) for name in _FIGURES}

    found = in_turn({"the window": run}, repeats, report, say, warm_ups=0)["the window"]
    for name, (label, scale, unit, limit) in _FIGURES.items():
        values = [scale * each[name] for each in found]
        report.add(label, values, unit, limit=limit, higher_is_better=limit is None)
