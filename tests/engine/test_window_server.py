"""The window's server: any model by name, one beside the window's, and signs of life while somebody waits."""

import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.library import LibraryEntry
from engine.common.chat import ChatMessage
from engine.common.config import EngineConfig
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.paths import models_dir
from engine.protocol import Ask, Began, Beside, Failed, Finished, Progress, Rules, Token, Wants
from engine.runtime.engine import Engine
from engine.serving.broker import ModelBroker
from engine.serving.front import EngineRouter, WindowModels
from engine.serving.link import BrokerLink, Event, Ticket
from engine.serving.server import Address, Server
from engine.serving.service import LibraryModels, Service
from tests import plain_http
from tests.engine.test_serving import HELLO, TinyEngine
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused, until
from tests.scripted_broker import ScriptedBroker, made_up_models

HI = (ChatMessage("user", "Hello"),)
WINDOWS = Path("models/windows")
RULES = Rules(str(WINDOWS), is_loading=False, config=EngineConfig(""))


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
    monkeypatch.setattr("engine.serving.answers.PING_S", 0.02)
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
        self.engines = EngineRouter(self.said.append)
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
    with closing(Fronts()) as found:
        yield found


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
        with refused(ErrorCode.MODEL_NOT_FOUND, match=sentence):
            WindowModels(fronts.engines).find(name)


def test_a_damaged_model_is_refused_with_what_is_wrong_with_it(switchyard_home: Path) -> None:
    folder = models_dir() / "broken"
    folder.mkdir(parents=True)
    (folder / "broken.gguf").write_bytes(b"GGUF and nothing else")
    models = LibraryModels()
    assert models.listed() == []
    with refused(ErrorCode.CHECKPOINT_DAMAGED, "broken"):
        models.find("broken")


# --- twenty clients, three models, little memory ----------------------------------------------------

BUDGET, SIZES = 100, {"windows": 40, "mixtral": 40, "qwen3_moe": 40, "qwen2_moe": 70}
CLIENTS, ROUNDS = 20, 5


class Memory:
    """What both engines hold; who asks for more than is free is refused, as a load is by its plan."""

    def __init__(self) -> None:
        self.held = dict[str, int]()
        self.most = 0
        self._lock = threading.Lock()

    def take(self, who: str, name: str) -> None:
        with self._lock:
            if sum(self.held.values()) + SIZES[name] > BUDGET:
                raise EngineError(ErrorCode.NOT_ENOUGH_MEMORY, f"There is no room for {name}.")
            self.held[who] = SIZES[name]
            self.most = max(self.most, sum(self.held.values()))

    def give(self, who: str) -> None:
        with self._lock:
            self.held.pop(who, None)


class Budgeted(TinyEngine):
    """Loads within the memory that is free."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def load(self, path: Path, cancelled: CancelCheck) -> None:
        self.memory.take("beside", path.name)
        super().load(Path("olmoe") if path == WINDOWS else path, cancelled)

    def unload(self) -> None:
        super().unload()
        self.memory.give("beside")


class Pressed(Fronts):
    """A server over HTTP, and a window that does what it is asked for."""

    def __init__(self, *, gives_way: bool) -> None:
        super().__init__()
        self.memory, self.gives_way = Memory(), gives_way
        self.engine = Budgeted(self.memory)
        self.asked = queue.SimpleQueue[Any]()
        self.waited = list[int]()
        """How many loads began before each answer did."""
        self.engines.ask = self._watched  # type: ignore[method-assign]
        self.engines._say = lambda message: self.asked.put(message)
        self._follow(aside=False)
        self.memory.take("window", "windows")
        self.window_has(WINDOWS)
        models = WindowModels(self.engines)
        own = LibraryEntry("windows", WINDOWS)
        others = [LibraryEntry(name, Path(name)) for name in ("mixtral", "qwen3_moe", "qwen2_moe")]
        models._listed, models._listed_s = [own, *others], float("inf")
        self.server = Server(Service(self.engines, models), Address(port=0))
        self.url = f"http://127.0.0.1:{self.server.start()}"
        self.living = threading.Thread(target=self._live)
        self.living.start()

    def _follow(self, *, aside: bool) -> None:
        rules = Rules(str(WINDOWS), is_loading=False, config=EngineConfig(""), wakes=aside, gives_way=self.gives_way)
        self.engines.follow(rules)

    def _live(self) -> None:
        """The window: puts its model aside, and loads it again once the one beside it could be freed."""
        while (message := self.asked.get()) is not None:
            has = "window" in self.memory.held
            if callable(message):
                message()
            elif message == Wants("room") and has:
                self.memory.give("window")
                self._follow(aside=True)
                self.window_has(None)
            elif message == Wants("model") and not has:
                self._wake()

    def settle(self) -> None:
        """Waits until the window has done all that it was asked for."""
        until(self.asked.empty)
        done = threading.Event()
        self.asked.put(done.set)
        assert done.wait(60)

    def _wake(self) -> None:
        broker = self.brokers[0]
        until(lambda: not broker.state.under_way and not broker.state.waiting)
        if (model := broker.state.model) is not None:
            broker.release(model)
        until(lambda: broker.state.model is None or broker.state.waiting)
        try:
            self.memory.take("window", "windows")
        except EngineError:  # a program was faster
            self.asked.put(Wants("model"))
            return
        self.window_has(WINDOWS)
        self._follow(aside=False)

    def _watched(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        before = len(self.engine.loads)

        def told(event: Event) -> None:
            if isinstance(event, Began):
                self.waited.append(len(self.engine.loads) - before)
            on_event(event)

        return EngineRouter.ask(self.engines, ask, told)

    def answer(self, model: str) -> tuple[int, str]:
        body = {"model": model, "messages": HELLO, "max_tokens": 3}
        got = plain_http.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)
        return got.status_code, got.text

    def round(self, models: tuple[str, ...]) -> list[tuple[int, str]]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(self.answer, (models[number % len(models)] for number in range(CLIENTS))))

    def close(self) -> None:
        self.asked.put(None)
        self.living.join()
        self.server.stop()
        super().close()


def test_a_pinned_model_stays_while_twenty_clients_make_the_others_come_and_go() -> None:
    """Others are loaded beside it, each for all who wait; nobody waits for more than a turn of the other one."""
    with closing(Pressed(gives_way=False)) as pressed:
        for _ in range(ROUNDS):
            answers = pressed.round(("windows", "mixtral", "qwen3_moe"))
            assert {status for status, _ in answers} == {200}
        assert max(pressed.waited) <= 3  # of the other, of its own, and one while it was on its way
        assert 5 <= len(pressed.engine.loads) <= 6 * ROUNDS  # and not one for each of a hundred answers
        status, text = pressed.answer("qwen2_moe")
        assert (status, "There is no room for qwen2_moe." in text) == (503, True)
        assert pressed.answer("windows")[0] == 200
        assert pressed.memory.most <= BUDGET
        assert "window" in pressed.memory.held


def test_a_model_that_gives_way_comes_back_and_no_client_is_lost() -> None:
    with closing(Pressed(gives_way=True)) as pressed:
        for _ in range(ROUNDS):
            answers = pressed.round(("windows", "mixtral", "qwen2_moe"))
            assert {status for status, _ in answers} <= {200, 503}
            assert all("There is no room for qwen2_moe." in text for status, text in answers if status == 503)
        for name in ("qwen2_moe", "windows", "mixtral", "qwen2_moe", "windows"):
            pressed.settle()
            assert pressed.answer(name)[0] == 200
        assert pressed.memory.most <= BUDGET


def test_what_cannot_be_loaded_is_refused_in_a_sentence_and_the_server_goes_on(switchyard_home: Path) -> None:
    """Real files and a real engine: too large, damaged, and removed since it was listed."""
    for name in ("good", "large", "cut", "gone"):
        tiny_checkpoint("mixtral", models_dir() / name)
    (weights,) = (models_dir() / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    engine = Engine()

    def load(path: Path, cancelled: CancelCheck) -> None:
        budget = 1000 if path.name == "large" else None
        engine.load(EngineConfig(str(path), ram_bytes=budget), on_progress=lambda *_: None, cancelled=cancelled)

    broker = ModelBroker(engine, load)
    server = Server(Service(broker, LibraryModels()), Address(port=0))
    url = f"http://127.0.0.1:{server.start()}"
    broker.start()
    try:
        listed = [each["id"] for each in plain_http.get(f"{url}/v1/models", timeout=60).json()["data"]]
        assert {"good", "large", "gone"} <= set(listed)
        shutil.rmtree(models_dir() / "gone")
        for name, status, words in (
            ("large", 503, "raise the budget or choose a smaller model"),
            ("cut", 400, "download or copy the model again"),
            ("gone", 404, "gone"),
            ("good", 200, "choices"),
        ):
            body = {"model": name, "messages": HELLO, "max_tokens": 3}
            got = plain_http.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            assert (name, got.status_code, words in got.text) == (name, status, True), got.text
            assert "Traceback" not in got.text
    finally:
        server.stop()
        broker.close()
