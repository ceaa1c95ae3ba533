"""Whoever cannot see the window is told what each thing is that can be used: on every page, in every state of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAccessible
from PySide6.QtWidgets import (
    QAbstractButton,
    QAbstractItemView,
    QAbstractSpinBox,
    QComboBox,
    QLineEdit,
    QPlainTextEdit,
    QScrollBar,
    QTextEdit,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue
from app.services.batch_jobs import BatchJobs
from app.services.batch_sample import BatchSample
from app.services.chat_store import ChatStore
from app.services.documents import Documents
from app.services.endpoints import Endpoints
from app.services.kept import SavedPresets, SavedPrompts
from app.services.library import Library
from app.services.model_speeds import ModelSpeeds
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.views.batch import BatchPage
from app.views.chat.chat_view import ChatView
from app.widgets.toast import Toast
from engine.common.errors import ErrorCode
from tests.app.scripted_batches import ScriptedBatches, row
from tests.app.scripted_engine import ScriptedEngine

USED = (QAbstractButton, QAbstractItemView, QAbstractSpinBox, QComboBox, QLineEdit, QPlainTextEdit, QTextEdit)
"""What is used though keys may not reach it."""


def without_name(page: QWidget) -> list[str]:
    """Everything that can be used, shown now or not, and has no name."""
    found = []
    for widget in page.findChildren(QWidget):
        parent = widget.parent()
        of_qt = widget.objectName().startswith("qt_") or isinstance(widget, QScrollBar)
        of_another = isinstance(parent, QAbstractSpinBox | QComboBox | QAbstractItemView | QLineEdit)
        of_another |= parent is not None and parent.inherits("QComboBoxPrivateContainer")
        of_another |= _is_of_hidden_toast(widget)  # it has its words when it comes up
        reached = widget.focusPolicy() & Qt.FocusPolicy.TabFocus or isinstance(widget, USED)
        if not reached or of_qt or of_another or widget.focusProxy() is not None:
            continue
        interface = QAccessible.queryAccessibleInterface(widget)
        # A combo box's name is what is chosen in it, on some systems: that says nothing of what it is for.
        name = widget.accessibleName() or ("" if isinstance(widget, QComboBox) else _spoken(interface))
        if not name.strip():
            found.append(f"{type(widget).__name__} in {type(parent).__name__}")
    return found


def _is_of_hidden_toast(widget: QWidget) -> bool:
    around = widget.parentWidget()
    while around is not None and not isinstance(around, Toast):
        around = around.parentWidget()
    return around is not None and not around.isVisible()


def _spoken(interface: object) -> str:
    text = getattr(interface, "text", None)
    return str(text(QAccessible.Text.Name)) if text is not None else ""


@pytest.fixture
def batch(switchyard_home: Path, qtbot: QtBot) -> Iterator[tuple[BatchPage, ScriptedBatches]]:
    engine = ScriptedBatches()
    jobs = BatchJobs(engine)  # type: ignore[arg-type]
    page = BatchPage(engine, jobs, BatchSample(engine, jobs))  # type: ignore[arg-type]
    qtbot.addWidget(page)
    page.resize(1072, 760)
    page.show()
    qtbot.waitSignal(jobs.listed).wait()
    yield page, engine
    page.close_down()
    jobs.close_down()
    jobs.deleteLater()
    engine.deleteLater()


def test_everything_on_the_batch_page_has_a_name(
    batch: tuple[BatchPage, ScriptedBatches], qtbot: QtBot, tmp_path: Path
) -> None:
    page, engine = batch
    assert without_name(page) == []
    file = tmp_path / "in.csv"
    file.write_text("text,mark\none,1\ntwo,2\n", encoding="utf-8")
    page.open_files([file])
    qtbot.waitUntil(page.form.foot.start.isEnabled)
    page.form.sample.button.click()
    engine.answer(row(0), sample=True)
    engine.end_sample(1)
    page.form.answers.kinds.button(1).click()
    page.form.answers.kinds.button(2).click()
    page.form.answers.kinds.button(0).click()
    assert without_name(page) == []
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: page.pages.currentWidget() is page.job_view)
    engine.tell(1, 2, failed=1, rate=5.0, left=2.0)
    engine.answer(row(1, problem="is empty"))
    assert without_name(page) == []
    engine.fail_job(ErrorCode.INVALID_REQUEST, "The input was changed.")
    assert without_name(page) == []


def test_everything_on_the_chat_page_has_a_name(switchyard_home: Path, qtbot: QtBot) -> None:
    engine, store, counter = ScriptedEngine(), ChatStore(), TokenCounter()
    settings, library = Settings(), Library()
    speeds = ModelSpeeds(settings)
    answers = AnswerQueue(engine, store)  # type: ignore[arg-type]
    places, documents = Endpoints(settings), Documents(store)
    prompts, presets = SavedPrompts(), SavedPresets()
    more = (places, documents, prompts, presets)
    page = ChatView(engine, store, settings, answers, counter, library, speeds, *more)  # type: ignore[arg-type]
    kept = (documents.close, prompts.close, presets.close)
    closing = (page.close_down, counter.close, library.close, speeds.close, *kept)
    qtbot.addWidget(page, before_close_func=lambda _page: [one() for one in closing])
    page.resize(1072, 800)
    with qtbot.waitSignal(store.listed):
        page.show()
    assert without_name(page) == []
    page.composer.box.setPlainText("Show me code")
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)
    engine.write("Here:\n\n```python\nprint(1)\n```\n\n| a | b |\n|---|---|\n| [1](https://x.org) | 2 |\n")
    assert without_name(page) == []
    engine.finish()
    page.transcript.build_all()
    assert without_name(page) == []
    page.transcript.turns[0].start_editing()  # type: ignore[attr-defined]
    page.composer.edit_sampling()
    page.composer.edit_system_prompt()
    assert without_name(page) == []
    page.tools.popover.open_editor(page.composer, "Explain {{subject}}.", "Explain")
    assert without_name(page) == []
    page.tools.popover.keep_button.click()
    page.tools.popover._choose()
    assert without_name(page) == []
    page.compare("Which?")
    assert page.side_by_side is not None
    assert without_name(page.side_by_side) == []
    engine.die()
    assert without_name(page) == []
    store.close()
