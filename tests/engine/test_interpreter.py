"""Runs the tests of `tests/interpreted` in a process of their own: Triton decides at its import how it works."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parents[2]


def _run(folder: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", folder]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_cards_kernels_compute() -> None:
    _run("tests/interpreted", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_that_compilers_for_cards_take_them(tmp_path: Path) -> None:
    _run("tests/compiled", SWITCHYARD_COMPILE_KERNELS="1", TRITON_CACHE_DIR=str(tmp_path))
