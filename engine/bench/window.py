"""What the window costs: `switchyard bench monitor`, and running it for a bench.

Monitor: CPU cost of the window while its Monitor shows a fast decode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.bench.report import Report, row
from engine.checkpoint.library import resolve
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module

GUI_WAIT_LIMIT_MS = 50.0
PATIENCE_S = 300.0


def as_installed() -> dict[str, str]:
    """The environment of a process whose start is timed: Python may keep what it compiles, as where it is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run_window(home: Path, report_variable: str, variables: dict[str, str]) -> dict[str, object]:
    """Runs the real window in a separate home until it has written its report and closed itself."""
    report = home / "report.json"
    command, own = python_module("app")
    environment = {**as_installed(), **own, **variables, "SWITCHYARD_HOME": str(home), report_variable: str(report)}
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        environment.setdefault("QT_QPA_PLATFORM", "offscreen")
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
        return dict(json.loads(report.read_text()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The window did not report its start ({error}).") from error


SHARE_LIMIT_PERCENT = 10.0


def bench_monitor(seconds: int, repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds the rows.  The window is the real one, on the display if there is one, otherwise offscreen.

    Args:
        seconds: of decoding before measuring; each of the two measurements takes half of that.

    Raises:
        EngineError: `MODEL_NOT_FOUND` without the starter; `INTERNAL` if the window did not open.
    """
    starter = resolve("starter")
    shares: list[float] = []
    waits: list[float] = []
    works: list[float] = []
    speeds: list[float] = []
    for repeat in range(1, repeats + 1):
        say(f"repeat {repeat} of {repeats}")
        with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
            models = Path(home) / "data" / "models"
            models.mkdir(parents=True)
            (models / "starter").symlink_to(starter, target_is_directory=True)
            variables = {"SWITCHYARD_MONITOR_SECONDS": str(seconds)}
            document = run_window(Path(home), "SWITCHYARD_MONITOR_REPORT", variables)
        if document["error"]:
            raise EngineError(ErrorCode.INTERNAL, f"Nothing was decoded in the window: {document['error']}")
        shares.append(100 * float(str(document["share_of_a_core"])))
        waits.append(float(str(document["longest_wait_ms"])))
        works.append(float(str(document["longest_work_ms"])))
        speeds.append(float(str(document["tokens_per_s"])))
    report.rows.append(
        row("window with the Monitor open, of a core", shares, "%", limit=SHARE_LIMIT_PERCENT, higher_is_better=False)
    )
    report.rows.append(row("longest wait of a GUI event", waits, "ms", limit=GUI_WAIT_LIMIT_MS, higher_is_better=False))
    report.rows.append(
        row("longest work of the GUI's thread at a time", works, "ms", limit=GUI_WAIT_LIMIT_MS, higher_is_better=False)
    )
    report.rows.append(row("the starter meanwhile", speeds, "tokens/s"))
