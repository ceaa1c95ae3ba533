"""The window around the pages: where one can go, what it tells, and that it never waits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QLabel, QLineEdit, QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from app.services.settings import Settings
from app.services.starter_download import StarterDownload
from app.theme import ThemeController
from app.views.main_window import SMALLEST, MainWindow
from app.views.placeholder import PlaceholderPage
from app.views.starter_panel import StarterPanel

PAGES = ("Chat", "Batch", "Monitor", "Tune", "Models", "Settings")
WORKER = [sys.executable, str(Path(__file__).with_name("scripted_worker.py"))]


class ChatStandIn(QLineEdit):
    """A page that takes the focus, as the chat page does."""


@pytest.fixture
def client(qapp: QApplication) -> Iterator[EngineClient]:
    """A client that has not been started."""
    result = EngineClient()
    yield result
    result.close_now()
    result.deleteLater()


@pytest.fixture
def window(qtbot: QtBot, client: EngineClient, settings: Settings, theme: ThemeController) -> Iterator[MainWindow]:
    result = MainWindow(client, settings, theme, ChatStandIn)
    qtbot.addWidget(result)
    result.show()
    result.activateWindow()
    yield result
    result.close()


def test_the_first_page_is_chat_and_has_the_focus(window: MainWindow, qtbot: QtBot) -> None:
    assert isinstance(window.pages.currentWidget(), ChatStandIn)
    qtbot.waitUntil(window.pages.currentWidget().hasFocus)
    assert window.sidebar.button(0).isChecked()


@pytest.mark.parametrize("index", range(len(PAGES)))
def test_every_page_is_reached_by_click_and_by_key(window: MainWindow, qtbot: QtBot, index: int) -> None:
    button = window.sidebar.button(index)
    assert button.accessibleName() == PAGES[index]
    assert button.toolTip().endswith(f"Ctrl+{index + 1}")
    qtbot.mouseClick(button, Qt.MouseButton.LeftButton)
    assert window.pages.currentWidget() is window.page(index)
    window.show_page((index + 1) % len(PAGES))
    qtbot.keyClick(window, Qt.Key(Qt.Key.Key_1 + index), Qt.KeyboardModifier.ControlModifier)
    assert window.pages.currentWidget() is window.page(index)
    assert button.isChecked()


def test_pages_that_are_not_built_say_so_and_offer_nothing(window: MainWindow) -> None:
    unbuilt = [window.page(index) for index in (4,)]
    for page in unbuilt:
        assert isinstance(page, PlaceholderPage)
        assert page.findChildren(QPushButton) == []
        sentences = page.accessibleDescription().count(". ") + 1
        assert 2 <= sentences <= 3


def test_everything_that_can_be_pressed_has_a_name(window: MainWindow) -> None:
    for button in window.findChildren(QPushButton):
        assert button.accessibleName() or button.text()


@pytest.mark.parametrize("choice", ["light", "dark"])
@pytest.mark.parametrize("font_px", [12, 14, 20])
def test_the_sidebar_s_labels_have_room(
    window: MainWindow, theme: ThemeController, qtbot: QtBot, choice: str, font_px: int
) -> None:
    theme.set_choice("dark" if choice == "dark" else "light")
    theme.set_font_px(font_px)
    window.resize(SMALLEST)
    window.show_page(1)
    for index in range(len(PAGES)):
        button = window.sidebar.button(index)
        assert button.width() >= button.sizeHint().width()
        assert button.height() >= button.sizeHint().height()
    for label in window.page(1).findChildren(QLabel):
        if label.isVisible() and label.wordWrap():
            assert label.height() >= label.heightForWidth(label.width())


def test_the_place_on_the_screen_is_kept(
    client: EngineClient, settings: Settings, theme: ThemeController, qtbot: QtBot
) -> None:
    first = MainWindow(client, settings, theme, QWidget)
    qtbot.addWidget(first)
    first.show()
    first.resize(760, 640)  # no larger than the offscreen platform's screen
    first.close()
    second = MainWindow(client, settings, theme, QWidget)
    qtbot.addWidget(second)
    second.show()
    assert (second.width(), second.height()) == (760, 640)
    second.close()


# --- the engine -----------------------------------------------------------------------------------


def test_a_dead_engine_is_told_on_every_page_and_restarts_on_a_click(
    qtbot: QtBot, settings: Settings, theme: ThemeController, tmp_path: Path
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit(3)")
    client = EngineClient(command=[sys.executable, str(worker)])
    window = MainWindow(client, settings, theme, ChatStandIn)
    qtbot.addWidget(window)
    window.show()
    client.start()
    qtbot.waitUntil(window.engine_banner.isVisible)
    assert "exit code 3" in window.engine_banner.text
    assert window.engine_banner.text.endswith("Your text is kept.")
    for index in range(len(PAGES)):
        window.show_page(index)
        assert window.engine_banner.isVisible()
    (restart,) = [button for button in window.engine_banner.findChildren(QPushButton) if "Restart" in button.text()]
    with qtbot.waitSignal(client.state_changed):
        restart.click()
    qtbot.waitUntil(lambda: client.state is EngineState.DIED)
    window.close()
    client.close_now()


def test_an_engine_that_does_not_respond_is_told_and_the_line_goes_when_it_does(
    window: MainWindow, client: EngineClient
) -> None:
    client.responding_changed.emit(False)
    assert window.engine_banner.isVisible()
    client.responding_changed.emit(True)
    assert not window.engine_banner.isVisible()


def test_a_model_that_cannot_be_found_is_told(window: MainWindow, settings: Settings, qtbot: QtBot) -> None:
    settings.default_model = "no-such-model"
    with qtbot.waitSignal(window.model_start.problem):
        window.model_start.begin()
    assert "no-such-model" in window.problem_banner.text
    assert window.problem_banner.isVisible()
    assert not window.starter_panel.isVisible()


# --- the starter ----------------------------------------------------------------------------------


def test_without_the_starter_the_window_offers_it(window: MainWindow, qtbot: QtBot) -> None:
    with qtbot.waitSignal(window.model_start.starter_missing):
        window.model_start.begin()
    assert window.starter_panel.isVisible()
    assert not window.problem_banner.isVisible()


DOWNLOADS = {
    "done": "import sys; print('getting: 40 %', file=sys.stderr, flush=True); print('{}')",
    "refused": 'import sys; print(\'{"error": {"code": "x", "message": "No network is there."}}\'); sys.exit(2)',
    "crashed": "import os; os.abort()",
    "endless": "import sys, time; print('getting: 7 %', file=sys.stderr, flush=True); time.sleep(60)",
}


@pytest.fixture
def panel(qtbot: QtBot, theme: ThemeController) -> Iterator[Callable[[str], StarterPanel]]:
    made: list[StarterDownload] = []

    def make(kind: str) -> StarterPanel:
        command = [sys.executable, "-c", DOWNLOADS[kind]] if kind in DOWNLOADS else ["/no/such/program"]
        download = StarterDownload(command=command)
        made.append(download)
        result = StarterPanel(download)
        qtbot.addWidget(result)
        result.offer()
        return result

    yield make
    for download in made:
        download.close()
        download.deleteLater()


def _press(panel: StarterPanel, text: str) -> None:
    (button,) = [b for b in panel.findChildren(QPushButton) if b.isVisible() and b.text().startswith(text)]
    button.click()


def _says(panel: StarterPanel, text: str) -> bool:
    return any(text in label.text() for label in panel.findChildren(QLabel) if label.isVisible())


def test_getting_the_starter_ends_in_ready(panel: Callable[[str], StarterPanel], qtbot: QtBot) -> None:
    shown = panel("done")
    with qtbot.waitSignal(shown.ready):
        _press(shown, "Get the starter model (93 MB download)")
    assert not shown.isVisible()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("refused", "No network is there."), ("crashed", "could not be made"), ("absent", "could not be started")],
)
def test_a_download_that_fails_says_why_and_can_be_tried_again(
    panel: Callable[[str], StarterPanel], qtbot: QtBot, kind: str, sentence: str
) -> None:
    shown = panel(kind)
    for button in ("Get the starter", "Try again"):
        _press(shown, button)
        qtbot.waitUntil(lambda: _says(shown, sentence))


def test_a_download_shows_how_far_it_is_and_can_be_cancelled(
    panel: Callable[[str], StarterPanel], qtbot: QtBot
) -> None:
    shown = panel("endless")
    _press(shown, "Get the starter")
    qtbot.waitUntil(lambda: _says(shown, "7%"))
    _press(shown, "Cancel")
    qtbot.waitUntil(lambda: _says(shown, "small Mixture of Experts"))


# --- notices --------------------------------------------------------------------------------------


def test_a_crash_report_is_offered_copied_and_dismissed(window: MainWindow) -> None:
    dismissed: list[bool] = []
    window.offer_crash_report("the report", lambda: dismissed.append(True))
    copy, dismiss = window.crash_banner.findChildren(QPushButton)
    copy.click()
    assert QGuiApplication.clipboard().text() == "the report"
    dismiss.click()
    assert dismissed == [True]
    assert not window.crash_banner.isVisible()


def test_settings_that_cannot_be_written_are_told(window: MainWindow, settings: Settings) -> None:
    settings.save_failed.emit("The settings could not be written.")
    assert window.problem_banner.text == "The settings could not be written."
    (dismiss,) = window.problem_banner.findChildren(QPushButton)
    dismiss.click()
    assert not window.problem_banner.isVisible()
