"""`switchyard serve` as a process: it says where it is, answers, and ends when asked to; mistakes are one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest

from engine.cli import main
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.mark.skipif(os.name != "posix", reason="asked to end by a signal")
def test_it_says_where_it_is_and_ends_when_asked(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path / "tiny")
    command = [sys.executable, "-m", "engine.cli", "serve", "--model", str(folder), "--port", "0", "--json"]
    environment = {**os.environ, "SWITCHYARD_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        text = ""
        while line := process.stdout.readline():
            text += line
            if line == "}\n":
                break
        url = json.loads(text)["url"]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        (engine,) = psutil.Process(process.pid).children()
        engine.kill()
        engine.wait(10)
        for _ in range(100):  # the server goes on, with another engine
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            if answer.status_code == 200:
                break
            assert answer.status_code == 503
        assert answer.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "key"),
        (["--key-file", "/nowhere/key"], "cannot be read"),
        (["--port", "99999"], "not a port"),
        (["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_mistakes_are_one_sentence(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SWITCHYARD_KEY", raising=False)
    model = [] if "--model" in options else ["--model", str(write_tiny_checkpoint(tmp_path / "tiny"))]
    assert main(["serve", *model, *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
