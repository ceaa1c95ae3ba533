"""Chats whose model calls tools: the loop, what it asks for, and what is kept of it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QPushButton
from pytestqt.qtbot import QtBot

from app.services.chat_store import ChatStore, MessageState
from app.services.chat_store.records import Attachment
from app.services.tools import Tools
from app.views.chat.chat_view import ChatView
from engine.batch_files.opening import InputForm, counted_rows, open_source
from engine.common.chat import Tool
from engine.common.config import BatchJob
from engine.remote.endpoint import endpoint_at, save_endpoint
from engine.tools import rounds
from engine.tools.rounds import OfferedTool, Outcome
from engine.tools.servers import ToolServer
from tests.app.chat.chat_page import last_answer
from tests.app.scripted_engine import ScriptedEngine

WEB = ToolServer("web", "npx", tools=(Tool("search", "Searches.", '{"type": "object"}'),))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What servers' tools were called with; they answer at once, with their arguments."""
    calls: list[tuple[str, str]] = []
    run = Tools.run

    def scripted(
        self: Tools,
        offered: OfferedTool,
        arguments: str,
        attached: Sequence[Attachment],
        done: Callable[[Outcome], Any],
    ) -> Callable[[], None]:
        if not offered.server:
            return run(self, offered, arguments, attached, done)
        calls.append((offered.name, arguments))
        done(Outcome(f"found {arguments}"))
        return lambda: None

    monkeypatch.setattr(Tools, "run", scripted)
    return calls


def begin(page: ChatView, engine: ScriptedEngine, qtbot: QtBot, text: str = "How much is it?") -> None:
    page.presenter._tools().put(WEB)
    page.composer.tools_button.click()
    before = len(engine.requests)
    page.presenter.send(text)
    qtbot.waitUntil(lambda: len(engine.requests) > before)


def test_tools_are_off_until_a_chat_switches_them_on(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    page.presenter.send("Hi")
    assert engine.requests[0].command.tools == ()
    engine.finish()
    page.composer.tools_button.click()
    page.presenter.send("Hi again")
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    names = [tool.name for tool in engine.requests[1].command.tools]
    assert names == ["calculator", "clock", "read_file", "run_batch", "search_documents"]
    engine.finish()
    page.composer.tools_button.click()
    page.presenter.send("And again")
    assert engine.requests[2].command.tools == ()


def test_a_round_of_calls_and_the_answer_behind_it(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, store: ChatStore
) -> None:
    begin(page, engine, qtbot)
    engine.think("Hm.")
    engine.write("I compute.")
    engine.call(("calculator", '{"expression": "6*7"}'), ("nothing", "{}"), ("calculator", '{"expression": "1/0"}'))
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    said = engine.requests[1].command.messages[-4:]
    assert [(turn.role, turn.content) for turn in said] == [
        ("assistant", "I compute."),
        ("tool", "42"),
        ("tool", "There is no tool of this name."),
        ("tool", "The expression divides by zero."),
    ]
    assert (said[0].reasoning, [call.id for call in said[0].tool_calls]) == ("Hm.", [turn.answers for turn in said[1:]])
    engine.reply("It is 42.")
    message = page.presenter.model.rows[-1].message
    assert (message.content, message.state, len(message.steps)) == ("It is 42.", MessageState.COMPLETE, 1)
    assert [use.state for use in message.steps[0].calls] == ["done", "failed", "failed"]
    rows = last_answer(page).calls
    assert len(rows.rows) == 3
    row = next(iter(rows.rows.values()))
    row.header.click()
    assert row._result.toPlainText() == "42"
    # It is kept, goes into the next prompt, into branches, and into exports.
    page.presenter.branch(message.id)
    kept = page.presenter.model.rows[-1].message
    assert kept.steps == message.steps
    page.presenter.send("Thanks")
    qtbot.waitUntil(lambda: len(engine.requests) == 3)
    roles = [turn.role for turn in engine.requests[2].command.messages]
    assert roles == ["user", "assistant", "tool", "tool", "tool", "assistant", "user"]
    engine.finish()
    read: list[Any] = []
    store.loaded.connect(lambda _chat, messages, *_more: read.append(messages))
    store.load(page.presenter.conversation.id)
    qtbot.waitUntil(lambda: bool(read))
    assert read[0][1].steps == message.steps


def test_it_asks_before_a_tool_of_a_server_runs(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, ran: list[tuple[str, str]]
) -> None:
    begin(page, engine, qtbot)
    for answer, runs in (("Deny", 0), ("Allow once", 1), ("Allow in this chat", 2)):
        engine.call(("search", json.dumps({"for": answer})))
        calls = last_answer(page).calls
        row = list(calls.rows.values())[-1]
        assert row.card is not None
        assert len(ran) == max(runs - 1, 0)
        before = len(engine.requests)
        (button,) = [each for each in row.card.findChildren(QPushButton) if each.text() == answer]
        button.click()
        qtbot.waitUntil(lambda before=before: len(engine.requests) > before)
        assert row.card is None
        assert len(ran) == runs
    assert engine.requests[1].command.messages[-1].content == "The user did not allow this call."
    engine.call(("search", "{}"))  # which this chat allows now
    assert len(ran) == 3
    engine.reply("Done.")
    page.presenter.new_chat()
    page.presenter.set_tools(True)
    page.presenter.send("Another")
    qtbot.waitUntil(lambda: len(engine.requests) == 6)
    engine.call(("search", "{}"), ("search", '{"a": 1}'))
    message_id = page.presenter.answering_id
    assert message_id is not None
    assert len(page.presenter.queue.waiting_calls(message_id)) == 2
    page.presenter.decide(message_id, page.presenter.queue.waiting_calls(message_id)[0], "always")
    assert len(ran) == 5  # both of them
    (allowed,) = page.presenter._tools().always_allowed
    assert allowed.startswith("web/search\n")


def test_the_same_call_three_times_is_noticed(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    begin(page, engine, qtbot)
    for number in range(3):
        engine.call(("clock", "{}"))
        qtbot.waitUntil(lambda number=number: len(engine.requests) == number + 2)
    asked = engine.requests[-1].command
    assert asked.tools == ()  # it answers with what it has
    assert "clock was called with the same arguments 3 times" in asked.messages[-2].content
    assert asked.messages[-1].role == "user"
    engine.reply("It is noon.")
    message = page.presenter.model.rows[-1].message
    assert (message.state, message.content) == (MessageState.COMPLETE, "It is noon.")


def test_rounds_and_calls_at_once_are_limited(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_ROUNDS", 3)
    monkeypatch.setattr(rounds, "MOST_CALLS", 2)
    begin(page, engine, qtbot)
    for number in range(4):
        engine.call(("calculator", json.dumps({"expression": str(number)})))
        qtbot.waitUntil(lambda number=number: len(engine.requests) == number + 2)
    assert "3 times in a row" in engine.requests[-1].command.messages[-2].content
    engine.reply("Enough.")
    page.presenter.send("Again")
    qtbot.waitUntil(lambda: len(engine.requests) == 6)
    engine.call(*[("calculator", json.dumps({"expression": str(number)})) for number in range(3)])
    qtbot.waitUntil(lambda: len(engine.requests) == 7)
    assert "More than 2 tools were called at once" in engine.requests[-1].command.messages[-2].content


def test_an_answer_that_waits_for_a_tool_can_be_stopped(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    begin(page, engine, qtbot)
    engine.write("One moment.")
    engine.call(("search", "{}"))
    assert not page.presenter.queue.is_idle
    assert page.presenter.stop()
    message = page.presenter.model.rows[-1].message
    assert (message.state, page.presenter.queue.is_idle, len(engine.requests)) == (MessageState.PARTIAL, True, 1)
    page.presenter.regenerate(message.id)
    qtbot.waitUntil(lambda: len(engine.requests) == 2)


def test_models_of_other_servers_use_the_same_loop(
    open_page: Callable[[], ChatView], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    save_endpoint(endpoint_at("http://127.0.0.1:8080/v1", "Here", model="m"))
    page = open_page()
    page.presenter.choose_model("endpoint:Here/m")
    begin(page, engine, qtbot)
    engine.call(("calculator", '{"expression": "2+2"}'))
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    command = engine.requests[1].command
    assert command.remote is not None
    assert (command.messages[-1].content, len(command.tools)) == ("4", 6)


def test_without_tools_earlier_calls_are_only_their_texts(page: ChatView, engine: ScriptedEngine, qtbot: QtBot) -> None:
    begin(page, engine, qtbot)
    engine.write("I compute.")
    engine.call(("calculator", '{"expression": "6*7"}'))
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    engine.reply("It is 42.")
    page.composer.tools_button.click()
    page.presenter.send("Thanks")
    said = engine.requests[2].command.messages
    assert [(turn.role, turn.content) for turn in said[:2]][1] == ("assistant", "I compute.\n\nIt is 42.")
    assert len(said) == 3


def test_a_batch_that_a_model_starts_has_its_rows_in_a_file(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, queued: list[tuple[BatchJob, int]]
) -> None:
    begin(page, engine, qtbot)
    rows = [f'Row {number}, "quoted"\nand on' for number in range(1000)]
    engine.call(("run_batch", json.dumps({"prompt": "Translate: {text}", "rows": rows})), ("run_batch", "{}"))
    message_id = page.presenter.answering_id or ""
    (waiting, refused) = page.presenter.queue.waiting_calls(message_id)  # it is asked for
    page.presenter.decide(message_id, waiting, "once")
    page.presenter.decide(message_id, refused, "once")
    assert queued == []  # nothing was written on this thread
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    ((job, amount),) = queued
    assert (amount, job.template) == (1000, "Translate: {{text}}")
    assert counted_rows(open_source(Path(job.input), InputForm())) == 1000
    assert [row.fields["text"] for row in open_source(Path(job.input), InputForm()).rows()] == rows
    told, why = (turn.content for turn in engine.requests[1].command.messages[-2:])
    assert job.output in told
    assert why == "A batch has a prompt and 1 to 1,000 rows."
    engine.finish()


def test_documents_that_a_model_searches(page: ChatView, engine: ScriptedEngine, qtbot: QtBot, tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    parts = [f"# Part {number}\n\n" + f"Of weather and wind {number}. " * 60 for number in range(40)]
    book.write_text("\n\n".join([*parts, "The vault opens with heliotrope."]))
    page.presenter.document_room = lambda _texts: 500
    page.attaching.give([book])
    qtbot.waitUntil(lambda: all(one.is_read for one in page.presenter.attachments), timeout=20_000)
    begin(page, engine, qtbot, "What is in it?")
    engine.call(("search_documents", '{"question": "What opens the vault?"}'))
    qtbot.waitUntil(lambda: len(engine.requests) == 2, timeout=20_000)
    found = engine.requests[1].command.messages[-1]
    assert (found.role, "heliotrope" in found.content, "book.md" in found.content) == ("tool", True, True)
    engine.reply("Heliotrope.")
    # In another chat nothing is attached.
    page.presenter.new_chat()
    page.presenter.set_tools(True)
    page.presenter.send("And here?")
    qtbot.waitUntil(lambda: len(engine.requests) == 3)
    engine.call(("search_documents", '{"question": "What opens the vault?"}'))
    qtbot.waitUntil(lambda: len(engine.requests) == 4)
    assert engine.requests[3].command.messages[-1].content == "No documents are attached to this chat."
    engine.finish()


def used(page: ChatView) -> int:
    use = page.composer.meter.use
    return use.used if use is not None else 0


def test_calls_and_results_and_the_tools_themselves_take_room(
    page: ChatView, engine: ScriptedEngine, qtbot: QtBot, ran: list[tuple[str, str]]
) -> None:
    qtbot.waitUntil(lambda: page.composer.meter.use is not None, timeout=30_000)
    page.presenter._tools().put(WEB)
    page.presenter._tools().allow_always(next(each.key for each in page.presenter._tools().offered() if each.server))
    page.composer.tools_button.click()
    qtbot.waitUntil(lambda: used(page) > 300, timeout=30_000)  # what the tools are is told to the model
    page.presenter.send("How much is it?")
    qtbot.waitUntil(lambda: len(engine.requests) == 1)
    engine.call(("search", json.dumps({"for": "word" * 1000})))  # the result holds its arguments once more
    qtbot.waitUntil(lambda: len(engine.requests) == 2)
    assert used(page) > 2300
    engine.reply("That much.", prompt_tokens=2800)
    assert used(page) > 2800  # as it was counted
    page.composer.box.setPlainText("And the other?")
    qtbot.waitUntil(lambda: used(page) > 2300, timeout=30_000)
    assert sum(map(len, page.presenter.said())) > 8000
    page.composer.tools_button.click()  # earlier calls are not sent then
    assert sum(map(len, page.presenter.said())) < 100
