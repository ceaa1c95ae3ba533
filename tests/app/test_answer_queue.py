"""Answers, several at once, each with one end, each saved as it grows."""

from collections.abc import Iterator

import pytest
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue, Phase, prompt_of
from app.services.chat_store import ChatStore, Conversation, Message, MessageState
from engine.common.config import SamplingParams
from engine.protocol import ChatMessage
from tests.app.scripted_engine import ScriptedEngine

ASKED = (ChatMessage("user", "?"),)


class Bench:
    """A queue on a real store, with one conversation and its question."""

    def __init__(self, engine: ScriptedEngine, store: ChatStore) -> None:
        self.engine = engine
        self.store = store
        self.queue = AnswerQueue(engine, store)  # type: ignore[arg-type]
        self.texts: list[tuple[str, str]] = []
        self.ended: list[Message] = []
        self.phases: list[tuple[str, Phase]] = []
        self.queue.changed.connect(self._on_changed)
        self.queue.phase_changed.connect(lambda id_, phase: self.phases.append((id_, phase)))
        store.create(Conversation("c"), [Message("q", "c", None, "user", "?")])

    def _on_changed(self, answer: Message) -> None:
        if answer.state is MessageState.STREAMING:
            self.texts.append((answer.id, answer.content))
        else:
            self.ended.append(answer)

    def ask(self, id_: str) -> None:
        answer = Message(id_, "c", "q", "assistant", "", MessageState.STREAMING)
        self.store.add_message(answer)
        self.queue.ask(answer, ASKED, SamplingParams())

    def saved(self, qtbot: QtBot, id_: str) -> Message:
        with qtbot.waitSignal(self.store.loaded) as loaded:
            self.store.load("c")
        return next(message for message in loaded.args[1] if message.id == id_)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def bench(qtbot: QtBot, engine: ScriptedEngine) -> Iterator[Bench]:
    store = ChatStore()
    yield Bench(engine, store)
    assert store.close() == 0


def test_a_growing_answer_is_saved_in_steps(bench: Bench, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(bench.store, "save_step", lambda message: steps.append(message.content))
    bench.ask("a")
    for _ in range(100):
        bench.engine.write("x")
    qtbot.waitUntil(lambda: len(steps) == 1)
    assert steps == ["x" * 100], "one step for many tokens"
    bench.engine.finish()


def test_one_of_two_answers_that_grow_at_once_is_stopped(bench: Bench, engine: ScriptedEngine, qtbot: QtBot) -> None:
    bench.ask("a")
    bench.ask("b")
    for number, name in enumerate("abab"):
        engine.turn_to(number % 2)
        engine.write(name)
    qtbot.waitUntil(lambda: {("a", "aa"), ("b", "bb")} <= set(bench.texts))
    bench.queue.stop("a")
    assert engine.cancelled == ["r0"]
    engine.turn_to(0)
    engine.finish("cancelled")
    assert [(m.id, m.content, m.reason_code) for m in bench.ended] == [("a", "aa", "cancelled")]
    engine.turn_to(1)
    engine.write("b")
    engine.finish()
    assert bench.ended[-1].content == "bbb"


def test_stopping_keeps_the_text_and_a_waiting_answer_never_starts(bench: Bench, engine: ScriptedEngine) -> None:
    bench.ask("a")
    engine.write("half")
    bench.queue.stop("a")
    assert engine.cancelled == [engine.request_id]
    engine.finish("cancelled")
    assert (bench.ended[-1].content, bench.ended[-1].reason_code) == ("half", "cancelled")
    engine.start_loading()
    bench.ask("b")
    bench.queue.stop("b")
    assert (bench.ended[-1].id, bench.ended[-1].state) == ("b", MessageState.PARTIAL)
    engine.end_loading()
    assert len(engine.requests) == 1


def test_prompts_leave_out_empty_answers_and_join_turns_of_one_role() -> None:
    lineage = [
        Message("1", "c", None, "user", "one"),
        Message("2", "c", "1", "assistant", "", MessageState.FAILED),
        Message("3", "c", "2", "user", "two"),
        Message("4", "c", "3", "assistant", "ok"),
    ]
    assert prompt_of("be brief", lineage) == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "one\n\ntwo"),
        ChatMessage("assistant", "ok"),
    )
    assert prompt_of("  ", []) == ()


def test_the_time_of_a_thought_ends_with_the_answers_first_text(bench: Bench, qtbot: QtBot) -> None:
    now = 100.0
    bench.queue._clock = lambda: now
    bench.ask("a")
    bench.engine.think("Let me ")
    now += 7
    bench.engine.think("see.")
    bench.engine.write("")  # a token that completes no text
    now += 5
    bench.engine.write("Paris")
    now += 30
    bench.engine.reply(".")
    (answer,) = bench.ended
    assert (answer.reasoning, answer.content, answer.reasoning_s) == ("Let me see.", "Paris.", 12.0)
    assert answer.stats.generated_tokens == 5
    assert bench.saved(qtbot, "a") == answer
