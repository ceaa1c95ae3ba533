"""Reasoning is told apart from the answer on its whole way: engine, files, terminal, clients and the next prompt."""

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import cli
from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig, SamplingParams, Thinking
from engine.common.errors import ErrorCode
from engine.families.replies.reader import may_think, thinking_choices, thinking_values
from engine.process.chats import ChatService
from engine.process.requests import RequestQueue
from engine.protocol import Event, Finished, Generate, Token
from engine.runtime.engine import Engine
from engine.serving.server import Address, Server
from engine.serving.service import LibraryModels, Service
from tests import plain_http
from tests.engine.thinking_models import OPENED, SWITCHED, thinking_checkpoint, write_for
from tests.refusals import refused
from tests.scripted_broker import ScriptedBroker

SAMPLED = SamplingParams(temperature=0.5, max_tokens=200)
QWEN = "<think>\nLet me see: 1 < 2.\n</think>\n\nIt is <b>Paris</b>."
HARMONY = (
    "<|channel|>analysis<|message|>Let me see: 1 < 2.<|end|><|start|>assistant<|channel|>final<|message|>"
    "It is <b>Paris</b>."
)
THOUGHT, SAID = "Let me see: 1 < 2.", "It is <b>Paris</b>."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("thinking")
    return {
        "switched": thinking_checkpoint("mixtral", place / "switched"),
        "opened": thinking_checkpoint("mixtral", place / "opened", OPENED),
        "harmony": thinking_checkpoint("gpt_oss", place / "harmony"),
    }


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.unload()


def load(engine: Engine, folder: Path) -> Engine:
    config = EngineConfig(str(folder), device="cpu", precision="fp32", threads=1)
    engine.load(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    return engine


class Chats:
    """A chat service with this engine, and what it tells the window."""

    def __init__(self, engine: Engine) -> None:
        self.events = list[Event]()
        self._requests = RequestQueue(self.events.append)
        self._service = ChatService(
            self._requests, self.events.append, engine, lambda _name: None, lambda _tokens: None
        )

    def ask(self, *questions: str, sampling: SamplingParams = SAMPLED, cancel_after: int | None = None) -> None:
        for number, question in enumerate(questions):
            self._requests.accept(Generate(str(number), (ChatMessage("user", question),), sampling))
        if cancel_after is not None:
            send = self._service._send

            def sends(event: Event) -> None:
                send(event)
                if isinstance(event, Token) and event.generated_tokens == cancel_after:
                    self._requests.cancel(event.request_id)

            self._service._send = sends  # type: ignore[method-assign]
        assert self._service.are_due()
        self._service.answer()

    def told(self, name: str = "0") -> tuple[str, str]:
        tokens = [event for event in self.events if isinstance(event, Token) and event.request_id == name]
        counts = [token.generated_tokens for token in tokens]
        assert counts == sorted(counts)
        return "".join(token.reasoning for token in tokens), "".join(token.text for token in tokens)

    def ending(self, name: str = "0") -> Finished:
        (ending,) = [each for each in self.events if isinstance(each, Finished) and each.request_id == name]
        return ending


@pytest.mark.parametrize(
    ("model", "written"), [("switched", QWEN), ("opened", QWEN.removeprefix("<think>\n")), ("harmony", HARMONY)]
)
def test_an_answer_streams_with_its_reasoning_apart(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, written: str
) -> None:
    write_for(monkeypatch, lambda _prompt: written)
    load(engine, folders[model])
    chats = Chats(engine)
    chats.ask("Where?")
    thought, said = chats.told()
    assert (thought.strip(), said.strip()) == (THOUGHT, SAID)
    assert chats.ending().finish_reason == "stop"
    seen = [token for token in chats.events if isinstance(token, Token)]
    assert seen[-1].generated_tokens == chats.ending().generated_tokens
    assert sum(bool(token.reasoning) for token in seen) > 5  # token by token, not in the end
    result = engine.generate(
        [ChatMessage("user", "Where?")],
        SAMPLED,
        on_progress=lambda _done, _total: None,
        on_text=lambda _text, _tokens: None,
        cancelled=lambda: False,
    )
    assert (result.reasoning.strip(), result.text.strip()) == (THOUGHT, SAID)


@pytest.mark.parametrize(("model", "written"), [("switched", QWEN), ("harmony", HARMONY)])
@pytest.mark.parametrize("stopped", [True, False])
def test_an_answer_that_is_cut_in_the_middle_of_a_thought_is_all_thought(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, written: str, stopped: bool
) -> None:
    write_for(monkeypatch, lambda _prompt: written)
    load(engine, folders[model])
    chats, cut = Chats(engine), written.index("1 <") // 2
    if stopped:
        chats.ask("Where?", cancel_after=cut)
    else:
        chats.ask("Where?", sampling=replace(SAMPLED, max_tokens=cut))
    thought, said = chats.told()
    assert said == ""
    assert THOUGHT.startswith(thought)
    assert chats.ending().finish_reason == ("cancelled" if stopped else "length")


def test_chats_at_once_are_told_apart_each_for_itself(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_for(monkeypatch, lambda prompt: QWEN if "Where" in prompt else "<think>Why?</think>So." * ("Why" in prompt))
    load(engine, folders["switched"])
    chats = Chats(engine)
    chats.ask("Where?", "Why?", "None")
    assert tuple(part.strip() for part in chats.told("0")) == (THOUGHT, SAID)
    assert chats.told("1") == ("Why?", "So.")
    assert chats.told("2") == ("", "")


def test_marks_of_other_things_stay_text_in_a_chat(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "The tag <response> and the tag <think> mean this: </think> </response> <tool_call>{}</tool_call>"
    write_for(monkeypatch, lambda _prompt: text)
    load(engine, folders["switched"])
    chats = Chats(engine)
    chats.ask("Tags?")
    assert chats.told() == ("", text)


def test_the_template_is_told_whether_to_think(
    engine: Engine, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list[str]()
    write_for(monkeypatch, lambda prompt: prompts.append(prompt) or "So.")  # type: ignore[func-returns-value]
    load(engine, folders["switched"])
    assert engine.info.thinking == ("off", "on")
    assert engine.info.thinks
    chosen: tuple[Thinking, ...] = ("auto", "off", "on", "high")
    for thinking in chosen:
        Chats(engine).ask("Where?", sampling=replace(SAMPLED, thinking=thinking))
    assert [prompt.endswith("<think></think>") for prompt in prompts] == [False, True, False, False]


REMEMBERS = (
    "{% for message in messages %}{% if message.role == 'assistant' and message.thinking is defined %}"
    "[{{ message.thinking }}|{{ message.reasoning_content }}]{% endif %}{{ message.content }}{% endfor %}"
)


def test_earlier_reasoning_reaches_the_template_which_decides(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list[str]()
    write_for(monkeypatch, lambda prompt: prompts.append(prompt) or "So.")  # type: ignore[func-returns-value]
    turns = [ChatMessage("user", "a"), ChatMessage("assistant", "b", "hm"), ChatMessage("user", "c")]
    for name, template in (("keeps", REMEMBERS), ("leaves", SWITCHED)):
        load(engine, thinking_checkpoint("mixtral", tmp_path / name, template))
        engine.generate(
            turns,
            SAMPLED,
            on_progress=lambda _done, _total: None,
            on_text=lambda _text, _tokens: None,
            cancelled=lambda: False,
        )
    assert prompts[0] == "a[hm|hm]bc"
    assert "hm" not in prompts[1]


def test_what_templates_know_is_read_from_their_code() -> None:
    assert thinking_choices("{% if enable_thinking is defined %}{% endif %}") == ("off", "on")
    assert thinking_choices("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}") == ("off", "on")
    assert thinking_choices("{%- if reasoning_effort is not defined %}{% endif %}") == ("low", "medium", "high")
    assert thinking_choices("{{ reasoning_effort or 'none' }}") == ("off", "low", "medium", "high")
    assert thinking_choices("{{ reasoning_effort }}{% if enable_thinking %}{% endif %}") == (
        "off", "low", "medium", "high",
    )  # fmt: skip
    # What it writes, texts, and attributes of messages are none of its variables.
    assert thinking_choices("Say enable_thinking. {{ 'reasoning_effort' }} {{ message.enable_thinking }}") == ()
    assert (
        thinking_choices("{% if 'thinking' in message and message.thinking %}{{ message.thinking }}{% endif %}") == ()
    )
    assert (
        thinking_choices("{% set ns = namespace(enable_thinking=true) %}{% if ns.enable_thinking %}{% endif %}") == ()
    )
    assert thinking_choices("{% if enable_thinking == true %}{% endif %}") == ("off", "on")
    assert thinking_values("{{ reasoning_effort }}", "off") == {}
    assert thinking_values("{{ reasoning_effort }}", "on") == {}
    assert thinking_values("{{ reasoning_effort or 'none' }}", "off") == {"reasoning_effort": "none"}
    assert thinking_values("{% if thinking %}{% endif %}{{ enable_thinking }}", "low") == {
        "thinking": True, "enable_thinking": True,
    }  # fmt: skip
    assert thinking_values("{{ enable_thinking }}", "auto") == {}
    assert may_think("", "gpt_oss")
    assert may_think("{{ '</think>' }}", "mixtral")
    assert not may_think("{{ messages }}", "mixtral")


def test_other_values_are_refused() -> None:
    with refused(ErrorCode.INVALID_REQUEST, "thinking"):
        SamplingParams(thinking="loud")  # type: ignore[arg-type]


DOUBT = "<think>\nIs it <b>? No.\n</think>\n\n"
HARMONY_FORM = (
    "<|channel|>analysis<|message|>Is it <b>? No.<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"
)


def run(verb: str, model: Path, *arguments: str) -> int:
    fixed = ("--device", "cpu", "--precision", "fp32", "--threads", "1", "--temperature", "0.5", "--max-tokens", "180")
    return cli.main([verb, *arguments, "--model", str(model), *fixed])


def rows_of(model: Path, folder: Path, *arguments: str, suffix: str = "jsonl") -> list[dict[str, str]]:
    (folder / "in.csv").write_text("prompt\nred\nblue\n", encoding="utf-8")
    output = folder / f"out.{suffix}"
    assert run("batch", model, str(folder / "in.csv"), "-o", str(output), "--restart", *arguments) == 0
    if suffix == "csv":
        with output.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_reasoning_of_rows_has_a_column_of_its_own(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    write_for(monkeypatch, lambda prompt: f"{DOUBT}Red." if "red" in prompt else "Blue.")
    red, blue = rows_of(folders["switched"], tmp_path, suffix=suffix)
    assert (red["reasoning"].strip(), red["answer"]) == ("Is it <b>? No.", "Red.")
    assert (blue["reasoning"], blue["answer"]) == ("", "Blue.")
    write_for(monkeypatch, lambda _prompt: "Blue.")
    assert "reasoning" not in rows_of(folders["switched"], tmp_path, suffix=suffix)[0]


def test_openai_rows_have_it_beside_the_content(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_for(monkeypatch, lambda _prompt: f"{DOUBT}Red.")
    body = {"model": "x", "messages": [{"role": "user", "content": "red"}], "reasoning_effort": "high"}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    assert run("batch", folders["switched"], str(tmp_path / "in.jsonl"), "-o", str(output)) == 0
    (choice,) = json.loads(output.read_text(encoding="utf-8"))["response"]["body"]["choices"]
    assert choice["message"]["content"] == "Red."
    assert choice["message"]["reasoning_content"].strip() == "Is it <b>? No."


@pytest.mark.parametrize(
    ("model", "options", "written"),
    [
        # It cannot do without, or was asked to: what it thinks is free, and the answer is one of the choices.
        ("opened", (), DOUBT.removeprefix("<think>\n")),
        ("harmony", (), HARMONY_FORM),
        ("switched", ("--thinking", "on"), DOUBT),
    ],
)
def test_answers_that_are_held_to_choices_may_come_after_a_thought(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    options: tuple[str, ...],
    written: str,
) -> None:
    write_for(monkeypatch, lambda prompt: written + ("yes" if "red" in prompt else "perhaps"))
    red, blue = rows_of(folders[model], tmp_path, "--choice", "yes", "--choice", "no", *options)
    assert (red["answer"], red["reasoning"].strip(), red["problem"]) == ("yes", "Is it <b>? No.", "")
    assert blue["answer"] in ("yes", "no")


def test_answers_that_are_held_to_choices_do_without_thoughts_where_they_can(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list[str]()
    write_for(monkeypatch, lambda prompt: prompts.append(prompt) or f"{DOUBT}yes")  # type: ignore[func-returns-value]
    answers = rows_of(folders["switched"], tmp_path, "--choice", "yes", "--choice", "no")
    assert {answer["answer"] for answer in answers} <= {"yes", "no"}
    assert "reasoning" not in answers[0]
    assert all(prompt.endswith("<think></think>") for prompt in prompts)
    assert SWITCHED  # whose template closes the reasoning


def test_the_terminal_dims_what_is_thought(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_for(monkeypatch, lambda _prompt: f"{DOUBT}Red.\x1b[31m")
    asked = ("--prompt", "red")
    assert run("chat", folders["switched"], *asked, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["reasoning"].strip()) == ("Red.\x1b[31m", "Is it <b>? No.")
    assert run("chat", folders["switched"], *asked) == 0
    told = capsys.readouterr()
    assert told.out == "Red.\x1b[31m\n"  # piped: the answer alone
    assert "Is it" not in told.err
    assert "--thinking" not in told.err
    assert run("chat", folders["opened"], *asked, "--thinking", "off") == 0
    assert "--thinking" in capsys.readouterr().err  # its template cannot be told
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("chat", folders["switched"], *asked) == 0
    told = capsys.readouterr()
    assert told.out == "Red.\x1b[31m\n"
    thought = told.err.replace("\x1b[22m\x1b[2m", "")
    assert "\x1b[2mIs it <b>? No.\n\n\n\x1b[22m" in thought


ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": False}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ScriptedBroker]]:
    broker, models = ScriptedBroker(ends=True), LibraryModels(Path("mixtral"), "mixtral")
    models.listed = list  # type: ignore[method-assign,assignment]
    made = Server(Service(broker, models), Address(port=0))
    yield f"http://127.0.0.1:{made.start()}", broker
    made.stop()


@pytest.mark.parametrize(
    ("path", "fields", "thinking"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "high"),
        ("/v1/chat/completions", {"reasoning_effort": "none"}, "off"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "off"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"thinking": True}}, "on"),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "low"}}, "low"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "on"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "off"),
        ("/api/chat", {"think": True}, "on"),
        ("/api/chat", {"think": False}, "off"),
        ("/api/chat", {"think": "medium"}, "medium"),
    ],
)
def test_how_much_to_think_is_read(
    server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any], thinking: str | None
) -> None:
    assert _ask(server, path, fields) == 200
    (ticket,) = server[1].tickets
    assert ticket.ask.sampling.get("thinking") == thinking


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "loud"}),
        ("/v1/chat/completions", {"reasoning_effort": 3}),
        ("/v1/responses", {"input": "Hello", "reasoning": {"effort": ["low"]}}),
        ("/api/chat", {"think": "loud"}),
    ],
)
def test_other_words_are_refused(server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any]) -> None:
    assert _ask(server, path, fields) == 400
    assert server[1].tickets == []


@pytest.mark.parametrize(
    "rest", [("Fo", "ur"), ("<tool_call>", '{"name": "add", ', '"arguments": {}}', "</tool_call>")]
)
@pytest.mark.parametrize(
    ("path", "details"),
    [("/v1/chat/completions", "completion_tokens_details"), ("/v1/responses", "output_tokens_details")],
)
def test_tokens_of_reasoning_are_counted_apart(path: str, details: str, rest: tuple[str, ...]) -> None:
    """A call, which is held back until it is whole, is none."""
    broker = ScriptedBroker(ends=True, says=("<think>", "hm, ", "hm.", "</think>", *rest))
    models = LibraryModels(Path("mixtral"), "mixtral")
    models.listed = list  # type: ignore[method-assign,assignment]
    made = Server(Service(broker, models), Address(port=0))
    add = {"name": "add", "parameters": {"type": "object"}}
    try:
        asked = {**ASKED, "input": "2 + 2?", "tools": [{"type": "function", "function": add, **add}]}
        answer = plain_http.post(f"http://127.0.0.1:{made.start()}{path}", json=asked, timeout=30).json()
    finally:
        made.stop()
    assert answer["usage"][details] == {"reasoning_tokens": 3}


def _ask(server: tuple[str, ScriptedBroker], path: str, fields: dict[str, Any]) -> int:
    url, broker = server
    broker.tickets.clear()
    return plain_http.post(url + path, json={**ASKED, **fields}, timeout=30).status_code
