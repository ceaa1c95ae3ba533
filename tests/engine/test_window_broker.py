"""Other programs in the window's engine process: they share its sweeps with chats, and the model is the user's."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.common.chat import ChatMessage
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.process.chats import ChatService
from engine.process.requests import RequestQueue
from engine.protocol import Ask, Failed, Finished, Generate, LoadModel, SampleBatch, ServeOthers, Token
from engine.runtime.schedule.scheduler import Scheduler
from engine.serving.link import EngineLink
from engine.worker import ApiRequests
from tests.engine.test_serving import TinyEngine

HI = (ChatMessage("user", "Hello"),)
MODEL = Path("mixtral")


class OneScheduler(TinyEngine):
    """As the window's engine: chats and other programs ask the same scheduler."""

    def begin(self, request: Any, on_end: Any, on_begin: Any, **_told: Any) -> None:
        self.scheduler.submit(request, on_end, on_begin)

    @property
    def is_answering(self) -> bool:
        return self.scheduler.is_busy

    is_busy = is_answering


class Window:
    """The engine process with a tiny model, and the window's requests."""

    def __init__(self, hear: Callable[[Any], object] = lambda _event: None) -> None:
        self.engine, self.sent, self._hear = OneScheduler(), list[Any](), hear
        self.engine.load(MODEL, lambda: False)
        self.requests = RequestQueue(self._send)
        self.others = ApiRequests(self.requests)
        self.others.open(self.engine)
        self.others.model_is(MODEL)
        self.chats = ChatService(
            self.requests, self._send, self.engine, lambda _name: None, lambda _tokens: None, self._admit
        )

    def _admit(self) -> None:
        self.others.admit(self.engine)

    def _send(self, event: Any) -> None:
        self.sent.append(event)
        self._hear(event)

    def answer(self) -> None:
        """What the engine process does until the window wants something, or nobody anything."""
        self._admit()
        while self.others.broker.state.waiting:  # until their requests are tokens
            time.sleep(0.001)
            self._admit()
        self.chats.answer()
        self._admit()

    def ask(self, on_event: Callable[[Any], None], tokens: int = 8, model: Path = MODEL) -> None:
        self.others.broker.ask(Ask(model, HI, sampling={"max_tokens": tokens}), on_event)

    def chat(self, name: str, tokens: int = 8) -> None:
        self.requests.accept(Generate(name, HI, SamplingParams(max_tokens=tokens)))

    def told(self, kind: type) -> list[Any]:
        return [event for event in self.sent if isinstance(event, kind)]


def test_those_who_ask_are_answered_together() -> None:
    window, events = Window(), list[Any]()
    for _ in range(3):
        window.ask(events.append)
    assert window.requests.take() is None
    window.answer()
    assert [event.generated_tokens for event in events if isinstance(event, Finished)] == [8, 8, 8]
    first = [type(event) for event in events].index(Finished)
    assert len([event for event in events[:first] if isinstance(event, Token)]) > 16  # in the same sweeps


def test_a_chat_and_other_programs_share_sweeps() -> None:
    order = list[str]()
    window = Window(lambda event: order.extend(["chat"] * isinstance(event, Token)))

    def on_event(event: Any) -> None:
        order.extend(["other"] * isinstance(event, Token))
        if isinstance(event, Token) and event.generated_tokens == 2:
            window.chat("c", tokens=20)
            window.ask(lambda event: order.extend(["later"] * isinstance(event, Token)), tokens=20)

    window.ask(on_event, tokens=200)
    window.answer()
    for name in ("chat", "later"):
        there = [place for place, who in enumerate(order) if who == name]
        assert len(there) >= 20
        between = order[there[0] : there[-1]]
        # While one of them goes on, everybody gets a token in each sweep.
        assert between.count("other") >= 15
    assert window.told(Finished)[0].generated_tokens == 20


def test_another_model_in_the_window_ends_answers_in_a_sentence_once_chats_are_done() -> None:
    window, events = Window(), list[Any]()

    def on_event(event: Any) -> None:
        events.append(event)
        if isinstance(event, Token) and event.generated_tokens == 2:
            window.chat("c", tokens=30)
            window.requests.accept(LoadModel("l", EngineConfig("other")))

    window.ask(on_event, tokens=200)
    window.answer()
    assert window.told(Finished)[0].generated_tokens == 30
    assert not isinstance(events[-1], Failed)
    assert isinstance(window.requests.take_if(LoadModel), LoadModel)
    window.others.model_is(None)
    assert events[-1].error.code is ErrorCode.BUSY
    assert not window.engine.is_answering
    events.clear()
    window.ask(events.append)
    window.others.model_is(Path("qwen3_moe"))
    window.answer()
    assert "changed" in events[-1].error.message


def test_a_batch_that_comes_does_not_wait_for_other_programs() -> None:
    window, events = Window(), list[Any]()

    def on_event(event: Any) -> None:
        events.append(event)
        if isinstance(event, Token) and event.generated_tokens == 2:
            window.requests.accept(SampleBatch("b", BatchJob("in", "out"), 1))

    window.ask(on_event, tokens=40)
    window.answer()
    assert not isinstance(events[-1], Finished)
    assert isinstance(window.requests.take_if(SampleBatch), SampleBatch)
    window.chats.answer(lambda: False)  # as a job does
    assert isinstance(events[-1], Finished)


def test_what_breaks_ends_all_and_the_next_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    window, events = Window(), list[Any]()
    with monkeypatch.context() as broken:
        broken.setattr("engine.serving.broker.policy_for", lambda _loaded: 1 / 0)
        window.ask(events.append)
        window.answer()
    assert events[-1].error.code is ErrorCode.INTERNAL
    with monkeypatch.context() as broken:
        broken.setattr(Scheduler, "_admit", lambda *_args: 1 / 0)
        window.ask(events.append)
        window.chat("c")
        window.chats.are_due()
        window.answer()
    assert events[-1].error.code is ErrorCode.INTERNAL
    assert len(window.told(Failed)) == 1
    window.ask(events.append)
    window.answer()
    assert isinstance(events[-1], Finished)


def test_over_the_link() -> None:
    window, events, link = Window(), list[Any](), EngineLink()
    link.start()
    window.others.serve(ServeOthers(link.address, link.secret))
    assert window.requests.take() is None
    window.answer()
    link.ask(Ask(MODEL, HI, sampling={"max_tokens": 4}), events.append)
    assert window.requests.take() is None
    window.answer()
    for _ in range(1000):
        if events and isinstance(events[-1], Finished):
            break
        time.sleep(0.01)
    assert events[-1].generated_tokens == 4
    assert link.state.model == MODEL
    window.others.serve(ServeOthers(""))
    window.answer()
    link.close()
