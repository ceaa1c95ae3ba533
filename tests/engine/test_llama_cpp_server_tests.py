"""llama.cpp's own tests of its server, as far as they test an interface that `switchyard serve` offers too.

`SWITCHYARD_LLAMA_CPP` names a checkout of llama.cpp; without it, the sources are taken that the benches' peer was built
from, if it was.  Which tests must pass, and why the others are left out, is said in `llama_cpp_server/choice.toml`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engine.llama_cpp_server.plugin import FOLDER, STARTER, WORDLESS
from tests.starter import starter_for_tests

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
CHOICE = Path(__file__).parent / "llama_cpp_server" / "choice.toml"
FEWEST = 60
_TESTS = Path("tools") / "server" / "tests"


@cache
def _choice() -> dict[str, Any]:
    return tomllib.loads(CHOICE.read_text(encoding="utf-8"))


def _tests() -> Path:
    """The folder of their tests."""
    named = os.environ.get("SWITCHYARD_LLAMA_CPP")
    # Not by `LLAMA_CPP.home()`: tests have a cache of their own.
    built = Path.home() / ".cache" / "Switchyard"
    found = [Path(named)] if named else sorted(built.glob("llama-cpp-python-*/source/vendor/llama.cpp"))
    for checkout in found:
        if (checkout / _TESTS / "utils.py").is_file():
            return checkout / _TESTS
    return pytest.skip("SWITCHYARD_LLAMA_CPP names no checkout of llama.cpp with the tests of its server")


def _chosen() -> list[str]:
    return [f"{file}::{name}" for file, names in _choice()["passes"].items() for name in names]


def test_each_of_their_tests_is_chosen_or_left_out_with_a_reason() -> None:
    unit, left_out = _tests() / "unit", _choice()["left_out"]
    names = {
        f"unit/{file.name}::{name}"
        for file in unit.glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    chosen = {name.split("[")[0] for name in _chosen()}
    assert chosen <= names
    assert {
        name for name in names if name not in chosen | left_out.keys() and name.split("::")[0] not in left_out
    } == set()
    assert {name for name in left_out if name not in names and not (unit.parent / name).is_file()} == set()
    assert all(left_out.values())


@pytest.mark.skipif(os.name != "posix", reason="links to a model's files")
def test_those_that_are_chosen_pass(tmp_path: Path) -> None:
    tests, results = _tests(), tmp_path / "results.xml"
    variables = {
        "PYTHONPATH": str(ROOT),
        FOLDER: str(tmp_path),
        STARTER: str(starter_for_tests()),
        WORDLESS: "\n".join(_choice()["wordless"]["tests"]),
    }
    options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120", "-q"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.engine.llama_cpp_server.plugin", *options]
    done = subprocess.run(
        [*command, f"--junitxml={results}", *_chosen()],
        cwd=tests,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert results.exists(), (done.stdout + done.stderr)[-3000:]
    cases = ET.parse(results).getroot().findall(".//testcase")
    failed = [f"{case.get('name')}: {part.get('message')}" for case in cases for part in case if part.tag != "skipped"]
    assert failed == [], (tmp_path / "errors.txt").read_text(encoding="utf-8", errors="replace")[-2000:]
    passed = [case for case in cases if not list(case)]
    assert len(passed) >= FEWEST
