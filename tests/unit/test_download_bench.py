"""The benchmark of downloads, over a line that is short and quick."""

import os
import shutil

import pytest

from benchmarks import download
from benchmarks.download import Line, bench_download
from engine.bench.report import Report
from engine.common.paths import data_dir


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
