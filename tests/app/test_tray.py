"""The icon in the tray: a question from anywhere, and a window that is hidden only where people said so."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import ChatStore, Conversation
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.views.tray import QuickPrompt, Tray
from tests.app.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.qt_log_ignore("does not support", "systemTrayWindowChanged", extend=True)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def store(qtbot: QtBot) -> Iterator[ChatStore]:
    with closing(ChatStore()) as store:
        yield store


@pytest.fixture
def make_prompt(
    engine: ScriptedEngine, store: ChatStore, settings: Settings, qtbot: QtBot
) -> Callable[[], QuickPrompt]:
    def make() -> QuickPrompt:
        answers = AnswerQueue(engine, store)  # type: ignore[arg-type]
        answers.setParent(engine)
        return QuickPrompt(store, answers, settings, Endpoints(settings))

    return make


@pytest.fixture
def window(qtbot: QtBot) -> QWidget:
    window = QWidget()
    qtbot.addWidget(window)
    window.show()
    return window


def test_a_quick_question_is_a_chat_like_any_other(
    make_prompt: Callable[[], QuickPrompt], engine: ScriptedEngine, store: ChatStore, qtbot: QtBot
) -> None:
    prompt = make_prompt()
    qtbot.addWidget(prompt)
    began: list[Conversation] = []
    opened: list[str] = []
    prompt.began.connect(began.append)
    prompt.open_wanted.connect(opened.append)
    prompt.ask_again()
    prompt.box.setPlainText("What is a hump yard?")
    qtbot.keyClick(prompt.box, Qt.Key.Key_Return)
    assert prompt.is_answering
    qtbot.keyClick(prompt.box, Qt.Key.Key_Return)  # not twice
    engine.reply("A place to sort wagons.")
    assert len(engine.requests) == 1
    assert not prompt.is_answering
    prompt.open_button.click()
    assert opened == [began[0].id]
    assert not prompt.isVisible()
    with qtbot.waitSignal(store.loaded) as loaded:
        store.load(began[0].id)
    assert [message.content for message in loaded.args[1]] == ["What is a hump yard?", "A place to sort wagons."]


def test_it_can_be_stopped_and_says_what_went_wrong(
    make_prompt: Callable[[], QuickPrompt], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    prompt = make_prompt()
    qtbot.addWidget(prompt)
    prompt.ask("one")
    prompt.ask_button.click()
    assert engine.cancelled
    engine.finish("cancelled")
    prompt.ask("two")
    engine.die("The engine was killed.")
    assert prompt.words.text() == "The engine was killed."


def test_it_says_what_it_waits_for(
    make_prompt: Callable[[], QuickPrompt], engine: ScriptedEngine, qtbot: QtBot
) -> None:
    engine.model = None
    prompt = make_prompt()
    qtbot.addWidget(prompt)
    prompt.ask("one")
    engine.start_loading()
    assert "is loading" in prompt.words.text()
    engine.end_loading()
    engine.reply("Here.")
    assert prompt.words.text() == ""


def test_nothing_goes_to_a_server_by_itself(
    make_prompt: Callable[[], QuickPrompt], engine: ScriptedEngine, settings: Settings, qtbot: QtBot
) -> None:
    settings.chat_model = "endpoint:gone/m"
    prompt = make_prompt()
    qtbot.addWidget(prompt)
    prompt.ask("one")
    assert not engine.requests
    assert "not in the list" in prompt.words.text()


def test_the_window_hides_only_where_the_setting_says_so(
    make_prompt: Callable[[], QuickPrompt], settings: Settings, window: QWidget, qtbot: QtBot
) -> None:
    tray = Tray(settings, make_prompt, window, is_available=lambda: True)
    tray.watch()
    frame = window.windowHandle()
    assert not tray.is_there
    settings.tray = True
    assert tray.is_there
    assert not tray.keeps_running
    settings.stays_in_tray = True
    frame.close()
    assert not window.isVisible()
    window.show()
    wanted: list[bool] = []
    tray.quit_wanted.connect(lambda: wanted.append(tray.keeps_running))
    tray._quit()
    assert wanted == [False]  # so that the close that follows is one
    frame.close()
    assert not window.isVisible()
    settings.tray = False
    assert not tray.is_there
    tray.close()


def test_without_a_tray_the_window_closes(
    make_prompt: Callable[[], QuickPrompt], settings: Settings, window: QWidget
) -> None:
    settings.tray = settings.stays_in_tray = True
    tray = Tray(settings, make_prompt, window, is_available=lambda: False)
    assert not tray.is_there
    assert not tray.keeps_running
    tray.close()
