"""`switchyard batch --endpoint` and what `switchyard jobs` says of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import cli
from engine.batch_files.journal import journal_path, read_answers
from tests.bad_endpoint import Asked, BadEndpoint


def capitals(asked: Asked) -> None:
    asked.stream(asked.body["messages"][-1]["content"].upper())


def write(folder: Path, rows: int = 6) -> Path:
    path = folder / "in.txt"
    path.write_text("".join(f"row {row}\n" for row in range(rows)))
    return path


def test_rows_are_answered_by_servers_and_each_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with BadEndpoint(answer=capitals) as one, BadEndpoint(answer=capitals) as other:
        endpoints = [part for server in (one, other) for part in ("--endpoint", f"{server.url}#some/model")]
        output = tmp_path / "out.csv"
        command = ["batch", str(write(tmp_path)), "-o", str(output), *endpoints, "--name-endpoints"]
        assert cli.main([*command, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert cli.main(["batch", str(tmp_path / "in.txt"), "--sample", "2", *endpoints]) == 0
        sampled = capsys.readouterr()
    assert (document["finished"], document["done"], document["failed"]) == (True, 6, 0)
    places = document["endpoints"]
    assert [place["host"] for place in places] == [f"127.0.0.1:{server.port}" for server in (one, other)]
    assert sum(place["rows"] for place in places) == 6
    assert {place["prompt_tokens"] for place in places if place["rows"]} <= {7 * rows for rows in range(7)}
    assert "ROW 1" in sampled.out
    assert "a row took" in sampled.err
    assert output.read_text(encoding="utf-8-sig").splitlines()[0].endswith(",endpoint")
    assert cli.main(["jobs", "list"]) == 0
    assert f"by 127.0.0.1:{one.port}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [("nowhere", "no endpoint called"), ("ftp://host/v1", "endpoint"), ("http://127.0.0.1:1/v1#m", "refused")],
)
def test_what_cannot_be_used_is_said_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.verbs.batch.PATIENCE_S", 0.1)
    assert cli.main(["batch", str(write(tmp_path)), "--endpoint", endpoint, "--json"]) == 2
    captured = capsys.readouterr()
    assert why in captured.err
    assert "Traceback" not in captured.err


def test_no_model_and_no_torch_is_needed(tmp_path: Path, switchyard_home: Path) -> None:
    with BadEndpoint(answer=capitals) as server:
        script = (
            "import sys; from engine import cli; code = cli.main(sys.argv[1:]);"
            "print([m for m in ('torch', 'transformers') if m in sys.modules]); sys.exit(code)"
        )
        command = ["batch", str(write(tmp_path)), "-o", str(tmp_path / "out.jsonl"), "--endpoint", server.url]
        done = subprocess.run(
            [sys.executable, "-c", script, *command],
            env={**os.environ, "SWITCHYARD_HOME": str(switchyard_home)},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_tools_of_a_row_go_along_and_calls_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}, "strict": True}]
    body = {"messages": [{"role": "user", "content": "Paris?"}], "tools": tools, "tool_choice": "auto"}
    plain = {"messages": [{"role": "user", "content": "Hello"}]}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": each}
        for name, each in (("tool", body), ("text", plain))
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def answer(asked: Asked) -> None:
        if "tools" not in asked.body:
            asked.stream("Hello")
            return
        assert (asked.body["tools"], asked.body["tool_choice"]) == (tools, "auto")
        asked.begin_stream()
        function = {"name": "weather", "arguments": '{"city":'}
        asked.chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})
        asked.chunk({"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]})
        asked.chunk({}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    with BadEndpoint(answer=answer) as server:
        command = ["batch", str(source), "-o", str(output), "--endpoint", f"{server.url}#some/model", "--json"]
        assert cli.main(command) == 0, capsys.readouterr().err
    lines = [json.loads(line)["response"]["body"]["choices"][0] for line in output.read_text("utf-8").splitlines()]
    (call,) = lines[0]["message"]["tool_calls"]
    assert call == {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert (lines[0]["message"]["content"], lines[0]["finish_reason"]) == (None, "tool_calls")
    assert (lines[1]["message"]["content"], lines[1]["finish_reason"]) == ("Hello", "stop")
    assert "tool_calls" not in lines[1]["message"]
    kept = read_answers(journal_path(output))
    assert [each.shown for each in kept] == ['weather({"city": "Paris"})', "Hello"]
