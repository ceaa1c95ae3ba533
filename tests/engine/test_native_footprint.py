"""What the native kernels take while nothing is generated: no processor, and little disk; measuring without them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from engine import cli
from engine.bench.opened import opened
from engine.checkpoint.synthetic import make_synthetic
from engine.common.config import EngineConfig, SamplingParams
from engine.kernels.native import build
from engine.kernels.native.library import load_kernels
from tests.engine.conversions import quantise_linears
from tests.engine.native_isas import isas
from tests.engine.native_programs import FOLDER, HEADERS, run_program
from tests.engine.single_streams import Alone

_ISAS = isas()
_IDLE_S = 0.4
_MOST_BUSY = 0.3
"""Part of one core.  A thread that spins takes all of one."""


def busy_while_idle() -> float:
    """Cores that all threads of this process use while it sleeps, after a moment in which they may still spin."""
    time.sleep(0.05)
    begun, cpu = time.perf_counter(), time.process_time()
    time.sleep(_IDLE_S)
    return (time.process_time() - cpu) / (time.perf_counter() - begun)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_no_core_is_busy_after_an_answer(precision: str) -> None:
    path = str(make_synthetic("synthetic:qwen3-moe-tiny"))
    config = EngineConfig(model=path, device="cpu", precision=precision, threads=3)  # type: ignore[arg-type]
    with opened(config) as loaded:
        Alone(loaded).generate_from_ids(
            [3, 4, 5, 6],
            SamplingParams(max_tokens=24),
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _count: None,
            cancelled=lambda: False,
            end_ids=frozenset(),
        )
        assert busy_while_idle() < _MOST_BUSY


def test_idle_threads_wait_in_the_kernel() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("states of threads are in /proc")
    before = set(os.listdir(tasks))
    kernels = load_kernels(threads=4)
    assert kernels is not None
    workers = [tasks / name / "stat" for name in os.listdir(tasks) if name not in before]

    def all_asleep() -> bool:
        return all(stat.read_text().rpartition(")")[2].split()[0] == "S" for stat in workers)

    try:
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16))
        quantise_linears(model, "int8", kernels)
        for tokens in (1, 1, 1, 40):
            model(torch.randn(tokens, 1024).bfloat16())
            assert len(workers) == 3
            while not all_asleep():  # the test's own limit ends this if one never sleeps
                time.sleep(0.001)
            for _ in range(40):
                time.sleep(0.002)
                assert all_asleep()
    finally:
        kernels.close()


def test_a_busy_machine_gets_fewer_threads_while_they_are_faster(tmp_path: Path) -> None:
    program = tmp_path / "busy_machine"
    source = str(FOLDER / "busy_machine.cpp")
    build.find_compiler().run("-std=c++17", "-O1", f"-I{HEADERS}", source, "-o", str(program))
    done = run_program(program, timeout_s=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_library_is_small() -> None:
    """28 types of blocks, three sets of instructions and one to eight vectors take half of it, their grids 0.1 MiB."""
    assert build.build().stat().st_size < 4 * 2**20


def test_without_a_compiler_the_bench_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "library.so")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["bench", "kernels"]) == 2
    assert "C++ compiler" in capsys.readouterr().err
