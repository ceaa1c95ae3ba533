"""`switchyard bench startup` and `bench monitor`: what start-up and a watched decode cost the window.

Start-up: seconds to a usable window and to the first token, and the longest wait of the GUI. Monitor: CPU cost of the
window while its Monitor shows a fast decode.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.bench.report import Report, row
from engine.checkpoint.library import resolve
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module
from engine.protocol import (
    ChatMessage,
    Failed,
    Finished,
    Generate,
    LoadModel,
    Shutdown,
    Token,
    decode,
    encode,
)

WINDOW_LIMIT_S = 1.0
GUI_WAIT_LIMIT_MS = 50.0
_PATIENCE_S = 300.0


def bench_startup(repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds the rows.  The window is the real one, on the display if there is one, otherwise offscreen.

    Raises:
        EngineError: `MODEL_NOT_FOUND` without the starter; `INTERNAL` if the window or the engine did not start.
    """
    starter = resolve("starter")
    windows: list[float] = []
    firsts: list[float] = []
    for repeat in range(repeats + 1):
        say(f"repeat {repeat} of {repeats}" if repeat else "warm-up")
        window, first = _window_seconds(), _first_token_seconds(starter)
        if repeat:
            windows.append(window)
            firsts.append(first)
    report.rows.append(row("window usable", windows, "s", limit=WINDOW_LIMIT_S, higher_is_better=False))
    report.rows.append(row("first token of the starter, engine started cold", firsts, "s", higher_is_better=False))
    say("streaming 512 tokens in the window")
    wait_ms = _longest_gui_wait_ms(starter)
    name = "longest wait of a GUI event while 512 tokens stream"
    report.rows.append(row(name, [wait_ms], "ms", limit=GUI_WAIT_LIMIT_MS, higher_is_better=False))


def _window_seconds() -> float:
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
        document = run_window(Path(home), "SWITCHYARD_STARTUP_REPORT", {"SWITCHYARD_QUIT_AFTER_STARTUP": "1"})
        if document["heavy_modules"]:
            loaded = document["heavy_modules"]
            raise EngineError(ErrorCode.INTERNAL, f"The window loaded modules that belong in the engine: {loaded}.")
        return float(str(document["window_usable_s"]))


def _longest_gui_wait_ms(starter: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
        models = Path(home) / "data" / "models"
        models.mkdir(parents=True)
        (models / "starter").symlink_to(starter, target_is_directory=True)
        document = run_window(Path(home), "SWITCHYARD_STREAMING_REPORT", {})
        if document["error"]:
            raise EngineError(ErrorCode.INTERNAL, f"No answer streamed in the window: {document['error']}")
        return float(str(document["longest_wait_ms"]))


def run_window(home: Path, report_variable: str, variables: dict[str, str]) -> dict[str, object]:
    """Runs the real window in a separate home until it has written its report and closed itself."""
    report = home / "report.json"
    command, own = python_module("app.main")
    environment = {**os.environ, **own, **variables, "SWITCHYARD_HOME": str(home), report_variable: str(report)}
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        environment.setdefault("QT_QPA_PLATFORM", "offscreen")
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=_PATIENCE_S, check=False)
        return dict(json.loads(report.read_text()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The window did not report its start ({error}).") from error


def _first_token_seconds(starter: Path) -> float:
    """Seconds from starting the engine process to the first text of an answer."""
    command, variables = python_module("engine.worker")
    started = time.perf_counter()
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        sampling = SamplingParams(max_tokens=4)
        messages = (ChatMessage("user", "What is the capital of France?"),)
        worker.stdin.write(encode(LoadModel("load", EngineConfig(str(starter)))))
        worker.stdin.write(encode(Generate("ask", messages, sampling)))
        worker.stdin.flush()
        seconds = 0.0
        for line in worker.stdout:
            event = decode(line)
            if isinstance(event, Token) and not seconds:
                seconds = time.perf_counter() - started
            if isinstance(event, Failed):
                worker.kill()
                raise EngineError(event.code, event.message)
            if isinstance(event, Finished):
                worker.stdin.write(encode(Shutdown()))
                worker.stdin.flush()
    return seconds


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
