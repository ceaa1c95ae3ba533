"""Markdown views that are gone when the test is."""

from __future__ import annotations

import pytest
from pytestqt.qtbot import QtBot

from app.widgets.markdown_view import MarkdownView
from tests.app.markdown.markdown_looks import ViewMaker


@pytest.fixture
def make_view(qtbot: QtBot) -> ViewMaker:
    views = []  # held here, or the garbage collector may take one away while pytest-qt handles its last events

    def make(text: str = "") -> MarkdownView:
        view = MarkdownView()
        qtbot.addWidget(view)
        view.resize(640, 480)
        if text:
            view.set_markdown(text)
            view.flush()
        views.append(view)
        return view

    return make


@pytest.fixture
def shared_view(qtbot: QtBot) -> tuple[MarkdownView, MarkdownView]:
    views = MarkdownView(), MarkdownView()
    for view in views:
        qtbot.addWidget(view)
        view.resize(640, 480)
    return views
