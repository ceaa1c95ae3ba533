"""The window of who only asks other servers: no model of this PC is loaded before somebody needs one."""

import base64
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor, QImage
from pytestqt.qtbot import QtBot

from app.main import first_run_entry, page_entries
from app.services.chat_store import ChatStore, Message, MessageState
from app.services.engine_client import EngineClient, EngineState
from app.services.model_start import ModelStart
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.chat_view import ChatView
from app.views.main_window.window import MainWindow
from app.widgets.page import CHAT
from engine.common.paths import models_dir
from engine.remote.endpoint import endpoint_at, remote_name, remove_endpoint, save_endpoint
from tests.app.scripted_engine import ScriptedEngine
from tests.bad_endpoint import MODEL, BadEndpoint

WORKER = [sys.executable, "-P", "-m", "tests.app.scripted_worker"]
ROOT = Path(__file__).resolve().parents[2]


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
