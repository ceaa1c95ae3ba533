"""The window's server: any model by name, one beside the window's, and signs of life while somebody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.paths import models_dir
from engine.protocol import Ask, Beside, Failed, Finished, Progress, Rules, Token, Wants
from engine.serving import streams
from engine.serving.asking import Event, Ticket
from engine.serving.front import BothEngines, WindowModels
from engine.serving.link import BrokerLink
from engine.serving.model_broker import ModelBroker
from engine.serving.server import Address, Server
from engine.serving.service import LibraryModels, Service
from tests import plain_http
from tests.engine.test_serving import HELLO, TinyEngine, made_up_models
from tests.scripted_broker import ScriptedBroker

HI = (ChatMessage("user", "Hello"),)
WINDOWS = Path("models/windows")
RULES = Rules(str(WINDOWS), is_loading=False, config=EngineConfig(""))


def until(holds: Callable[[], Any]) -> None:
    for _ in range(4000):
        if holds():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen")


class Watched(list[Any]):
    """Takes a request's events."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def ending(self) -> Any:
        return self[-1] if self and isinstance(self[-1], Finished | Failed) else None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self if isinstance(event, Token))


# --- one engine, many models ------------------------------------------------------------------------


def test_twenty_clients_and_three_models_cost_three_loads() -> None:
    engine = TinyEngine()
    broker = ModelBroker(engine, engine.load)
    names = ("mixtral", "qwen3_moe", "qwen2_moe")
    all_of_them = [Watched() for _ in range(20)]
    for number, watched in enumerate(all_of_them):
        broker.ask(Ask(Path(names[number % 3]), HI, sampling={"max_tokens": 3}), watched)
    broker.start()
    until(lambda: all(watched.ending for watched in all_of_them))
    broker.close()
    assert {type(watched.ending) for watched in all_of_them} == {Finished}
    assert engine.loads == list(names)


def test_a_model_that_cannot_be_loaded_is_refused_and_harms_no_other() -> None:
    engine, good, bad = TinyEngine(), Watched(), Watched()
    broker = ModelBroker(engine, engine.load)
    broker.ask(Ask(Path("broken"), HI), bad)
    broker.ask(Ask(Path("mixtral"), HI, sampling={"max_tokens": 3}), good)
    broker.start()
    until(lambda: good.ending and bad.ending)
    broker.close()
    assert bad.ending.error.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert isinstance(good.ending, Finished)


# --- signs of life ----------------------------------------------------------------------------------


class SlowBroker(ScriptedBroker):
    """Answers once it is let; the prompt is long."""

    def __init__(self, refusal: EngineError | None = None) -> None:
        super().__init__(ends=True)
        self.let, self._refusal = threading.Event(), refusal

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        ticket = Ticket(ask, on_event)

        def work() -> None:
            self.let.wait(30)
            if self._refusal is not None:
                ticket.tell(Failed.of(self._refusal))
                return
            ticket.tell(Progress("", "prefill", 10, 30))
            ScriptedBroker.ask(self, ask, lambda event: ticket.tell(event))

        threading.Thread(target=work, daemon=True).start()
        return ticket


STREAMS = [
    ("/v1/chat/completions", {"messages": HELLO}, ": waiting", ": 10 of 30 tokens of the prompt read"),
    ("/v1/chat/completions", {"messages": HELLO, "return_progress": True}, ": waiting", '"processed": 10'),
    ("/v1/responses", {"input": "x"}, ": waiting", ": 10 of 30 tokens of the prompt read"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5}, "event: ping", "event: ping"),
    ("/api/chat", {"messages": HELLO}, '"done": false', '"done": false'),
]


@pytest.mark.parametrize(("path", "fields", "beat", "read"), STREAMS)
@pytest.mark.parametrize("refusal", [None, EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There is no room for it.")])
def test_who_waits_for_a_load_or_a_long_prompt_hears_of_it(
    path: str,
    fields: dict[str, Any],
    beat: str,
    read: str,
    refusal: EngineError | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.02)
    broker = SlowBroker(refusal)
    server = Server(Service(broker, made_up_models()), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    try:
        with plain_http.stream("POST", url + path, json={**fields, "stream": True}, timeout=20) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            first = next(line for line in lines if line)
            assert beat in first.replace('":', '": ').replace('":  ', '": ')
            broker.let.set()
            rest = "\n".join(lines).replace('":', '": ').replace('":  ', '": ')
    finally:
        server.stop()
    if refusal is not None:
        assert "There is no room for it." in rest
    else:
        assert read in rest
        assert "Hello" in rest


def test_what_is_refused_at_once_is_refused_with_a_status() -> None:
    broker = SlowBroker(EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There is no room for it."))
    broker.let.set()
    server = Server(Service(broker, made_up_models()), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    try:
        for path, fields, _beat, _read in STREAMS:
            answer = plain_http.post(url + path, json={**fields, "stream": True}, timeout=20)
            assert (answer.status_code, "There is no room" in answer.text) == (503, True)
    finally:
        server.stop()


# --- the window's engine and the one beside it ------------------------------------------------------


class Fronts:
    """The front with its two engines, whose processes are brokers of the test."""

    def __init__(self) -> None:
        self.said = list[Any]()
        self.engines = BothEngines(self.said.append)
        self.engine, self.refuses_first = TinyEngine(), 0
        self.window: BrokerLink | None = None
        self.links = list[BrokerLink]()
        self.brokers = list[ModelBroker]()
        self.engines.beside.wake = self._start_beside
        self.engines.start()
        self.engines.follow(RULES)

    def window_has(self, model: Path | None) -> None:
        """The window's engine connects, if it has not, and says what is loaded."""
        if self.window is None:
            window = self.engines.window
            self.window = BrokerLink(window.address, window.secret, ScriptedBroker(ends=True, says="from the window"))
            self.links.append(self.window)
        self.window.model_is(model)
        until(lambda: self.engines.window.state.model == model)

    def _start_beside(self) -> None:
        if self.brokers:
            return

        def load(path: Path, cancelled: CancelCheck) -> None:
            link.model_is(None, path)
            if self.refuses_first:
                self.refuses_first -= 1
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "There is no room for it.")
            self.engine.load(path, cancelled)

        beside = self.engines.beside
        broker = ModelBroker(self.engine, load, on_model=lambda model: link.model_is(model))
        link = BrokerLink(beside.address, beside.secret, broker)
        self.brokers.append(broker)
        self.links.append(link)
        broker.start()

    def ask(self, model: Path | str) -> Watched:
        watched = Watched()
        self.engines.ask(Ask(Path(model), HI, sampling={"max_tokens": 3}), watched)
        return watched

    def close(self) -> None:
        for broker in self.brokers:
            broker.close()
        for link in self.links:
            link.close()
        self.engines.close()


@pytest.fixture
def fronts() -> Iterator[Fronts]:
    found = Fronts()
    yield found
    found.close()


def test_the_windows_model_is_the_windows_and_others_are_loaded_beside_it(fronts: Fronts) -> None:
    fronts.window_has(WINDOWS)
    ours, theirs = fronts.ask(WINDOWS), fronts.ask("mixtral")
    until(lambda: ours.ending and theirs.ending)
    assert ours.text == "from the window"
    assert isinstance(theirs.ending, Finished)
    assert fronts.engine.loads == ["mixtral"]
    assert Beside("mixtral", is_loading=True) in fronts.said
    until(lambda: fronts.said[-1] == Beside("mixtral"))


def test_a_window_that_has_no_engine_keeps_no_program_from_another_model(fronts: Fronts) -> None:
    other = fronts.ask("mixtral")
    until(lambda: other.ending)
    assert isinstance(other.ending, Finished)
    with pytest.raises(EngineError, match="busy or not running"):
        fronts.engines.window.ask(Ask(WINDOWS, HI), Watched())


def test_what_does_not_fit_beside_the_windows_model_is_refused_in_a_sentence(fronts: Fronts) -> None:
    fronts.window_has(WINDOWS)
    fronts.refuses_first = 1
    refused = fronts.ask("mixtral")
    until(lambda: refused.ending)
    assert refused.ending.error.message == "There is no room for it."
    assert not any(isinstance(message, Wants) for message in fronts.said)


def test_the_windows_model_makes_room_if_its_user_allows_it(fronts: Fronts) -> None:
    fronts.engines.follow(Rules(str(WINDOWS), is_loading=False, config=EngineConfig(""), gives_way=True))
    fronts.window_has(WINDOWS)
    fronts.refuses_first = 1
    asked = fronts.ask("mixtral")
    until(lambda: Wants("room") in fronts.said)
    fronts.window_has(None)
    until(lambda: asked.ending)
    assert isinstance(asked.ending, Finished)


def test_a_model_that_the_window_put_aside_is_waited_for(fronts: Fronts) -> None:
    models = WindowModels(fronts.engines)
    fronts.engines.follow(Rules(str(WINDOWS), is_loading=False, config=EngineConfig(""), wakes=True))
    fronts.window_has(None)
    found = list[tuple[str, Path]]()
    asking = threading.Thread(target=lambda: found.append(models.find("")))
    asking.start()
    until(lambda: Wants("model") in fronts.said)
    assert not found
    fronts.engines.follow(RULES)
    fronts.window_has(WINDOWS)
    asking.join(30)
    assert found == [("windows", WINDOWS)]


def test_a_window_without_a_model_says_so_in_a_sentence(fronts: Fronts) -> None:
    fronts.engines.follow(Rules("", is_loading=False, config=EngineConfig("")))
    fronts.window_has(None)
    for name, sentence in (("", "No model is loaded"), ("nothing", "no model named 'nothing'")):
        with pytest.raises(EngineError, match=sentence) as refused:
            WindowModels(fronts.engines).find(name)
        assert refused.value.code is ErrorCode.MODEL_NOT_FOUND


def test_a_damaged_model_is_refused_with_what_is_wrong_with_it(switchyard_home: Path) -> None:
    folder = models_dir() / "broken"
    folder.mkdir(parents=True)
    (folder / "broken.gguf").write_bytes(b"GGUF and nothing else")
    models = LibraryModels()
    assert models.listed() == []
    with pytest.raises(EngineError) as refused:
        models.find("broken")
    assert refused.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert "broken" in refused.value.message
