"""The model of the start: found off the window's thread and loaded, or told why not, or put off until it is needed."""

import base64
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QImage
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.main import first_run_entry, page_entries
from app.services import tuning
from app.services.chat_store import ChatStore, Message, MessageState
from app.services.engine_client import EngineClient, EngineState
from app.services.engine_request import LoadingPace
from app.services.model_start import ModelStart
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.chat_view import ChatView
from app.views.chat.model_picker import loading_words
from app.views.main_window.window import MainWindow
from app.widgets.page import CHAT
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.common.paths import models_dir
from engine.protocol import ChatMessage, Failed, Phase, Progress
from engine.remote.endpoint import endpoint_at, remote_name, remove_endpoint, save_endpoint
from tests.app.scripted_engine import ScriptedEngine
from tests.bad_endpoint import MODEL, BadEndpoint
from tests.tiny_checkpoint import write_tiny_checkpoint

WORKER = [sys.executable, "-P", "-m", "tests.app.scripted_worker"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(
    qapp: QApplication, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ModelStart, EngineClient]]:
    """With a real worker process around a scripted engine."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = EngineClient(command=WORKER)
    result = ModelStart(client, settings)
    yield result, client
    result.close()
    client.close_now()
    result.deleteLater()
    client.deleteLater()


def _model(name: str) -> Path:
    folder = models_dir() / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_choice_made_meanwhile_is_the_one_that_counts(
    start: tuple[ModelStart, EngineClient], settings: Settings, qtbot: QtBot
) -> None:
    service, client = start
    _model("first")
    second = _model("second")
    settings.default_model = "first"
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.begin()
        settings.default_model = "second"
        service.begin()
    assert client.model.name == str(second)


def test_a_model_that_cannot_be_loaded_after_a_restart_is_told(
    qapp: QApplication, settings: Settings, qtbot: QtBot
) -> None:
    engine = ScriptedEngine()
    service = ModelStart(engine, settings)  # type: ignore[arg-type]
    service.restart()
    assert engine.restarts == 1
    with qtbot.waitSignal(service.problem) as told:
        engine.loads[-1].end(Failed(engine.loads[-1].id, ErrorCode.MODEL_NOT_FOUND, "It is gone."))
    assert told.args == ["It is gone."]
    service.deleteLater()


def test_the_default_model_is_loaded_and_another_is_opened_by_hand(
    start: tuple[ModelStart, EngineClient], settings: Settings, qtbot: QtBot, tmp_path: Path
) -> None:
    service, client = start
    folder = _model("mine")
    settings.default_model = "mine"
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.begin()
        assert client.state is EngineState.STARTING  # begin() did not wait
    assert client.model.name == str(folder)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with qtbot.waitSignal(service.problem, timeout=20_000) as told:
        service.open(str(broken))
    assert str(broken) in told.args[0]
    assert client.model is not None  # the one before stays
    assert client.model.name.endswith("mine")
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.open(str(write_tiny_checkpoint(tmp_path / "other")))
    assert client.model.name.endswith("other")
    assert settings.default_model == "mine"


def test_loading_is_cancelled_and_a_model_unloaded(
    start: tuple[ModelStart, EngineClient], settings: Settings, qtbot: QtBot
) -> None:
    service, client = start
    _model("slow")
    settings.default_model = "slow"
    service.begin()
    qtbot.waitUntil(lambda: client.loading is not None, timeout=20_000)
    with qtbot.assertNotEmitted(service.problem):
        service.cancel()
        qtbot.waitUntil(lambda: client.state is EngineState.READY, timeout=20_000)
    assert client.model is None
    service.cancel()  # nothing loads: without effect
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.open(str(write_tiny_checkpoint(models_dir() / "good")))
    service.unload()
    qtbot.waitUntil(lambda: client.model is None, timeout=20_000)
    assert client.state is EngineState.READY


def test_an_unused_model_is_put_aside_and_comes_back_when_it_is_needed(
    start: tuple[ModelStart, EngineClient], settings: Settings, qtbot: QtBot
) -> None:
    service, client = start
    settings.idle_minutes = 10
    write_tiny_checkpoint(models_dir() / "good")
    settings.default_model = "good"
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.begin()
    assert service._unused.isActive()
    answer = client.generate([ChatMessage("user", "count 30")], SamplingParams())
    service._unused.timeout.emit()  # an answer is under way: it is not unused
    with qtbot.waitSignal(answer.finished, timeout=20_000):
        assert client.model is not None
    with qtbot.waitSignal(service.aside_changed, timeout=20_000):
        service._unused.timeout.emit()
    qtbot.waitUntil(lambda: client.model is None, timeout=20_000)
    assert service.is_aside
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.need()
    assert not service.is_aside
    settings.idle_minutes = 0
    assert not service._unused.isActive()


def test_a_model_gives_way_once_its_answer_has_ended_and_is_not_put_aside_by_unloading(
    start: tuple[ModelStart, EngineClient], settings: Settings, qtbot: QtBot
) -> None:
    service, client = start
    path = write_tiny_checkpoint(models_dir() / "good")
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        client.start()
        service.open(str(path))
    answer = client.generate([ChatMessage("user", "count 30")], SamplingParams())
    with qtbot.waitSignal(answer.finished, timeout=20_000):
        service.give_way()
        assert not service.is_aside
    qtbot.waitUntil(lambda: service.aside == str(path) and client.model is None, timeout=20_000)
    with qtbot.waitSignal(client.model_loaded, timeout=20_000):
        service.need()
    service.unload()
    qtbot.waitUntil(lambda: client.model is None, timeout=20_000)
    assert not service.is_aside  # its user wants none


@pytest.mark.parametrize("model", ["good", "elsewhere"])
def test_the_model_is_timed_as_it_is_set(
    start: tuple[ModelStart, EngineClient],
    settings: Settings,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    service, client = start
    monkeypatch.setattr(tuning, "_PROMPT", "count 20")
    write_tiny_checkpoint(models_dir() / "good")
    settings.default_model = model
    timing = tuning.SpeedTest(client, service)
    with qtbot.waitSignal(timing.ended, timeout=20_000) as ended:
        timing.start()
        timing.start()  # without effect: it is being timed
    rate, problem = ended.args
    assert (rate > 0, "elsewhere" in problem) == ((True, False) if model == "good" else (False, True))
    assert not timing.is_running
    timing.deleteLater()


def test_each_phase_has_a_rate_of_its_own() -> None:
    now = [100.0]
    pace = LoadingPace(lambda: now[0])

    def tell(phase: Phase, done: int, at_s: float) -> None:
        now[0] = at_s
        pace.note(Progress("load", phase, done * 10**9, 10 * 10**9))

    assert pace.share is None
    assert loading_words(pace) == "Opening the model"
    tell("reading", 1, 100.0)
    tell("reading", 2, 100.5)
    assert pace.left_s is None  # too early to tell
    tell("reading", 3, 102.0)
    assert pace.left_s == 7.0
    assert loading_words(pace).startswith("Reading weights")
    assert "3.00 GB of 10.0 GB" in loading_words(pace)
    assert "7 s left" in loading_words(pace)
    tell("converting", 4, 103.0)
    assert pace.left_s is None
    tell("converting", 4, 110.0)
    assert pace.left_s is None  # nothing moves: nothing is promised
    tell("converting", 5, 113.0)
    assert pace.left_s == 50.0
    assert loading_words(pace).startswith("Converting weights")
    tell("keeping", 11, 114.0)
    assert pace.share == 1.0
    pace.note(Progress("load", "loading", 0, 0))
    assert pace.share is None
    assert pace.left_s is None
    pace.note(None)
    assert pace.progress is None


class Opened:
    """The window as it comes up, with a worker's process around a scripted engine."""

    def __init__(self, qtbot: QtBot, theme: ThemeController) -> None:
        self._bot = qtbot
        self.settings, self.store, self.client = Settings(), ChatStore(), EngineClient(command=WORKER)
        services = Services.around(self.client, self.store, self.settings, theme)
        self.window = MainWindow(services, page_entries(), first_run_entry())
        page = self.window.page(CHAT)
        assert isinstance(page, ChatView)
        self.chat = page
        with qtbot.waitSignal(self.store.listed):
            self.window.show()
        self.window.begin()
        qtbot.waitUntil(lambda: self.client.state not in (EngineState.STOPPED, EngineState.STARTING), timeout=20_000)

    def ask(self, text: str) -> Message:
        self.chat.composer.box.setPlainText(text)
        self._bot.keyClick(self.chat.composer.box, Qt.Key.Key_Return)
        self._bot.waitUntil(lambda: self.last.state is not MessageState.STREAMING, timeout=20_000)
        return self.last

    @property
    def last(self) -> Message:
        return self.chat.presenter.model.rows[-1].message

    def close(self) -> None:
        self.window.close()
        self.client.close_now()
        self.store.close()
        self.settings.save()
        for each in (self.window, self.client, self.store, self.settings):
            each.deleteLater()


@pytest.fixture
def server() -> Iterator[BadEndpoint]:
    with BadEndpoint() as found:
        save_endpoint(endpoint_at(found.url, "Rack", model=MODEL))
        yield found


@pytest.fixture
def open_window(
    qtbot: QtBot, theme: ThemeController, switchyard_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Opened]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = models_dir() / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    settings = Settings()
    settings.default_model = "mine"
    settings.save()
    settings.deleteLater()
    opened: list[Opened] = []

    def build() -> Opened:
        if opened:
            opened[-1].close()
        opened.append(Opened(qtbot, theme))
        return opened[-1]

    yield build
    opened[-1].close()


def test_it_opens_with_that_server_and_loads_a_model_once_it_is_needed(
    open_window: Callable[[], Opened], server: BadEndpoint, qtbot: QtBot
) -> None:
    first = open_window()
    qtbot.waitUntil(lambda: first.client.model is not None, timeout=20_000)  # nothing says that it is not wanted
    first.chat.presenter.choose_model(remote_name(endpoint_at(server.url, "Rack"), MODEL))
    first.ask("Hello")

    again = open_window()
    qtbot.waitUntil(lambda: len(again.chat.presenter.model.rows) == 2)  # the chat is back
    assert again.chat.presenter.is_elsewhere
    assert again.chat.title_bar.model_button.accessibleName().startswith(f"Model: {MODEL}")
    assert again.window.pages.currentWidget() is again.chat
    assert again.ask("And again?").content == "Hello"
    assert (again.client.state, again.client.model, again.client.config) == (EngineState.READY, None, None)
    again.chat.new_chat()
    assert not again.chat.presenter.is_elsewhere
    assert again.ask("count 2").content.strip() == "1 2"  # answered here
    assert again.client.model is not None
    again.chat.presenter.choose_model(f"endpoint:Rack/{MODEL}")
    again.chat.new_chat()

    here = open_window()
    qtbot.waitUntil(lambda: here.client.model is not None, timeout=20_000)  # the chat on screen was answered here


def test_an_empty_chat_that_was_to_go_there_is_shown_again(
    open_window: Callable[[], Opened], server: BadEndpoint, qtbot: QtBot
) -> None:
    first = open_window()
    qtbot.waitUntil(lambda: first.client.model is not None, timeout=20_000)
    first.ask("count 1")
    first.chat.new_chat()
    first.chat.presenter.choose_model(f"endpoint:Rack/{MODEL}")
    again = open_window()
    qtbot.wait(50)
    assert again.chat.presenter.conversation.model == f"endpoint:Rack/{MODEL}"
    assert not again.chat.presenter.model.rows
    assert again.client.config is None
    remove_endpoint("Rack")
    gone = open_window()
    qtbot.waitUntil(lambda: gone.client.model is not None, timeout=20_000)  # that server can answer nothing
    assert not gone.chat.presenter.is_elsewhere


@pytest.fixture
def scripted(settings: Settings) -> Iterator[tuple[ModelStart, ScriptedEngine, list[bool]]]:
    """A start whose models are found at once: how often one was looked for stands in the list."""
    engine, begun = ScriptedEngine(None), list[bool]()
    start = ModelStart(engine, settings)  # type: ignore[arg-type]
    start._looking.ask = lambda *_: begun.append(True)  # type: ignore[method-assign, assignment]
    yield start, engine, begun
    start.close()
    start.deleteLater()
    engine.deleteLater()


def test_what_needs_a_model_of_this_pc_loads_it(
    scripted: tuple[ModelStart, ScriptedEngine, list[bool]], settings: Settings
) -> None:
    start, engine, begun = scripted
    start.need()
    assert begun == []  # nothing was put off
    start.put_off()
    assert (engine.state, begun) == (EngineState.READY, [])
    settings.serves_others = True
    assert begun == [True]
    start.need()
    assert begun == [True]  # on its way already


def test_an_engine_that_is_restarted_loads_none_either(
    scripted: tuple[ModelStart, ScriptedEngine, list[bool]],
) -> None:
    start, engine, begun = scripted
    engine.knows_a_model = False
    start.put_off()
    start.restart()
    assert (engine.restarts, begun) == (1, [])
    start.need()
    start.restart()
    assert len(begun) == 2


def test_pictures_reach_the_server_and_are_there_when_the_window_is_opened_again(
    open_window: Callable[[], Opened], server: BadEndpoint, qtbot: QtBot
) -> None:
    first = open_window()
    first.chat.presenter.choose_model(f"endpoint:Rack/{MODEL}")
    picture = QImage(30, 20, QImage.Format.Format_RGB32)
    picture.fill(QColor("teal"))
    with qtbot.waitSignal(first.chat.presenter.attached):
        first.chat.attaching.give([picture])
    assert first.ask("What is it?").content == "Hello"
    shown, text = server.posted[-1].body["messages"][0]["content"]
    sent = QImage.fromData(base64.b64decode(shown["image_url"]["url"].partition(",")[2]))
    assert sent.pixelColor(3, 3).name() == "#008080"
    assert text == {"type": "text", "text": "What is it?"}
    server.answer = lambda asked: asked.error(400, "This model takes no images.")
    assert "reads no pictures" in first.ask("Really?").reason
    server.answer = lambda asked: asked.stream("Yes")
    assert first.ask("Really?").content == "Yes"
    assert all(isinstance(each["content"], str) for each in server.posted[-1].body["messages"])

    again = open_window()
    qtbot.waitUntil(lambda: len(again.chat.presenter.model.pictures) == 1)
