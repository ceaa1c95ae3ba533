"""What Python tells of its imports, by package; a second start beside a reader of what it reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.bench import startup
from engine.bench.report import Report
from engine.bench.startup import bench_second_start, seconds_by_package
from engine.checkpoint.library import converted_dir, converted_path
from engine.common.config import EngineConfig
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
