"""Benches: what Python tells of its imports, what goes with prepared models, short lines, and jobs of a cluster."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import download
from benchmarks.download import Line, bench_download
from benchmarks.simulated_cluster import simulate
from engine.bench import startup
from engine.bench.opened import prepared_apart
from engine.bench.report import Report
from engine.bench.startup import bench_second_start, seconds_by_package
from engine.checkpoint.library import converted_dir, converted_path
from engine.common.config import EngineConfig
from engine.common.paths import PREPARED_VARIABLE, data_dir
from engine.protocol import Generate


def test_imports_are_summed_by_package() -> None:
    told = "\n".join(
        [
            "import time: self [us] | cumulative | imported package",
            "import time:      1500 |       1500 |     torch._C",
            "import time:       500 |       2000 | torch",
            "import time:        10 |         10 |   engine.common.paths",
            "a warning | of | something",
        ]
    )
    assert seconds_by_package(told) == {"torch": 0.002, "engine": 0.00001}


def test_a_second_start_is_compared_with_reading_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts: list[bool] = []

    def phases_of(config: EngineConfig, _question: Generate) -> dict[str, float]:
        bank = converted_path(Path(config.model), "int4")
        starts.append(bank.exists())
        bank.write_bytes(bytes(10**6))
        return {"process": 1.0, "imports": 2.0}

    monkeypatch.setattr(startup, "phases_of", phases_of)
    report = Report({})
    bench_second_start(EngineConfig(str(tmp_path / "model")), 2, report, lambda _text: None)
    assert starts == [False, True, True, True, True]
    names = [(row.name, row.peer) for row in report.rows]
    assert names == [
        ("first token, 0.0 GB of prepared files on disk", "reading them"),
        ("  of that: process", None),
        ("  of that: imports", None),
        ("first token, the same in the page cache", "reading them from there"),
        ("  of that: process", None),
        ("  of that: imports", None),
    ]
    assert all(row.value == 3.0 and row.ratio for row in report.rows if row.peer)
    assert list(converted_dir().iterdir()) == []


def test_a_model_used_as_it_lies_is_compared_with_reading_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(startup, "phases_of", lambda _config, _question: {"process": 1.0})
    report = Report({})
    bench_second_start(EngineConfig(str(tmp_path)), 1, report, lambda _text: None)
    assert report.rows[0].name == "first token, 0.0 GB of the model's files on disk"
    assert report.rows[0].ratio


_BENCH = """
import time
from engine.bench.opened import prepared_apart
with prepared_apart() as folder:
    (folder / "a.gguf").write_bytes(b"prepared")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_is_prepared_meanwhile_is_gone_afterwards(tmp_path: Path) -> None:
    usual = converted_path(tmp_path, "int4")
    assert usual.parent == converted_dir() == data_dir() / "converted"
    with prepared_apart() as folder:
        meanwhile = converted_path(tmp_path, "int4")
        assert meanwhile == folder / usual.name
        meanwhile.write_bytes(b"prepared")
        with prepared_apart() as inner:
            assert inner != folder
            assert converted_path(tmp_path, "int4").parent == inner
        assert converted_path(tmp_path, "int4") == meanwhile
        assert meanwhile.exists()
    assert converted_path(tmp_path, "int4") == usual
    assert PREPARED_VARIABLE not in os.environ
    assert list(usual.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_stopped_leaves_nothing_for_long(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BENCH], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as bench:
        folder = Path(bench.stdout.readline().strip())
        assert folder.parent == converted_dir()
        assert (folder / "a.gguf").exists()
        bench.send_signal(how)
        bench.wait()
    assert folder.exists() is (how == signal.SIGKILL)
    with prepared_apart():
        assert not folder.exists()
    assert list(converted_dir().iterdir()) == []


def test_both_fetch_in_turn_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LINES", (Line("short", 1, mb_per_s=200.0, each_mb_per_s=100.0, latency_s=0.001),))
    report, said, home = Report({}), list[str](), os.environ["SWITCHYARD_HOME"]
    bench_download(2, report, said.append)
    (row,) = report.rows
    has_curl = shutil.which("curl") is not None
    assert (row.repeats, row.unit, len(said)) == (2, "MB/s", 4 if has_curl else 2)
    assert row.value > 0
    assert (row.peer, len(report.peers_not_run)) == (("curl", 0) if has_curl else (None, 1))
    assert os.environ["SWITCHYARD_HOME"] == home
    assert list(data_dir().iterdir()) == []


def test_planning_a_row_takes_as_many_steps_for_any_number_of_nodes_and_rows() -> None:
    steps = [simulate(rows, nodes).steps / rows for nodes, rows in ((3, 3_000), (30, 6_000), (150, 15_000))]
    assert max(steps) < 5


def test_a_job_holds_what_its_nodes_answer_soon_and_no_more() -> None:
    few, many = simulate(20_000, 2), simulate(40_000, 2)
    assert many.most_open <= 1.1 * few.most_open < 2_000
    assert min(few.busy, many.busy) > 0.95
    assert simulate(10_000, 8).busy > 0.9  # they end together, however fast each is
