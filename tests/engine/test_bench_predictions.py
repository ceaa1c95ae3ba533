"""`bench decode --predict` and `--brute-force` on tiny models: which rows there are; how fast is asserted nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import predicted_decode
from engine import cli
from engine.common.config import EngineConfig
from engine.hardware.measured import CopyTime, ExpertTime, Measurements, save_measurements
from engine.hardware.probe import Probe, probe
from engine.measure.run import NotMeasuredError
from tests.unit.made_up_tuning import measurements

TINY = "synthetic:qwen3-moe-tiny?layers=2"


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    given = ["bench", "decode", *arguments, "--model", TINY, "--tokens", "12", "--repeats", "1", "--json"]
    assert cli.main(given) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_predictions_stand_beside_measurements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicted_decode, "_measured", lambda machine, *_args: measurements(machine))
    document = bench(capsys, "--predict", "--device", "cpu", "--threads", "1")
    names = [row["name"] for row in document["rows"]]
    assert names == [f"qwen3-moe-tiny, {precision}, cpu" for precision in ("bf16", "int8", "int4")]
    assert all(row["value"] > 0 and row["predicted"] > 0 for row in document["rows"])


def test_what_cannot_be_measured_loses_no_other_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(machine: Probe, config: EngineConfig, *_args: object) -> Measurements:
        if config.precision == "int8":
            raise NotMeasuredError("too little free RAM for one expert")
        return measurements(machine)

    monkeypatch.setattr(predicted_decode, "_measured", measured)
    document = bench(capsys, "--predict", "--device", "cpu", "--threads", "1")
    assert [row["name"].split(", ")[1] for row in document["rows"]] == ["bf16", "int4"]
    (missing,) = document["peers_not_run"]
    assert missing == {"peer": "qwen3-moe-tiny, int8, cpu", "reason": "too little free RAM for one expert"}


def test_of_several_rounds_the_best_counts() -> None:
    first = measurements()
    slow = CopyTime("d", "h2d", pinned=True, both_ways=False, nbytes=100, seconds=2.0)
    quick = CopyTime("d", "h2d", pinned=True, both_ways=False, nbytes=100, seconds=1.0)
    rounds = [_with(first, slow), _with(first, quick), _with(first, slow)]
    together = predicted_decode._together(rounds)
    assert together.copies == (quick,)
    assert len(together.experts) == 3 * len(first.experts)


def _with(found: Measurements, copy: CopyTime) -> Measurements:
    assert all(isinstance(one, ExpertTime) for one in found.experts)
    return Measurements(
        found.kind, "d", 1, found.machine, found.taken_at, found.ram, found.experts, (copy,), (), found.arithmetic
    )


def test_every_setting_is_held_against_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    save_measurements(measurements(probe()))
    document = bench(capsys, "--brute-force", "--device", "cpu", "--precision", "int8")
    *each, plan, settled = document["rows"]
    assert each
    assert all(row["peer"] is None and row["name"].startswith("int8, CPU only") for row in each)
    assert plan["name"].startswith("the plan: ")
    assert settled["name"].startswith("what tuning settles on: ")
    assert plan["ratio"] <= 1
    assert settled["ratio"] <= 1
