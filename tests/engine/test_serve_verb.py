"""`switchyard serve` as a process: where it is, whom it trusts, and how it ends; mistakes are one sentence."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from engine.cli import main
from engine.common.errors import EngineError
from engine.remote.client import Client
from engine.remote.endpoint import endpoint_at, saved_endpoints
from engine.remote.failures import RemoteError, Trouble
from engine.remote.trust import fingerprint, offered_certificate
from engine.serving.server import Address, Server, own_certificate
from engine.serving.service import Service
from engine.verbs.serve import reached_at
from tests import plain_http
from tests.engine.tiny_families import tiny_checkpoint
from tests.scripted_broker import ScriptedBroker, made_up_models
from tests.tiny_checkpoint import write_tiny_checkpoint


@contextlib.contextmanager
def served(folder: Path, model: Path | None = None, *options: str) -> Iterator[tuple[str, int]]:
    """Address and process id of `switchyard serve` with a model, or a tiny one, which ends when it is asked to."""
    model = model or tiny_checkpoint("mixtral", folder / "tiny")
    command = [sys.executable, "-m", "engine.cli", "serve", "--model", str(model), "--port", "0", "--json", *options]
    environment = {**os.environ, "SWITCHYARD_HOME": str(folder / "home")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        text = ""
        while line := process.stdout.readline():
            text += line
            if line == "}\n":
                break
        yield json.loads(text)["url"], process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="asked to end by a signal")
def test_it_says_where_it_is_and_ends_when_asked(tmp_path: Path) -> None:
    with served(tmp_path) as (url, server):
        ask_for_a_secret(url)
        body = {"messages": HI, "max_tokens": 3}
        answer = plain_http.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        (engine,) = psutil.Process(server).children()
        engine.kill()
        engine.wait(10)
        for _ in range(100):  # the server goes on, with another engine
            answer = plain_http.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            if answer.status_code == 200:
                break
            assert answer.status_code == 503
        assert answer.json()["usage"]["completion_tokens"] == 3
    assert not kept_of_the_secret(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="asked to end by a signal")
def test_context_is_kept_on_disk_where_that_is_wanted(tmp_path: Path) -> None:
    with served(tmp_path, None, "--keep-context") as (url, _server):
        ask_for_a_secret(url)
    assert kept_of_the_secret(tmp_path)


SECRET = "the password is hunter2"


def ask_for_a_secret(url: str) -> None:
    body = {"messages": [{"role": "user", "content": f"{SECRET} " * 7}], "max_tokens": 3}
    answer = plain_http.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.json()["usage"]["prompt_tokens"] > 64, answer.text


def kept_of_the_secret(folder: Path) -> list[Path]:
    """The files of kept context; none of all files has the words themselves."""
    files = [path for path in (folder / "home").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    return [path for path in files if "context" in path.parts and path.name != "lock"]


HI = [{"role": "user", "content": "Hi"}]
STREAMS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"messages": HI},
        '{"error": {"message": "The engine stopped',
    ),
    "/v1/completions": ({"prompt": "Hi"}, '{"error": {"message": "The engine stopped'),
    "/v1/responses": ({"input": "Hi"}, '"type": "response.failed"'),
    "/v1/messages": ({"messages": HI}, '"type": "error"'),
    "/api/chat": ({"messages": HI}, '{"error": "The engine stopped'),
}


@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="processes are stopped by signals")
def test_an_engine_killed_in_mid_stream_ends_each_stream_in_its_own_form(tmp_path: Path) -> None:
    with served(tmp_path) as (url, server):
        for path, (fields, said) in STREAMS.items():
            limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
            body = {**fields, limit: 200, "options": {"num_predict": 200}, "stream": True, "temperature": 0}
            told = None
            # The engine of the stream before has been killed, or an answer ended before it could be.
            for _ in range(40):
                told = _killed_in_mid_stream(server, url + path, body)
                if told is not None and said in told:
                    break
            assert told is not None
            assert said in told, path


def _killed_in_mid_stream(server: int, url: str, body: dict[str, Any]) -> str | None:
    """All that a stream says whose engine is killed after the first words; None if the request is refused."""
    with plain_http.stream("POST", url, json=body, timeout=60) as answer:
        if answer.status_code != 200:
            assert answer.status_code == 503
            return None
        text = ""
        for number, part in enumerate(answer.iter_text()):
            text += part
            if number == 1:
                (engine,) = psutil.Process(server).children()
                engine.kill()
        return text


def test_it_is_said_where_other_machines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = MagicMock()
    asked.__enter__.return_value.getsockname.return_value = ("10.0.0.7", 4711)
    monkeypatch.setattr("engine.verbs.serve.socket.socket", lambda *_kind: asked)
    assert [reached_at(host) for host in ("127.0.0.1", "0.0.0.0")] == ["127.0.0.1", "10.0.0.7"]
    asked.__enter__.return_value.connect.side_effect = OSError("no network")
    assert reached_at("0.0.0.0") == "0.0.0.0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--key-file"),
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


def test_it_is_made_once_for_the_user_alone() -> None:
    file = own_certificate()
    content = file.read_bytes()
    assert own_certificate().read_bytes() == content
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"damaged")
    assert own_certificate().read_bytes() != content
    with pytest.raises(EngineError):
        fingerprint(b"nothing")


def test_another_switchyard_trusts_it_by_its_fingerprint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = Address(port=0, key="0123456789", certificate=own_certificate())
    server = Server(Service(ScriptedBroker(ends=True), made_up_models()), address)
    port = server.start()
    try:
        endpoint = endpoint_at(f"https://127.0.0.1:{port}", "rack")
        with Client(endpoint, "0123456789") as client, pytest.raises(RemoteError) as failed:
            client.models()
        assert failed.value.kind is Trouble.CERTIFICATE
        shown = fingerprint(offered_certificate(endpoint))
        assert shown == fingerprint(own_certificate().read_bytes())
        add = ["endpoints", "add", "rack", endpoint.url, "--untested", "--json", "--fingerprint"]
        assert main([*add, "AB:CD"]) == 2
        assert saved_endpoints() == ()
        capsys.readouterr()
        assert main([*add, shown.lower()]) == 0
        (kept,) = saved_endpoints()
        assert json.loads(capsys.readouterr().out)["certificate"] == kept.ca_file
        assert "PRIVATE" not in Path(kept.ca_file).read_text()
        with Client(kept, "0123456789") as client:
            assert client.models().server == "switchyard"
    finally:
        server.stop()


def test_only_who_can_be_reached_is_announced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from tests.tiny_checkpoint import write_tiny_checkpoint

    model = write_tiny_checkpoint(tmp_path / "tiny")
    assert main(["serve", "--model", str(model), "--announce", "Rack"]) == 2
    assert "--host" in capsys.readouterr().err
