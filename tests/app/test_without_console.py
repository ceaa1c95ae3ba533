"""The start without a console, as pythonw starts the window on Windows: there are no standard streams at all."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import app.__main__
from app.startup_report import QUIT_VARIABLE, REPORT_VARIABLE
from engine.common import plain_text as consoles
from engine.common.paths import python_module
from engine.parts import remove

# Read by every Python that is started on the way, before anything else.
NO_STREAMS = (
    "import sys\nsys.stdin = sys.stdout = sys.stderr = sys.__stdin__ = sys.__stdout__ = sys.__stderr__ = None\n"
)


@pytest.fixture
def variables(tmp_path: Path, switchyard_home: Path) -> dict[str, str]:
    folder = tmp_path / "no streams"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_STREAMS)
    _, extra = python_module("engine.cli")
    found = os.pathsep.join(filter(None, (str(folder), extra.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": found, "QT_QPA_PLATFORM": "offscreen", "DISPLAY": ":none"}


def test_the_window_opens_and_ends(variables: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command, _ = python_module("engine.cli")
    done = subprocess.run(
        command, env={**variables, REPORT_VARIABLE: str(report), QUIT_VARIABLE: "1"}, timeout=60, capture_output=True
    )
    assert done.returncode == 0
    assert report.exists()
    assert not done.stderr


@pytest.mark.parametrize(
    ("words", "code"), [(["models", "list", "--json"], 0), (["models", "show", "not there"], 2), (["nonsense"], 2)]
)
def test_commands_end_as_they_would_with_one(variables: dict[str, str], words: list[str], code: int) -> None:
    command, _ = python_module("engine.cli")
    done = subprocess.run([*command, *words], env=variables, timeout=60, capture_output=True)
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_removing_asks_nobody(monkeypatch: pytest.MonkeyPatch, switchyard_home: Path) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert remove.main([]) == 0
    assert not consoles.has_console()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()


def test_a_sentence_is_told_where_somebody_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert consoles.has_console()
    consoles.tell("That is so.")
    assert capsys.readouterr().err == "That is so.\n"


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError("libxcb-cursor.so.0: cannot open shared object file: No such file"), "without libxcb-cursor.so.0:"),
        (ImportError("libEGL.so.1: cannot open shared object file: No such file"), "without libEGL.so.1:"),
        (ModuleNotFoundError("No module named 'PySide6'", name="PySide6"), "without PySide6:"),
    ],
)
def test_what_the_window_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, named: str
) -> None:
    def lacking(name: str) -> None:
        raise error

    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("QT_QPA_PLATFORM", "xcb")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lacking)
    assert app.__main__.main([]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
