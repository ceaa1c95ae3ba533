"""Keyboard and focus: fields, marks that explain, shortcuts, and where the focus stays."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QSize, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import (
    QApplication,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)
from pytestqt.qtbot import QtBot

import app
from app.services.engine_client import EngineClient
from app.services.history.history import History
from app.services.settings import Settings
from app.services.telemetry_hub import TelemetryHub
from app.theme import ThemeController
from app.views.main_window.window import ShortcutsDialog
from app.views.monitor.engine_cards import EngineCards, ExpertCard
from app.widgets.fields import ComboBox, DoubleSpinBox, Slider, SpinBox
from app.widgets.page import MONITOR, Page
from app.widgets.scaffold import Card, HelpMark
from app.widgets.timeline.lanes import lane_help, lanes_of, machine_lanes
from app.widgets.timeline.navigator import timeline_keys
from app.widgets.timeline.view import TimelineView
from tests.app.recorded import STEP_NS, decoded, sample, steady_devices
from tests.app.stage import SCENES, staged
from tests.app.wheel import Field, turn_wheel, value_of


@pytest.fixture
def row(qtbot: QtBot) -> tuple[Page, list[QPushButton]]:
    """Three buttons in a card on a page."""
    page = Page()
    qtbot.addWidget(page)
    card = QWidget(page)
    column = QVBoxLayout(card)
    buttons = [QPushButton(str(number), card) for number in range(3)]
    for button in buttons:
        column.addWidget(button)
    QVBoxLayout(page).addWidget(card)
    with qtbot.waitExposed(page):
        page.show()
    page.activateWindow()
    return page, buttons


@pytest.mark.parametrize("how", ["setEnabled", "setVisible"])
def test_the_next_press_is_not_the_neighbours(row: tuple[Page, list[QPushButton]], how: str) -> None:
    _page, (first, second, third) = row
    pressed: list[str] = []
    for button in (first, second, third):
        button.clicked.connect(lambda _on, button=button: pressed.append(button.text()))
    second.clicked.connect(lambda: getattr(second, how)(False))
    second.setFocus()
    for _ in range(2):
        QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Space)
        QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Return)
    assert pressed == ["1"]
    getattr(second, how)(True)
    assert second.hasFocus()  # again
    getattr(second, how)(False)
    QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Tab)
    assert third.hasFocus()
    getattr(second, how)(True)
    assert third.hasFocus()  # people have gone on
    second.setFocus()
    getattr(second, how)(False)
    QTest.keyClick(QApplication.focusWidget(), Qt.Key.Key_Backtab)
    assert first.hasFocus()


def test_code_that_says_where_the_focus_goes_is_heard(row: tuple[Page, list[QPushButton]]) -> None:
    _page, (first, second, third) = row
    second.setFocus()
    second.hide()
    third.setFocus()
    assert third.hasFocus()
    second.show()
    assert third.hasFocus()
    third.setFocus()
    first.setFocus()
    third.deleteLater()
    assert first.hasFocus()


def test_tab_reaches_all_of_the_chat_page(settings: Settings, theme: ThemeController, tmp_path: Path) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(1280, 800))
        SCENES["chat-conversation"](stage)
        stage.window.activateWindow()
        chat = stage.chat
        wanted: list[QWidget] = [
            chat.title_bar.model_button,
            chat.title_bar.new_button,
            chat.panel.search,
            chat.panel.list,
            chat.transcript,
            chat.composer.box,
        ]
        stage.window.setFocus()
        chat.setFocus()
        assert chat.composer.box.hasFocus()  # where one writes
        for key in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab):
            reached: list[QWidget] = []
            for _ in range(40):
                QTest.keyClick(QApplication.focusWidget(), key)
                reached.append(QApplication.focusWidget())
            assert [one for one in wanted if one not in reached] == []
            assert not [one for one in reached if isinstance(one, QLineEdit) and one is not chat.panel.search]


def test_pause_and_open_result_stay_in_their_places(settings: Settings, theme: ThemeController, tmp_path: Path) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(1280, 800))
        stage.start_job()
        head = stage.batch.head
        places = []
        for end in (lambda: None, head.pause.click, lambda: stage.engine.end(40, 1)):
            end()
            stage.settle()
            first = head.pause if head.pause.isVisible() else head.resume
            assert first.isVisible()
            assert head.open.isVisible()
            places.append([(each.mapTo(head, QPoint()), each.size()) for each in (first, head.open, head.menu)])
        assert places[0] == places[1] == places[2]
        assert head.open.isEnabled()
        assert not head.pause.isEnabled()


def _combo() -> ComboBox:
    combo = ComboBox()
    combo.addItems(["one", "two", "three"])
    combo.setCurrentIndex(1)
    return combo


@pytest.mark.parametrize("make", [_combo, SpinBox, DoubleSpinBox, Slider])
@pytest.mark.parametrize("has_focus", [False, True])
def test_the_wheel_scrolls_the_page_and_not_a_field(qtbot: QtBot, make: Callable[[], Field], has_focus: bool) -> None:
    area, inside = QScrollArea(), QWidget()
    qtbot.addWidget(area)
    field = make()
    layout = QVBoxLayout(inside)
    layout.addWidget(field)
    inside.setMinimumHeight(3000)
    area.setWidget(inside)
    area.setWidgetResizable(True)
    area.resize(300, 200)
    area.show()
    qtbot.waitExposed(area)
    if has_focus:
        field.setFocus()
    before = value_of(field)
    for steps in (-1, 1):
        area.verticalScrollBar().setValue(1400)
        at = area.verticalScrollBar().value()
        turn_wheel(field, steps)
        assert (area.verticalScrollBar().value() - at) * steps < 0
        assert value_of(field) == before


def test_the_window_has_no_other_fields() -> None:
    folder = Path(app.__file__).parent
    own = re.compile(r"\bQ(ComboBox|SpinBox|DoubleSpinBox|Slider|Dial|DateEdit|TimeEdit|DateTimeEdit)\(")
    found = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if own.search(path.read_text("utf-8"))]
    assert not found, "the wheel would change these while a page is scrolled"


def sentences(text: str) -> int:
    return len([part for part in text.replace("?", ".").split(". ") if part.strip()])


@pytest.mark.qt_log_ignore("does not support", extend=True)  # the offscreen platform has no pop-up windows
@pytest.mark.parametrize("key", [Qt.Key.Key_Space, Qt.Key.Key_Return])
def test_a_mark_opens_and_closes_by_key(qtbot: QtBot, key: Qt.Key) -> None:
    mark = HelpMark("Cache", "It keeps what is used. A hit was there already.")
    qtbot.addWidget(mark)
    mark.show()
    assert "Cache" in mark.accessibleName()
    assert mark.accessibleDescription() == mark.explanation
    assert mark.focusPolicy() & Qt.FocusPolicy.TabFocus
    qtbot.keyClick(mark, key)
    bubble = mark.bubble
    assert mark.explanation in bubble.accessibleName()
    qtbot.keyClick(bubble, Qt.Key.Key_Escape)
    assert mark.bubble is None


def test_every_card_of_the_monitor_explains_itself(qtbot: QtBot, settings: Settings) -> None:
    client = EngineClient()
    hub = TelemetryHub(client, settings, steady_devices())
    whole = QWidget()
    qtbot.addWidget(whole)
    cards = EngineCards(client, hub, ExpertCard(whole), whole)
    found = cards.findChildren(Card)
    assert len(found) == 7
    for card in found:
        assert sentences(card.help.explanation) >= 2
        assert card.heading.text() in card.help.accessibleName()
    hub.deleteLater()
    client.deleteLater()


@pytest.mark.parametrize("on_device", [True, False])
def test_every_lane_has_a_mark_in_the_order_of_the_lanes(qtbot: QtBot, *, on_device: bool) -> None:
    now = time.perf_counter_ns()
    history = History()
    spans, steps = decoded(20, now - 20 * STEP_NS, on_device=on_device)
    history.add_spans(spans)
    history.add_steps(steps)
    view = TimelineView()
    qtbot.addWidget(view)
    view.explain_lanes()
    view.resize(900, 500)
    view.navigator.set_source(history, recorded=True)
    view.show()
    view.grab()
    wanted = [lane.key for lane in lanes_of(history, machine=False)]
    qtbot.waitUntil(lambda: list(view.marks) == wanted, timeout=20_000)
    tops = [mark.y() for mark in view.marks.values()]
    assert tops == sorted(tops)
    assert not any(mark.isHidden() for mark in view.marks.values())
    marks = list(view.marks.values())
    chain = [view.nextInFocusChain()]
    while chain[-1] is not view:
        chain.append(chain[-1].nextInFocusChain())
    assert [each for each in chain if each in marks] == marks


def test_every_lane_that_there_can_be_is_explained() -> None:
    history = History()
    spans, steps = decoded(2, 10**12, on_device=True)
    history.add_spans(spans)
    history.add_steps(steps)
    history.add_sample(10**12, sample())
    history.add_gauges(10**12, {"gpu_power": 1.0, "cpu_power": 1.0, "pcie_rx": 1.0, "disk_read": 1.0, "gpu_clock": 1.0})
    lanes = [*lanes_of(history, machine=True), *machine_lanes(history)]
    assert len(lanes) > 12
    for lane in lanes:
        assert sentences(lane_help(lane)) >= 2, lane.key


def test_keys_and_focus(settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        window, box = stage.window, stage.chat.composer.box
        window.activateWindow()
        qtbot.waitUntil(box.hasFocus)
        stage.chat.empty.examples[0].click()
        assert stage.engine.requests
        assert box.hasFocus()
        qtbot.keyClick(box, Qt.Key.Key_F1)
        dialog = window.findChild(ShortcutsDialog)
        assert "Ctrl+Q" in [label.text() for label in dialog.findChildren(QLabel)]
        dialog.close()
        with qtbot.waitSignal(window.closing):  # though the answer is still being written
            qtbot.keyClick(box, Qt.Key.Key_Q, Qt.KeyboardModifier.ControlModifier)
        assert not window.isVisible()


def test_after_an_edited_message_is_sent_again_one_goes_on_writing(
    settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot
) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        stage.window.activateWindow()
        stage.open_conversation()
        first = stage.chat.transcript.turns[0]
        first.start_editing()
        editor = first.findChild(QPlainTextEdit)
        qtbot.waitUntil(editor.hasFocus)
        editor.setPlainText("Another question")
        qtbot.keyClick(editor, Qt.Key.Key_Return)
        assert stage.engine.requests
        qtbot.waitUntil(stage.chat.composer.box.hasFocus)


def test_the_list_has_the_keys_of_the_timeline(
    settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot
) -> None:
    with staged(settings, theme, tmp_path) as stage:
        stage.show(QSize(900, 600))
        stage.window.show_page(MONITOR)
        stage.window.show_shortcuts()
        dialog = stage.window.findChild(ShortcutsDialog)
        said = [label.text() for label in dialog.findChildren(QLabel)]
        for pressed, words in timeline_keys():
            assert said.count(words) == 1
            assert pressed in said
        dialog.close()
