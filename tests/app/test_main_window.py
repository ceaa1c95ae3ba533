"""The window around the pages: where one can go, what it tells, and that it never waits."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import QApplication, QLabel, QMessageBox, QPushButton
from pytestqt.qtbot import QtBot

from app.main import first_run_entry, page_entries
from app.services.batch_job import JobEntry, JobState
from app.services.batch_jobs import BatchJobs
from app.services.chat_store import ChatStore
from app.services.downloads import Downloads
from app.services.engine_client import EngineClient, EngineState
from app.services.hub import Hub
from app.services.library import Library
from app.services.model_start import ModelStart
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.main_window.window import SMALLEST, MainWindow
from app.widgets import charts_ready
from app.widgets.page import BATCH, CHAT, FIRST_RUN, MODELS, MONITOR, SETTINGS, TUNE, Page, PageEntry
from engine.checkpoint.downloads.queue import DownloadState
from engine.common.config import BatchJob
from tests.app import model_parts as parts
from tests.app.scripted_engine import STARTER

pytestmark = pytest.mark.usefixtures("plans_are_made_up")
PAGES = (CHAT, BATCH, MONITOR, TUNE, MODELS, SETTINGS)
WORKER = [sys.executable, str(Path(__file__).with_name("scripted_worker.py"))]


class ChatStandIn(Page):
    """A page that takes the focus, as the chat page does."""

    def __init__(self, _services: Services) -> None:
        super().__init__()
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)


@pytest.fixture
def open_window(
    qtbot: QtBot, settings: Settings, theme: ThemeController
) -> Iterator[Callable[[EngineClient], MainWindow]]:
    """The window of an engine, with all its pages but the first, and without chats."""
    store = ChatStore()
    windows: list[MainWindow] = []

    def build(client: EngineClient) -> MainWindow:
        pages = (PageEntry(CHAT, "Chat", ChatStandIn), *page_entries()[1:])
        windows.append(MainWindow(Services.around(client, store, settings, theme), pages, first_run_entry()))
        qtbot.addWidget(windows[-1])
        windows[-1].show()
        return windows[-1]

    yield build
    for window in windows:
        window.close()
    store.close()


@pytest.fixture
def client(qapp: QApplication) -> Iterator[EngineClient]:
    """A client that has not been started, of a worker that needs no torch."""
    result = EngineClient(command=WORKER)
    yield result
    result.close_now()
    result.deleteLater()


@pytest.fixture
def window(client: EngineClient, open_window: Callable[[EngineClient], MainWindow]) -> MainWindow:
    result = open_window(client)
    result.activateWindow()
    return result


def test_the_first_page_is_chat_and_has_the_focus(window: MainWindow, qtbot: QtBot) -> None:
    assert isinstance(window.pages.currentWidget(), ChatStandIn)
    qtbot.waitUntil(window.pages.currentWidget().hasFocus)
    assert window.sidebar.button(CHAT).isChecked()


def test_all_that_can_be_pressed_has_a_name_and_every_page_is_reached_by_click_and_by_key(
    window: MainWindow, qtbot: QtBot
) -> None:
    for button in window.findChildren(QPushButton):
        assert button.accessibleName() or button.text()
    for index, name in enumerate(PAGES):
        button = window.sidebar.button(name)
        assert button.accessibleName() == name.capitalize()
        assert button.toolTip().endswith(f"Ctrl+{index + 1}")
        qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
        assert window.pages.currentWidget() is window.page(name)
        window.show_page(PAGES[(index + 1) % len(PAGES)])
        qtbot.keyClick(window, Qt.Key(Qt.Key.Key_1 + index), Qt.KeyboardModifier.ControlModifier)
        assert window.pages.currentWidget() is window.page(name)
        assert button.isChecked()


def test_a_page_with_charts_shows_its_frame_until_they_have_come(
    window: MainWindow, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = threading.Event()
    monkeypatch.setattr(charts_ready, "are_ready", arrived.is_set)
    monkeypatch.setattr("app.views.main_window.window.are_ready", arrived.is_set)
    monkeypatch.setattr(charts_ready, "load_charts", lambda: arrived.wait(20))
    window.show_page(MONITOR)
    window.show_page(TUNE)
    frame = window.pages.currentWidget()
    assert [label.text() for label in frame.findChildren(QLabel)] == ["Tune"]
    assert window.sidebar.button(TUNE).isChecked()
    arrived.set()
    qtbot.waitUntil(lambda: window.pages.currentWidget() is window.page(TUNE))
    qtbot.waitUntil(lambda: window.pages.count() == 2)  # the chat and this


def test_a_page_that_wants_another_is_left_for_it(window: MainWindow) -> None:
    window.page(SETTINGS).page_wanted.emit(TUNE)
    assert window.pages.currentWidget() is window.page(TUNE)
    assert window.sidebar.button(TUNE).isChecked()


def test_what_the_window_opens_without_is_not_made_and_need_not_be_closed(
    client: EngineClient, open_window: Callable[[EngineClient], MainWindow]
) -> None:
    window = open_window(client)
    assert not {"jobs", "sample", "tuning"} & vars(window.services).keys()
    window.show_page(TUNE)
    assert {"jobs", "tuning"} <= vars(window.services).keys()
    window.close()
    assert client.state is EngineState.STOPPED


@pytest.mark.parametrize(("choice", "font_px"), [("dark", 12), ("light", 20)])
def test_the_sidebar_s_labels_have_room(
    window: MainWindow, theme: ThemeController, qtbot: QtBot, choice: str, font_px: int
) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    theme.set_font_px(font_px)
    window.resize(SMALLEST)
    window.show_page(BATCH)
    for name in PAGES:
        button = window.sidebar.button(name)
        assert button.width() >= button.sizeHint().width()
        assert button.height() >= button.sizeHint().height()
    for label in window.page(BATCH).findChildren(QLabel):
        if label.isVisible() and label.wordWrap():
            assert label.height() >= label.heightForWidth(label.width())


def test_the_place_on_the_screen_is_kept(
    client: EngineClient, open_window: Callable[[EngineClient], MainWindow]
) -> None:
    first = open_window(client)
    first.resize(760, 640)  # no larger than the offscreen platform's screen
    first.close()
    second = open_window(client)
    assert (second.width(), second.height()) == (760, 640)


# --- the engine -----------------------------------------------------------------------------------


def test_a_dead_engine_is_told_on_every_page_and_restarts_on_a_click(
    qtbot: QtBot, open_window: Callable[[EngineClient], MainWindow], tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit(3)")
    client = EngineClient(command=[sys.executable, str(worker)])
    window = open_window(client)
    client.start()
    qtbot.waitUntil(window.engine_banner.isVisible)
    assert "code 3" in window.engine_banner.text
    assert window.engine_banner.text.endswith("Your text is kept.")
    for name in PAGES:
        window.show_page(name)
        assert window.engine_banner.isVisible()
    (restart,) = [button for button in window.engine_banner.findChildren(QPushButton) if "Restart" in button.text()]
    with qtbot.waitSignal(client.state_changed):
        restart.click()
    qtbot.waitUntil(lambda: client.state is EngineState.DIED)
    window.close()
    client.close_now()


def test_a_card_that_works_again_is_offered_until_the_model_is_on_it(
    window: MainWindow, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[bool] = []
    monkeypatch.setattr(window.services.model_start, "restart", lambda: restarts.append(True))
    for model, is_offered in (
        (replace(STARTER, needs_restart=True), False),
        (replace(STARTER, needs_restart=True, card_is_back=True), True),
        (STARTER, False),
    ):
        client._model = model
        client.model_loaded.emit(model)
        assert window.card_banner.isVisible() == is_offered
    (reload,) = [each for each in window.card_banner.findChildren(QPushButton) if "Reload" in each.text()]
    reload.click()
    assert restarts == [True]


def test_an_engine_that_does_not_respond_is_told_and_the_line_goes_when_it_does(
    window: MainWindow, client: EngineClient
) -> None:
    client.responding_changed.emit(False)
    assert window.engine_banner.isVisible()
    client.responding_changed.emit(True)
    assert not window.engine_banner.isVisible()


def test_another_default_model_waits_for_the_word_while_a_job_runs(
    window: MainWindow, settings: Settings, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(ModelStart, "begin", lambda _self: begun.append(True))
    page = window.page(SETTINGS)
    page.reload_wanted.emit()
    assert begun == [True]
    entry = JobEntry("job", BatchJob("in.csv", "out.csv"), JobState.RUNNING, 1.0)
    monkeypatch.setattr(BatchJobs, "running", property(lambda _self: [entry]))
    page.reload_wanted.emit()
    assert begun == [True]
    (box,) = window.findChildren(QMessageBox)
    box.close()


def test_a_model_that_cannot_be_found_is_told(window: MainWindow, settings: Settings, qtbot: QtBot) -> None:
    settings.default_model = "no-such-model"
    with qtbot.waitSignal(window.services.model_start.problem):
        window.services.model_start.begin()
    assert "no-such-model" in window.problem_banner.text
    assert window.problem_banner.isVisible()


# --- no model -------------------------------------------------------------------------------------


@pytest.fixture
def without_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the machine, at its models or at downloads."""
    for service, name in ((Hub, "look_at_machine"), (Library, "look"), (Downloads, "watch")):
        monkeypatch.setattr(service, name, lambda *_, **__: None)


def test_without_a_model_the_first_page_takes_the_chat_s_place(
    window: MainWindow, without_machine: None, qtbot: QtBot
) -> None:
    with qtbot.waitSignal(window.services.model_start.starter_missing):
        window.services.model_start.begin()
    first_run = window.page(FIRST_RUN)
    assert window.pages.currentWidget() is first_run
    assert window.sidebar.button(CHAT).isChecked()
    assert not window.problem_banner.isVisible()
    window.show_page(TUNE)
    window.show_page(CHAT)
    assert window.pages.currentWidget() is first_run
    window.services.client.model_loaded.emit(STARTER)
    assert window.pages.currentWidget() is window.page(CHAT)


def test_whoever_wants_no_model_goes_to_the_chats_and_back(window: MainWindow, without_machine: None) -> None:
    window.services.model_start.starter_missing.emit()
    first_run = window.page(FIRST_RUN)
    first_run.page_wanted.emit(MODELS)
    assert window.pages.currentWidget() is window.page(MODELS)
    window.show_page(CHAT)
    first_run.page_wanted.emit(CHAT)
    assert window.pages.currentWidget() is window.page(CHAT)
    window.page(CHAT).page_wanted.emit(FIRST_RUN)
    assert window.pages.currentWidget() is first_run


def test_a_model_loaded_from_another_page_leaves_that_page_shown(window: MainWindow, without_machine: None) -> None:
    window.services.model_start.starter_missing.emit()
    window.show_page(TUNE)
    window.services.client.model_loaded.emit(STARTER)
    assert window.pages.currentWidget() is window.page(TUNE)
    window.show_page(CHAT)
    assert window.pages.currentWidget() is window.page(CHAT)


# --- notices --------------------------------------------------------------------------------------


def test_a_crash_report_is_offered_copied_and_dismissed(window: MainWindow) -> None:
    dismissed: list[bool] = []
    window.offer_crash_report("the report", lambda: dismissed.append(True))
    copy, _save, dismiss = window.crash_banner.findChildren(QPushButton)
    copy.click()
    assert QGuiApplication.clipboard().text() == "the report"
    dismiss.click()
    assert dismissed == [True]
    assert not window.crash_banner.isVisible()


def test_settings_that_cannot_be_written_are_told(window: MainWindow, settings: Settings) -> None:
    settings.save_failed.emit("The settings could not be written.")
    assert window.problem_banner.text == "The settings could not be written."
    (dismiss,) = [each for each in window.problem_banner.findChildren(QPushButton) if each.isVisible()]
    dismiss.click()
    assert not window.problem_banner.isVisible()


def test_a_model_dropped_into_the_window_is_loaded(
    window: MainWindow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = list[str]()
    monkeypatch.setattr(window.services.model_start, "open", opened.append)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for path, wanted in ((tmp_path / "a.GGUF", True), (folder, True), (tmp_path, False), (tmp_path / "a.csv", False)):
        data = QMimeData()
        data.setUrls([QUrl.fromLocalFile(str(path))])
        buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
        enter = QDragEnterEvent(QPoint(9, 9), Qt.DropAction.CopyAction, data, buttons, keys)
        enter.ignore()
        QApplication.sendEvent(window, enter)
        assert enter.isAccepted() == wanted
        window.page(BATCH).dragEnterEvent(enter)  # which takes files of rows
        if wanted:
            QApplication.sendEvent(window, QDropEvent(QPointF(9, 9), Qt.DropAction.CopyAction, data, buttons, keys))
            assert opened.pop() == str(path)
    assert opened == []


def test_downloads_are_in_sight_on_every_page_and_lead_to_the_models(window: MainWindow, qtbot: QtBot) -> None:
    mark = window.sidebar.downloads
    assert not mark.isVisible()
    window.resize(1280, 800)
    mark.show_downloads(parts.DOWNLOADS[:2])
    assert mark.isVisible()
    assert mark.text().strip() == mark.accessibleName() == "2 downloads, 25%"
    window.resize(SMALLEST)
    qtbot.waitUntil(lambda: mark.text() == "")  # among icons
    assert mark.accessibleName() == "2 downloads, 25%"
    assert mark.toolTip().startswith("2 downloads, 25%")
    mark.show_downloads([replace(parts.DOWNLOADS[0], state=DownloadState.PAUSED)])
    assert not mark.isVisible()
    mark.show_downloads(parts.DOWNLOADS[2:])
    assert mark.accessibleName() == "A download stopped"
    mark.click()
    assert window.sidebar.button(MODELS).isChecked()
