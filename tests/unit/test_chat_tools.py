"""`switchyard chat --tools`: a scripted model elsewhere that calls them, real MCP servers, and people who are asked."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import cli
from engine.common.chat import Tool
from engine.common.settings import settings_path
from engine.tools.rounds import OfferedTool
from engine.tools.servers import ToolServer
from tests.bad_endpoint import Asked, BadEndpoint

ROOT = str(Path(__file__).resolve().parents[2])
Calls = list[tuple[str, dict[str, Any]]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def model() -> Iterator[BadEndpoint]:
    with BadEndpoint() as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    _gone, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=30)
    assert left == []


def plays(model: BadEndpoint, *rounds: Calls, ends: str = "Done.") -> None:
    """Has it make these calls, a round after another, and answer then; or when it is offered no tools."""

    def answer(asked: Asked) -> None:
        made = sum(message["role"] == "assistant" for message in asked.body["messages"])
        if made >= len(rounds) or not asked.body.get("tools"):
            asked.stream(ends)
            return
        asked.begin_stream()
        asked.chunk({"content": "Let me look."})
        for index, (name, arguments) in enumerate(rounds[made]):
            function = {"name": name, "arguments": json.dumps(arguments)}
            asked.chunk({"tool_calls": [{"index": index, "id": f"c{made}{index}", "function": function}]})
        asked.chunk({}, "tool_calls")
        asked.raw(b"data: [DONE]\n\n")

    model.answer = answer


def kept(*kinds: str, **more: Any) -> None:
    """Servers in the settings, as the window keeps them."""
    servers = [
        ToolServer(kind, sys.executable, ("-m", "tests.mcp_servers", kind), (("PYTHONPATH", ROOT),)) for kind in kinds
    ]
    raw = [{**server.entry, "on": True, "tools": None} for server in servers]
    settings_path().parent.mkdir(parents=True, exist_ok=True)
    settings_path().write_text(json.dumps({"version": 2, "tool_servers": raw, **more}))


def chat(model: BadEndpoint, *options: str) -> int:
    return cli.main(["chat", "--model", f"endpoint:{model.url}", "--prompt", "How much is it?", *options])


def document(model: BadEndpoint, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert chat(model, "--json", *options) == 0
    return json.loads(capsys.readouterr().out)


def test_three_tools_are_called_and_listed(model: BadEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    kept("good", tool_clock=False)
    plays(
        model,
        [("calculator", {"expression": "6*7"}), ("add", {"a": 2, "b": 40})],
        [("weather", {"city": "Oslo"}), ("nothing", {}), ("fails", {})],
    )
    said = document(model, capsys, "--tools", "--allow-tools")
    assert said["text"] == "Done."
    made = [(call["name"], call["server"], call["state"]) for call in said["calls"]]
    assert made == [
        ("calculator", "", "done"),
        ("add", "good", "done"),
        ("weather", "good", "done"),
        ("nothing", "", "failed"),
        ("fails", "good", "failed"),
    ]
    assert [call["result"] for call in said["calls"][:3]] == ["42", "42", "It is sunny in Oslo."]
    assert said["calls"][0]["arguments"] == {"expression": "6*7"}
    asked = model.posted[-1].body
    names = [each["function"]["name"] for each in asked["tools"]]
    assert names == ["calculator", "add", "good_calculator", "fails", "weather"]
    rounds = [["assistant", "tool", "tool"], ["assistant", "tool", "tool", "tool"]]
    assert [each["role"] for each in asked["messages"]] == ["user", *rounds[0], *rounds[1]]
    # One server alone, which is all that is offered; and without tools nothing is.
    document(model, capsys, "--tool-server", "Good", "--allow-tools")
    assert model.posted[-1].body["tools"][0]["function"]["name"] == "add"
    assert document(model, capsys)["calls"] == []
    assert "tools" not in model.posted[-1].body


def test_a_file_of_servers_and_files_of_a_folder(
    model: BadEndpoint, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("42 euros")
    entry = {"command": sys.executable, "args": ["-m", "tests.mcp_servers", "good"], "env": {"PYTHONPATH": ROOT}}
    listed = tmp_path / "servers.json"
    listed.write_text(json.dumps({"mcpServers": {"mine": entry}}))
    plays(model, [("read_file", {"path": "a.txt"}), ("read_file", {"path": "../b"}), ("add", {"a": 1, "b": 1})])
    options = ("--tools", "--tool-server", str(listed), "--folder", str(tmp_path), "--allow-tools")
    assert [call["result"] for call in document(model, capsys, *options)["calls"]] == [
        "42 euros",
        "No attached folder has a file '../b'.",
        "2",
    ]


def test_people_are_asked_on_the_terminal(
    model: BadEndpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept("good")
    plays(model, [("add", {"a": 1, "b": 1})], [("add", {"a": 2, "b": 2})], *[[("weather", {"city": c})] for c in "ABC"])
    monkeypatch.setattr(sys, "stdin", Terminal("n\nmaybe\ny\na\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert chat(model, "--tools") == 0
    told = capsys.readouterr()
    assert told.out == "Let me look.\n" * 5 + "Done.\n"
    assert told.err.count("Allow it?") == 4  # once more after what was no answer, and for one of three cities
    assert 'The model wants to call add of the server good with {"a": 1, "b": 1}' in told.err
    results = [each["content"] for each in model.posted[-1].body["messages"] if each["role"] == "tool"]
    assert results == ["The user did not allow this call.", "4", *[f"It is sunny in {city}." for city in "ABC"]]


def test_where_nobody_can_be_asked_only_harmless_tools_run(
    model: BadEndpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Tool("go", "Goes.", '{"type": "object", "properties": {}}')
    kept("good", "keyed", allowed_tools=[OfferedTool(said, "go", "keyed").key, "good/weather"])
    plays(
        model,
        [("calculator", {"expression": "1+1"}), ("add", {"a": 1, "b": 1}), ("weather", {"city": "A"}), ("go", {})],
    )
    assert chat(model, "--tools", "--json") == 0
    told = capsys.readouterr()
    states = [call["state"] for call in json.loads(told.out)["calls"]]
    assert states == ["done", "denied", "denied", "done"]  # what an older version allowed said less of the tool
    assert "add --allow-tools to run it" in told.err


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("kind", "says"), [("dies", "ended"), ("huge", "sent more than"), ("dies-at-start", "settings")]
)
def test_a_server_that_misbehaves_is_one_sentence_and_the_answer_comes(
    model: BadEndpoint, capsys: pytest.CaptureFixture[str], kind: str, says: str
) -> None:
    kept(kind)
    plays(model, [("go", {})], [("calculator", {"expression": "1+1"})])
    assert chat(model, "--tools", "--allow-tools", "--json") == 0
    told = capsys.readouterr()
    said = json.loads(told.out)
    assert (said["text"], said["calls"][-1]["result"]) == ("Done.", "2")
    assert says in said["calls"][0]["result"] + told.err
    assert "\n" not in said["calls"][0]["result"]


def test_a_model_that_goes_round_in_circles_answers(model: BadEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    plays(model, *[[("calculator", {"expression": "1+1"})]] * 9)
    said = document(model, capsys, "--tools")
    assert [call["state"] for call in said["calls"]] == ["done", "done", "failed"]
    assert "3 times" in said["calls"][-1]["result"]
    assert "tools" not in model.posted[-1].body
    assert said["text"] == "Done."


def no_servers(_folder: Path) -> tuple[str, ...]:
    return ("--tool-server", "web")


def no_json(folder: Path) -> tuple[str, ...]:
    (folder / "bad.json").write_text("{")
    return ("--tool-server", str(folder / "bad.json"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (lambda _folder: ("--allow-tools",), "needs --tools"),
        (lambda _folder: ("--folder", "."), "needs --tools"),
        (lambda folder: ("--tools", "--folder", str(folder / "none")), "no folder"),
        (no_servers, "no MCP server named 'web'"),
        (no_json, "paste the whole block"),
        (lambda folder: ("--tool-server", str(folder / "none.json")), "cannot be read"),
    ],
)
def test_options_that_make_no_sense(
    model: BadEndpoint,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: Callable[[Path], tuple[str, ...]],
    says: str,
) -> None:
    assert chat(model, *options(tmp_path)) == 2
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1
    assert model.posted == []


def test_a_conversation_keeps_its_calls(
    model: BadEndpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plays(model, [("calculator", {"expression": "6*7"})])
    lines = iter(["one", "two", "/quit"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _prompt: next(lines))
    assert cli.main(["chat", "--model", f"endpoint:{model.url}", "--tools"]) == 0
    assert '[calculator {"expression": "6*7"}: 42]' in capsys.readouterr().err
    roles = [each["role"] for each in model.posted[-1].body["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
