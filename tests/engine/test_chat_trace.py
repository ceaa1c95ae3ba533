"""`switchyard chat --trace`: the timeline of an answer as a trace and as a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from engine import cli
from engine.telemetry.recorder import RECORDER
from tests.engine.tiny_families import tiny_checkpoint
from tests.unit.trace_format import check_trace


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("mixtral", tmp_path_factory.mktemp("models") / "tiny-mixtral", max_position_embeddings=4096)


def chat(tiny: Path, *arguments: str, device: str = "cpu") -> int:
    options = ("--device", device, "--precision", "fp32", "--threads", "1", "--prompt", "secret words", "--json")
    return cli.main(["chat", "--model", str(tiny), *options, "--max-tokens", "6", *arguments])


@pytest.mark.parametrize("device", ["cpu", "emulated:slow-link"])
def test_an_answer_as_a_trace(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    path = tmp_path / "answer.json"
    assert chat(tiny, "--trace", str(path), device=device) == 0
    told = capsys.readouterr()
    answer = json.loads(told.out)  # stdout is still one document
    assert "ui.perfetto.dev" in told.err
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    check_trace(document)
    assert document["otherData"] == {"model": "tiny-mixtral", "device": answer["device"], "precision": "fp32"}
    events = document["traceEvents"]
    assert sum(event["name"] == "token" for event in events) == answer["generated_tokens"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks >= ({"phase", "cpu_attention"} if device == "cpu" else {"phase", "gpu"})
    assert "secret" not in text
    assert not RECORDER.on


def test_an_answer_as_a_table(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.csv"
    assert chat(tiny, "--trace", str(path)) == 0
    count = int(capsys.readouterr().err.split(" spans")[0].rsplit(" ", 1)[1].replace(",", ""))
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == count > 10
    assert {"prefill", "sample"} <= {row["name"] for row in rows}
    assert all(int(row["end_ns"]) >= int(row["start_ns"]) for row in rows)


def test_a_trace_that_cannot_be_written_is_refused_at_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(tiny, "--trace", str(tmp_path / "nowhere" / "t.json")) == 2
    refusal = json.loads(capsys.readouterr().out)["error"]
    assert refusal["code"] == "invalid_request"
    assert "folder" in refusal["message"]
