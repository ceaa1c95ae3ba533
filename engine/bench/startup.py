"""`switchyard bench startup`: seconds to a usable window and to the first token, and where they go.

The phases of the engine are told apart by its events, those of the window by its own report; what the imports of the
engine take is told by Python itself, in a process of its own, as telling it takes time.

With `--model`: a start until the first token of an answer, against reading the files that it reads: the model's own,
or the prepared ones where it has to be prepared, by a first start, in a folder that is removed afterwards.  Each is an
engine process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.bench.opened import files_of, prepared_apart
from engine.bench.report import Report, in_turn
from engine.checkpoint.library import resolve
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import python_module
from engine.measure.link import forget_cached, read_rate
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

GUI_WAIT_LIMIT_MS = 50.0
PATIENCE_S = 300.0
WINDOW_LIMIT_S = 1.0
UPDATE_LIMIT_MS = 16.0
FIRST_TOKEN_LIMIT_S = 2.0
_QUESTION = Generate("ask", (ChatMessage("user", "What is the capital of France?"),), SamplingParams(max_tokens=4))
_MOST_PACKAGES = 6
_PIECE = 8 * 2**20
_PHASES = (
    ("process", Ready),
    ("imports", Progress),
    ("weights and tokenizer", ModelLoaded),
    ("prompt and first token", Token),
)
"""Each ends with the first event of this kind."""

_IMPORT = "from engine.process.importing import import_engine; import_engine()"


def bench_startup(repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds the rows.  The window is the real one, on the display if there is one, otherwise offscreen."""
    starter = resolve("starter")
    found = in_turn(
        {
            "window": lambda _repeat: _window_seconds(),
            "engine": lambda _repeat: _first_token_seconds(starter),
            "imports": lambda _repeat: _import_seconds(),
        },
        repeats,
        report,
        say,
    )
    packages = found["imports"]
    _add(report, "window usable", found["window"], limit=WINDOW_LIMIT_S)
    _add(report, "first token of the starter, engine started cold", found["engine"], limit=FIRST_TOKEN_LIMIT_S)
    for name in sorted(packages[0], key=lambda name: -packages[0][name])[:_MOST_PACKAGES]:
        values = [imports.get(name, 0.0) for imports in packages]
        report.add(f"  of the imports, told by Python: {name}", values, "s", higher_is_better=False)
    say("streaming 512 tokens in the window")
    wait_ms, updates_ms = _streaming_ms(starter)
    name = "longest wait of a GUI event while 512 tokens stream"
    report.add(name, [wait_ms], "ms", limit=GUI_WAIT_LIMIT_MS, higher_is_better=False)
    name = "update of an answer of 4,000 tokens with formulas and code"
    report.add(name, updates_ms, "ms", limit=UPDATE_LIMIT_MS, higher_is_better=False)
    report.add("  the longest of them", [max(updates_ms)], "ms", higher_is_better=False)


def _add(report: Report, name: str, runs: list[dict[str, float]], **options: Any) -> None:
    """A row for the whole, and one for each phase."""
    report.add(name, [sum(run.values()) for run in runs], "s", higher_is_better=False, **options)
    for phase in runs[0]:
        report.add(f"  of that: {phase}", [run[phase] for run in runs], "s", higher_is_better=False)


def as_installed() -> dict[str, str]:
    """The environment of a process whose start is timed: Python may keep what it compiles, as where it is installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def home_with(starter: Path, home: Path) -> Path:
    """The folder, in which a window finds the starter."""
    models = home / "data" / "models"
    models.mkdir(parents=True)
    (models / "starter").symlink_to(starter, target_is_directory=True)
    return home


def run_window(home: Path, report_variable: str, variables: dict[str, str], module: str = "app") -> dict[str, object]:
    """Runs the real window in a separate home until it has written its report and closed itself."""
    report = home / "report.json"
    command, own = python_module(module)
    environment = {**as_installed(), **own, **variables, "SWITCHYARD_HOME": str(home), report_variable: str(report)}
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        environment.setdefault("QT_QPA_PLATFORM", "offscreen")
    try:
        subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
        return dict(json.loads(report.read_text()))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EngineError(ErrorCode.INTERNAL, f"The window did not report its start ({error}).") from error


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
        document = run_window(home_with(starter, Path(home)), "SWITCHYARD_STREAMING_REPORT", {})
        if document["error"]:
            raise EngineError(ErrorCode.INTERNAL, f"No answer streamed in the window: {document['error']}")
        updates = document["updates_ms"]
        assert isinstance(updates, list)
        return float(str(document["longest_wait_ms"])), [float(update) for update in updates]


def _first_token_seconds(starter: Path) -> dict[str, float]:
    """Seconds of each phase from starting the engine process to the first text of an answer."""
    return phases_of(EngineConfig(str(starter)), _QUESTION)


def phases_of(config: EngineConfig, question: Generate) -> dict[str, float]:
    """Seconds of each phase from starting the engine process to the first text of an answer."""
    command, variables = python_module("engine.worker")
    started = time.perf_counter()
    pipe, environment = subprocess.PIPE, {**as_installed(), **variables}
    reached: dict[type, float] = {}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(encode(LoadModel("load", config)))
        worker.stdin.write(encode(question))
        worker.stdin.flush()
        for line in worker.stdout:
            event = decode(line)
            reached.setdefault(type(event), time.perf_counter() - started)
            if isinstance(event, Failed):
                worker.kill()
                raise EngineError(event.code, event.message)
            if isinstance(event, Finished):
                worker.stdin.write(encode(Shutdown()))
                worker.stdin.flush()
    phases: dict[str, float] = {}
    for name, ends_with in _PHASES:
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


def bench_second_start(config: EngineConfig, repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows: seconds until the first token of an answer, with the files on disk alone and in the page cache, and
    where they go.

    A reader of the same files takes turns with each: cold, the faster of one past the page cache with several reads in
    flight and one through it; warm, one that copies them from there into memory that it uses again and again.
    """
    with prepared_apart() as folder:
        say("first start: prepares what the model needs, which may take a while")
        phases_of(config, _QUESTION)
        prepared = sorted(folder.glob("*.gguf"))
        files = prepared or files_of(Path(config.model))
        nbytes = sum(file.stat().st_size for file in files)
        cold: list[dict[str, float]] = []
        warm: list[dict[str, float]] = []
        past: list[float] = []
        through: list[float] = []
        cached: list[float] = []
        for repeat in range(repeats):
            say(f"repeat {repeat + 1} of {repeats}: reading the files, and starting")
            past.append(sum(file.stat().st_size / read_rate(file) for file in files))
            forget_cached(files)
            through.append(_copied(files))
            forget_cached(files)
            cold.append(phases_of(config, _QUESTION))
            cached.append(_copied(files))
            warm.append(phases_of(config, _QUESTION))
    fastest = [min(pair) for pair in zip(past, through, strict=True)]
    kind = "prepared files" if prepared else "the model's files"
    name = f"first token, {nbytes / 1e9:.1f} GB of {kind} on disk"
    _add(report, name, cold, peer="reading them", peer_values=fastest)
    _add(report, "first token, the same in the page cache", warm, peer="reading them from there", peer_values=cached)


def _copied(files: Sequence[Path]) -> float:
    """Seconds of reading files through the page cache, one after the other."""
    buffer = bytearray(_PIECE)
    begun_s = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - begun_s
