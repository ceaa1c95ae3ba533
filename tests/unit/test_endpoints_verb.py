"""`switchyard endpoints`, and `switchyard chat` where another server answers."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.remote import endpoint as keys
from engine.remote.endpoint import endpoints_file, saved_endpoints
from tests.bad_endpoint import MODEL, BadEndpoint

SECRET = "sk-very-secret-1234567890"


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_this_run", {})
    monkeypatch.setattr(keys, "_of_keyring", {})


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert cli.main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    return json.loads(said.out)


def test_added_tested_listed_and_removed(server: BadEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "endpoints") == []
    added = told(capsys, "endpoints", "add", "rack", server.url, "--at-once", "3", "--price-in", "0.5")
    assert (added["name"], added["models"], added["at_once"], added["price_in"]) == ("rack", [MODEL], 3, 0.5)
    assert (added["server"], added["tried"], added["problem"]) == ("other", MODEL, "")
    assert [each["name"] for each in told(capsys, "endpoints", "list")] == ["rack"]
    assert told(capsys, "endpoints", "test", "rack")["latency_s"] > 0
    assert "already" in told(capsys, "endpoints", "add", "rack", server.url, code=2)["error"]["message"]
    assert cli.main(["endpoints", "test", "rack"]) == 0
    assert "top-k" in capsys.readouterr().out
    assert told(capsys, "endpoints", "remove", "rack") == {"removed": "rack"}
    assert saved_endpoints() == ()


def test_what_cannot_be_reached_is_not_kept(server: BadEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    server.models = ()
    for address in ("http://127.0.0.1:1", "ftp://x", f"http://127.0.0.1:{server.port}/elsewhere"):
        assert told(capsys, "endpoints", "add", "rack", address, code=2)["error"]["message"]
    assert saved_endpoints() == ()
    told(capsys, "endpoints", "add", "rack", "http://127.0.0.1:1", "--untested")
    assert saved_endpoints()[0].found.server == ""


def test_a_key_comes_from_the_standard_input_or_the_environment(
    server: BadEndpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{SECRET}\n"))
    told(capsys, "endpoints", "add", "rack", server.url, "--key-stdin")
    assert {each.key for each in server.posted} == {SECRET}
    assert SECRET not in endpoints_file().read_text()
    server.asked.clear()
    monkeypatch.setattr(keys, "_this_run", {})
    monkeypatch.setenv("SWITCHYARD_KEY_RACK", f"{SECRET}2")
    told(capsys, "endpoints", "test", "rack")
    assert {each.key for each in server.posted} == {f"{SECRET}2"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert told(capsys, "endpoints", "add", "other", server.url, "--key-stdin", code=2)


def test_a_chat_elsewhere_loads_nothing_here(server: BadEndpoint, switchyard_home: Path) -> None:
    script = (
        "import sys; from engine import cli; "
        f"assert cli.main(['chat', '--model', 'endpoint:{server.url}', '--prompt', 'Hello']) == 0; "
        "print({'torch', 'transformers', 'engine.runtime.engine'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Hello", "set()"]


def test_a_chat_elsewhere(server: BadEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "endpoints", "add", "rack", server.url, "--untested")
    server.asked.clear()
    options = ("--prompt", "Hello", "--system", "Be brief.", "--top-k", "5", "--seed", "3")
    said = told(capsys, "chat", "--model", f"endpoint:rack/{MODEL}", *options)
    assert (said["text"], said["model"], said["endpoint"]) == ("Hello", MODEL, "rack")
    assert (said["generated_tokens"], said["left_out"]) == (3, ["top_k"])
    body = server.posted[0].body
    assert body["seed"] == 3
    assert "temperature" not in body
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    assert cli.main(["chat", "--model", f"endpoint:{server.url}", "--prompt", "Hello"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello\n"
    assert f"sent to 127.0.0.1:{server.port}" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "endpoint:nobody/x"),
        ("--model", "endpoint:http://127.0.0.1:1#x"),
        ("--model", "endpoint:http://127.0.0.1:1#x", "--trace", "t.json"),
    ],
)
def test_what_goes_wrong_is_one_line(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "chat", *arguments, "--prompt", "Hello", code=2)["error"]["message"].endswith(".")


def test_a_conversation(
    server: BadEndpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["one", "two", "/quit"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert cli.main(["chat", "--model", f"endpoint:{server.url}"]) == 0
    assert capsys.readouterr().out == "Hello\nHello\n"
    assert [each["content"] for each in server.posted[1].body["messages"]] == ["one", "Hello", "two"]
