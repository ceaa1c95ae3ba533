"""Lists and tables of 5,000 rows: nothing is made or asked for each row but for those in sight.  Counted, not timed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtWidgets import QAbstractItemView, QApplication, QWidget
from pytestqt.qtbot import QtBot

from app.models.conversation_list import ConversationListModel
from app.models.headed_table import HeadedTable
from app.models.library import LibraryTable
from app.services.chat_store import Conversation
from app.views.batch.job_view import RowsCard
from app.views.chat.conversation_panel import ConversationDelegate, ConversationPanel
from app.views.models import search_card
from app.views.models.on_this_pc import OnThisPcCard
from app.views.models.search_card import FoundList
from engine.protocol import BatchRow
from tests.app.model_parts import FOUND, MODELS
from tests.app.test_models_page import Scene, scene

__all__ = ["scene"]
ROWS = 5000
MOST_CALLS, MOST_WIDGETS = 2500, 40
"""A screen has some forty rows of six columns, each asked for a few roles."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a view asked for a cell, or for the height of a row."""
    counted = Counter[str]()

    def count(owner: type, name: str) -> None:
        before = getattr(owner, name)

        def counting(*args: Any, **named: Any) -> Any:
            counted[name] += 1
            return before(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    for owner in (HeadedTable, LibraryTable, ConversationListModel):
        if "data" in vars(owner):
            count(owner, "data")
    for delegate in (ConversationDelegate, search_card._Delegate):
        count(delegate, "sizeHint")
    return counted


def models() -> tuple[QWidget, QAbstractItemView]:
    card = OnThisPcCard()
    entries = tuple(replace(MODELS[0], name=f"m{number}", path=Path(f"/m/{number}")) for number in range(ROWS))
    card.show_models(entries, (), loaded="", default="m7", predicted={})
    return card, card.table


def search() -> tuple[QWidget, QAbstractItemView]:
    place = QWidget()
    view = FoundList(place)
    view.show_rows(tuple(replace(FOUND[0], id=f"org/m{number}") for number in range(ROWS)))
    return place, view


def answers() -> tuple[QWidget, QAbstractItemView]:
    card = RowsCard()
    card.model.set_rows(BatchRow(number, f"p {number}", f"a {number}", "stop", 5, "") for number in range(ROWS))
    return card, card.table


def chats() -> tuple[QWidget, QAbstractItemView]:
    model = ConversationListModel(lambda group: group.value, "untitled")
    panel = ConversationPanel(model)
    model.setParent(panel)
    model.set_conversations(Conversation(f"c{at}", f"Chat {at}", False, float(at), float(at)) for at in range(ROWS))
    return panel, panel.list


@pytest.mark.parametrize("made", [models, search, answers, chats])
def test_only_rows_in_sight_cost_anything(
    made: Callable[[], tuple[QWidget, QAbstractItemView]], calls: Counter[str], qtbot: QtBot
) -> None:
    place, view = made()
    qtbot.addWidget(place)
    place.resize(900, 700)
    place.show()
    view.show()
    QApplication.processEvents()
    assert view.model().rowCount() >= ROWS
    assert 0 < calls.total() < MOST_CALLS
    assert len(view.findChildren(QWidget)) < MOST_WIDGETS
    while calls["sizeHint"] > 1 and calls["sizeHint"] < ROWS:  # a list that is laid out some rows at a time
        before = calls["sizeHint"]
        qtbot.wait(5)
        if calls["sizeHint"] == before:
            break
    calls.clear()
    view.setCurrentIndex(view.model().index(ROWS - 1, 0))
    view.scrollToBottom()
    QApplication.processEvents()
    assert calls.total() < MOST_CALLS
    assert len(view.findChildren(QWidget)) < MOST_WIDGETS


def test_speeds_that_are_known_are_shown_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot) -> None:
    shown = list[int]()
    show = LibraryTable.show
    monkeypatch.setattr(LibraryTable, "show", lambda *args, **named: (shown.append(1), show(*args, **named))[1])
    scene.library.show(*(replace(MODELS[0], path=Path(f"/m/{number}")) for number in range(ROWS)))
    before = len(shown)
    for number in range(ROWS):
        scene.speeds.found.emit(f"/m/{number}", 5.0, False)
    qtbot.waitUntil(lambda: len(shown) > before)
    assert len(shown) < before + 20
