"""`switchyard bench startup`: seconds to a usable window and to the first token, and where they go.

The phases of the engine are told apart by its events, those of the window by its own report; what the imports of the
engine take is told by Python itself, in a process of its own, as telling it takes time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.bench.report import Report, row
from engine.bench.window import GUI_WAIT_LIMIT_MS, PATIENCE_S, as_installed, run_window
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
    ModelLoaded,
    Progress,
    Ready,
    Shutdown,
    Token,
    decode,
    encode,
)

WINDOW_LIMIT_S = 1.0
UPDATE_LIMIT_MS = 16.0
FIRST_TOKEN_LIMIT_S = 2.0
_MOST_PACKAGES = 6
_PHASES = (
    ("process", Ready),
    ("imports", Progress),
    ("weights and tokenizer", ModelLoaded),
    ("prompt and first token", Token),
)
"""Each ends with the first event of this kind."""

_IMPORT = "from engine.process.importing import import_engine; import_engine()"


def bench_startup(repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds the rows.  The window is the real one, on the display if there is one, otherwise offscreen.

    Raises:
        EngineError: `MODEL_NOT_FOUND` without the starter; `INTERNAL` if the window or the engine did not start.
    """
    starter = resolve("starter")
    windows: list[dict[str, float]] = []
    engines: list[dict[str, float]] = []
    packages: list[dict[str, float]] = []
    for repeat in range(repeats + 1):
        say(f"repeat {repeat} of {repeats}" if repeat else "warm-up")
        window, engine, imports = _window_seconds(), _first_token_seconds(starter), _import_seconds()
        if repeat:
            windows.append(window)
            engines.append(engine)
            packages.append(imports)
    _add(report, "window usable", windows, WINDOW_LIMIT_S)
    _add(report, "first token of the starter, engine started cold", engines, FIRST_TOKEN_LIMIT_S)
    for name in sorted(packages[0], key=lambda name: -packages[0][name])[:_MOST_PACKAGES]:
        values = [imports.get(name, 0.0) for imports in packages]
        report.rows.append(row(f"  of the imports, told by Python: {name}", values, "s", higher_is_better=False))
    say("streaming 512 tokens in the window")
    wait_ms, updates_ms = _streaming_ms(starter)
    name = "longest wait of a GUI event while 512 tokens stream"
    report.rows.append(row(name, [wait_ms], "ms", limit=GUI_WAIT_LIMIT_MS, higher_is_better=False))
    name = "update of an answer of 4,000 tokens with formulas and code"
    report.rows.append(row(name, updates_ms, "ms", limit=UPDATE_LIMIT_MS, higher_is_better=False))
    report.rows.append(row("  the longest of them", [max(updates_ms)], "ms", higher_is_better=False))


def _add(report: Report, name: str, runs: list[dict[str, float]], limit: float) -> None:
    """A row for the whole, and one for each phase."""
    totals = [sum(run.values()) for run in runs]
    report.rows.append(row(name, totals, "s", limit=limit, higher_is_better=False))
    for phase in runs[0]:
        report.rows.append(row(f"  of that: {phase}", [run[phase] for run in runs], "s", higher_is_better=False))


def _window_seconds() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
        document = run_window(Path(home), "SWITCHYARD_STARTUP_REPORT", {"SWITCHYARD_QUIT_AFTER_STARTUP": "1"})
        if document["heavy_modules"]:
            loaded = document["heavy_modules"]
            raise EngineError(ErrorCode.INTERNAL, f"The window loaded modules that belong in the engine: {loaded}.")
        phases = document["phases_s"]
        assert isinstance(phases, dict)
        return {str(name): float(seconds) for name, seconds in phases.items()}


def _streaming_ms(starter: Path) -> tuple[float, list[float]]:
    """The longest wait of a GUI event, and every update of a long answer."""
    with tempfile.TemporaryDirectory(prefix="switchyard-bench-") as home:
        models = Path(home) / "data" / "models"
        models.mkdir(parents=True)
        (models / "starter").symlink_to(starter, target_is_directory=True)
        document = run_window(Path(home), "SWITCHYARD_STREAMING_REPORT", {})
        if document["error"]:
            raise EngineError(ErrorCode.INTERNAL, f"No answer streamed in the window: {document['error']}")
        updates = document["updates_ms"]
        assert isinstance(updates, list)
        return float(str(document["longest_wait_ms"])), [float(update) for update in updates]


def _first_token_seconds(starter: Path) -> dict[str, float]:
    """Seconds of each phase from starting the engine process to the first text of an answer."""
    messages = (ChatMessage("user", "What is the capital of France?"),)
    return phases_of(EngineConfig(str(starter)), Generate("ask", messages, SamplingParams(max_tokens=4)))


def phases_of(config: EngineConfig, question: Generate | None = None) -> dict[str, float]:
    """Seconds of each phase from starting the engine process to the model, or to the first text of an answer.

    Raises:
        EngineError: the model cannot be loaded, or the question answered; `INTERNAL` if the engine ended.
    """
    command, variables = python_module("engine.worker")
    started = time.perf_counter()
    pipe, environment = subprocess.PIPE, {**as_installed(), **variables}
    reached: dict[type, float] = {}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(encode(LoadModel("load", config)))
        if question is not None:
            worker.stdin.write(encode(question))
        worker.stdin.flush()
        for line in worker.stdout:
            event = decode(line)
            reached.setdefault(type(event), time.perf_counter() - started)
            if isinstance(event, Failed):
                worker.kill()
                raise EngineError(event.code, event.message)
            if isinstance(event, Finished if question is not None else ModelLoaded):
                worker.stdin.write(encode(Shutdown()))
                worker.stdin.flush()
    phases: dict[str, float] = {}
    for name, ends_with in _PHASES if question is not None else _PHASES[:-1]:
        if ends_with not in reached:
            raise EngineError(ErrorCode.INTERNAL, "The engine ended while it started.")
        phases[name] = reached[ends_with] - sum(phases.values())
    return phases


def _import_seconds() -> dict[str, float]:
    """Seconds that the modules of each package take to import, without those that they import."""
    command = [sys.executable, "-X", "importtime", "-c", _IMPORT]
    try:
        done = subprocess.run(
            command, env=as_installed(), capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The engine could not be imported ({error}).") from error
    return seconds_by_package(done.stderr)


def seconds_by_package(told: str) -> dict[str, float]:
    """What Python's `-X importtime` wrote -> seconds of each package's own modules."""
    seconds: dict[str, float] = {}
    for line in told.splitlines():
        own, _, rest = line.removeprefix("import time:").partition("|")
        if line.startswith("import time:") and own.strip().isdecimal():
            package = rest.rpartition("|")[2].strip().partition(".")[0]
            seconds[package] = seconds.get(package, 0.0) + int(own) / 1e6
    return seconds
