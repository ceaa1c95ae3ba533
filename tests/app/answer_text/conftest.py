"""Answer views that are gone when the test is, and formulas whose process is."""

from collections.abc import Iterator

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.services.formulas import Formulas, formulas
from app.widgets.answer_text import AnswerView
from tests.app.answer_text.looks import ViewMaker


@pytest.fixture
def make_view(qtbot: QtBot) -> ViewMaker:
    views = []  # held here, or the garbage collector may take one away while pytest-qt handles its last events

    def make(text: str = "") -> AnswerView:
        view = AnswerView()
        qtbot.addWidget(view)
        view.resize(640, 480)
        if text:
            view.set_markdown(text)
            view.flush()
        views.append(view)
        return view

    return make


@pytest.fixture
def shared_view(qtbot: QtBot) -> tuple[AnswerView, AnswerView]:
    views = AnswerView(), AnswerView()
    for view in views:
        qtbot.addWidget(view)
        view.resize(640, 480)
    return views


@pytest.fixture(autouse=True)
def drawn(leak_check: None, qapp: QApplication, monkeypatch: pytest.MonkeyPatch) -> Iterator[Formulas]:
    """The formulas of the program, which no test finds drawn already, and which a busy machine has time to draw."""
    monkeypatch.setattr("app.services.formulas.FORMULA_MS", 20_000)
    shared = formulas()
    yield shared
    shared.forget()
