"""The real program, started as its own process on the offscreen platform."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.services.data_folder import LOCK_NAME
from app.startup_report import REPORT_VARIABLE
from engine.common.paths import data_dir, log_dir, python_module

PATIENCE_S = 60.0

Start = Callable[..., "subprocess.Popen[bytes]"]


def _environment(**more: str) -> dict[str, str]:
    _, variables = python_module("app")
    return {**os.environ, **variables, **more}


@pytest.fixture
def start(switchyard_home: Path) -> Iterator[Start]:
    """Starts the window; whatever still runs at the end is killed, its engine too."""
    started: list[subprocess.Popen[bytes]] = []

    def run(**variables: str) -> subprocess.Popen[bytes]:
        command, _ = python_module("app")
        process = subprocess.Popen(command, env=_environment(**variables), stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield run
    for process in started:
        _kill_tree(process)
        process.stderr.close()


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    process.wait()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM that a program can answer there, and no SIGKILL")
def test_a_second_start_ends_at_once_a_kill_is_survived_and_a_request_to_end_obeyed(
    start: Start, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    first = start(**{REPORT_VARIABLE: str(report)})
    _wait_for(report)
    told = json.loads(report.read_text())
    assert (told["window_usable_s"] > 0, told["heavy_modules"]) == (True, [])
    second = start()
    assert second.wait(PATIENCE_S) == 0
    assert first.poll() is None
    _kill_tree(first)
    assert (data_dir() / LOCK_NAME).exists()
    report.unlink()
    again = start(**{REPORT_VARIABLE: str(report)})
    _wait_for(report)
    again.send_signal(signal.SIGTERM)
    code = again.wait(PATIENCE_S)
    reports = [path.read_text() for name in ("crash-*", "fault-*") for path in log_dir().glob(name)]
    assert (code, reports) == (0, [])
    assert not (data_dir() / LOCK_NAME).exists()
