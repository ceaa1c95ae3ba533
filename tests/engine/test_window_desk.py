"""Other programs in the window's engine process: chats come first, and the model is the user's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.batch_files.messages import SampleBatch
from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.process.requests import AnswerOthers, RequestQueue
from engine.protocol import Finished, Generate, LoadModel, ServeOthers
from engine.serving.asking import Ask, Ended, Refused, Said
from engine.serving.in_window import WindowDesk
from engine.serving.link import EngineLink
from tests.engine.test_serving import TinyEngine

HI = (ChatMessage("user", "Hello"),)
MODEL = Path("mixtral")


class Window:
    """The engine process with a tiny model, and the window's requests."""

    def __init__(self) -> None:
        self.engine, self.sent = TinyEngine(), list[Any]()
        self.engine.load(MODEL, lambda: False)
        self.requests = RequestQueue(self.sent.append)
        self.chats: list[str] = []
        self.desk = WindowDesk(self.engine, self.requests, self.answer_next)
        self.desk.model_is(MODEL)

    def answer_next(self) -> None:
        request = self.requests.take()
        assert isinstance(request, Generate)
        self.chats.append(request.request_id)
        self.requests.end(Finished(request.request_id, "stop", 1, 0, 1, 0.0, 0.0))

    def ask(self, on_event: Callable[[Any], None], tokens: int = 8, model: Path = MODEL) -> None:
        self.desk.ask(Ask(model, HI, sampling={"max_tokens": tokens}), on_event)

    def chat(self, name: str) -> None:
        self.requests.accept(Generate(name, HI, SamplingParams()))


def test_those_who_ask_are_answered_together() -> None:
    window, events = Window(), list[Any]()
    for _ in range(3):
        window.ask(events.append)
    assert isinstance(window.requests.waiting(), AnswerOthers)
    window.desk.answer()
    assert [event.generated_tokens for event in events if isinstance(event, Ended)] == [8, 8, 8]
    first = [type(event) for event in events].index(Ended)
    assert len([event for event in events[:first] if isinstance(event, Said)]) > 16  # in the same sweeps
    assert window.requests.waiting() is None
    window.desk.make_room()


def test_a_chat_is_answered_in_the_middle() -> None:
    window, order = Window(), list[str]()

    def on_event(event: Any) -> None:
        if isinstance(event, Said) and event.generated_tokens == 2:
            window.chat("c")
            window.ask(lambda _event: None)  # one more asks, before or behind the chat
        if isinstance(event, Ended):
            order.extend([*window.chats, "ended"])

    window.ask(on_event, tokens=40)
    window.desk.answer()
    assert order == ["c", "ended"]
    window.desk.make_room()


def test_another_model_in_the_window_ends_answers_in_a_sentence() -> None:
    window, events = Window(), list[Any]()

    def on_event(event: Any) -> None:
        events.append(event)
        if isinstance(event, Said) and event.generated_tokens == 2:
            window.requests.accept(LoadModel("l", EngineConfig("other")))

    window.ask(on_event, tokens=200)
    window.desk.answer()
    assert isinstance(events[-1], Refused)
    assert events[-1].error.code is ErrorCode.BUSY
    assert isinstance(window.requests.waiting(), LoadModel)
    events.clear()
    window.ask(events.append)
    window.desk.model_is(None)
    window.desk.model_is(Path("qwen3_moe"))
    window.requests.take()
    window.desk.answer()
    assert "changed" in events[-1].error.message


def test_a_batch_waits_for_those_under_way_and_lets_later_ones_in_between() -> None:
    window, events, later = Window(), list[Any](), list[Any]()

    def on_event(event: Any) -> None:
        events.append(event)
        if isinstance(event, Said) and event.generated_tokens == 2:
            window.requests.accept(SampleBatch("b", BatchJob("in", "out"), 1))
            window.ask(later.append)

    window.ask(on_event, tokens=20)
    window.desk.answer()
    assert isinstance(events[-1], Ended)
    assert not later
    assert isinstance(window.requests.take(), SampleBatch)
    assert isinstance(window.requests.take(), AnswerOthers)
    window.desk.answer()
    assert isinstance(later[-1], Ended)
    window.desk.make_room()


def test_what_breaks_ends_all_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    window, events = Window(), list[Any]()
    with monkeypatch.context() as broken:
        broken.setattr(TinyEngine, "live_rows", lambda _self: 1 / 0)
        window.ask(events.append)
        window.desk.answer()
    assert events[-1].error.code is ErrorCode.INTERNAL
    window.ask(events.append)
    window.desk.answer()
    assert isinstance(events[-1], Ended)
    window.desk.make_room()


def test_over_the_link() -> None:
    window, events, link = Window(), list[Any](), EngineLink()
    link.start()
    window.desk.connect(ServeOthers(link.address, link.secret))
    link.ask(Ask(MODEL, HI, sampling={"max_tokens": 4}), events.append)
    assert isinstance(window.requests.take(), AnswerOthers)
    window.desk.answer()
    for _ in range(1000):
        if events and isinstance(events[-1], Ended):
            break
        time.sleep(0.01)
    assert events[-1].generated_tokens == 4
    assert link.state.model == MODEL
    window.desk.connect(ServeOthers(""))
    link.close()
    window.desk.make_room()
