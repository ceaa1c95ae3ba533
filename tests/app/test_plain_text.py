"""What strangers write is shown as it is: no name, cell, title or message is taken for HTML, which would load files."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QAbstractListModel, QPoint, QSize, Qt
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QAbstractItemView, QApplication, QInputDialog, QLabel, QMessageBox, QToolTip

from app.services.chat_store import Conversation, new_id
from app.services.settings import Settings
from app.theme import ThemeController
from app.widgets.asking import ask
from app.widgets.page import BATCH, CHAT, MONITOR
from tests.app import model_parts
from tests.app.scripted_batches import row
from tests.app.scripted_engine import STARTER
from tests.app.stage import ELSEWHERE, SCENES, Stage, staged

pytestmark = pytest.mark.qt_log_ignore("does not support", extend=True)  # the offscreen platform has no pop-up windows

APP = Path(__file__).resolve().parents[2] / "app"
FILE_NAME = "<b>it<img src=hills.png>"
MEANT = {
    "views/batch/job_view.py",
    "views/chat/conversation_panel.py",
    "views/chat/transcript.py",
    "views/monitor/summary.py",
}
"""Where text is HTML on purpose; each escapes what it is given."""


def _shown() -> Iterator[QLabel]:
    for widget in QApplication.allWidgets():
        if isinstance(widget, QLabel):
            widget.ensurePolished()
            yield widget


def taken_for_html(planted: str) -> list[str]:
    """Every label that shows it as HTML, and every tooltip that would."""
    found = [
        label.text()
        for label in _shown()
        if label.textFormat() != Qt.TextFormat.PlainText
        and (label.textFormat() != Qt.TextFormat.RichText or planted in label.text())
    ]
    for tip in _tips(planted):
        QToolTip.showText(QPoint(5, 5), tip)
        labels = [label for label in _shown() if label.inherits("QTipLabel") and label.text() == tip]
        assert labels, "the tooltip was not shown"
        found += [tip for label in labels if label.textFormat() != Qt.TextFormat.PlainText]
    QToolTip.hideText()
    return found


def _tips(planted: str) -> set[str]:
    tips = {widget.toolTip() for widget in QApplication.allWidgets()}
    for view in QApplication.allWidgets():
        model = view.model() if isinstance(view, QAbstractItemView) else None
        if model is None:
            continue
        columns = 1 if isinstance(model, QAbstractListModel) else model.columnCount()
        cells = (model.index(at, column) for at in range(min(model.rowCount(), 20)) for column in range(columns))
        tips.update(str(cell.data(Qt.ItemDataRole.ToolTipRole) or "") for cell in cells)
    return {tip for tip in tips if planted in tip}


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A text that would load a picture, which is there."""
    picture = tmp_path / "hills.png"
    image = QImage(8, 8, QImage.Format.Format_RGB32)
    image.fill(Qt.GlobalColor.red)
    assert image.save(str(picture))
    return f'<img src="{picture.as_uri()}" width="400"><b>bold</b>'


@pytest.fixture
def on_stage(settings: Settings, theme: ThemeController, tmp_path: Path) -> Iterator[Stage]:
    with staged(settings, theme, tmp_path) as result:
        result.show(QSize(1280, 800))
        yield result


def _in_chats(stage: Stage, planted: str, _patch: pytest.MonkeyPatch) -> None:
    stage.open_conversation(f"{planted}\n\n[a link](https://x.example '{planted}')")
    for title, draft in ((planted, planted), ("Another", "")):
        conversation = Conversation(new_id(), title, created_at=1.0, updated_at=1.0, draft=draft, system_prompt=planted)
        stage.store.create(conversation, [])
        stage.chat.presenter.list_model.put(conversation)
        stage.chat.presenter.open(conversation.id)
        stage.until(lambda wanted=conversation.id: stage.chat.presenter.conversation.id == wanted)
    stage.chat.composer.box.setPlainText(planted)
    stage.chat.composer.box.entered.emit()
    stage.engine.write(planted)
    stage.engine.model = replace(STARTER, name=planted, path=f"/{planted}", template_note=planted)
    stage.engine.model_loaded.emit(stage.engine.model)
    stage.engine.die()
    stage.store.notice.emit(planted)
    stage.store.trouble.emit(planted)
    stage.chat.toast.show_text(planted, planted)
    stage.window.engine_banner.show_text(planted)


def _in_jobs(stage: Stage, planted: str, patch: pytest.MonkeyPatch) -> None:
    file = stage.folder / f"{FILE_NAME}.csv"
    cell = planted.replace('"', '""')
    file.write_text(f'text,"{cell}"\n"{cell}",x\nplain,y\n', encoding="utf-8")
    patch.setattr(Stage, "table", lambda _stage: file)
    stage.window.show_page(BATCH)
    stage.batch.open_files([file])
    stage.until(stage.batch.form.foot.start.isEnabled)
    assert planted in _tips(planted)
    stage.batch.form.sample.button.click()
    stage.engine.answer(replace(row(0), prompt=planted, answer=planted), sample=True)
    stage.engine.end_sample(1)
    stage.batch.form.foot.start.click()
    stage.until(lambda: stage.batch.pages.currentWidget() is stage.batch.job_view)
    stage.engine.tell(1, 2, failed=1, rate=5.0, left=2.0)
    stage.engine.answer(replace(row(0), prompt=planted, answer=planted), row(1, problem=planted))
    stage.breathe(50)


def _in_models(stage: Stage, planted: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        model_parts,
        "MODELS",
        tuple(replace(one, name=planted, precision_words=planted, problem=planted) for one in model_parts.MODELS),
    )
    patch.setattr(
        model_parts,
        "DOWNLOADS",
        tuple(replace(one, title=planted, problem=one.problem and planted) for one in model_parts.DOWNLOADS),
    )
    repository = replace(model_parts.REPOSITORY, licence=planted)
    found = tuple(replace(one, repository=repository, label=planted) for one in model_parts.CANDIDATES)
    patch.setattr(model_parts, "CANDIDATES", found)
    patch.setattr(model_parts, "FOUND", tuple(replace(one, licence=planted) for one in model_parts.FOUND))
    SCENES["models-search"](stage)
    stage.services.downloads.problem.emit(planted)
    stage.window.show_page(CHAT)
    SCENES["chat-models"](stage)


def _in_servers(stage: Stage, planted: str, patch: pytest.MonkeyPatch) -> None:
    there = replace(ELSEWHERE, name="<b>bold", found=replace(ELSEWHERE.found, models=(planted,)))
    patch.setattr("tests.app.stage.ELSEWHERE", there)
    SCENES["settings-server"](stage)
    stage.window.show_page(CHAT)
    SCENES["chat-elsewhere-models"](stage)
    stage.window.show_page(MONITOR)


def test_what_strangers_write_is_never_html(on_stage: Stage, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for fill in (_in_servers, _in_models, _in_jobs, _in_chats):
        seen = {id(label) for label in _shown() if planted in label.text()}
        fill(on_stage, planted, monkeypatch)
        on_stage.settle()
        assert [label for label in _shown() if planted in label.text() and id(label) not in seen], fill
        assert taken_for_html(planted) == []
    window = on_stage.window
    before = len([label for label in _shown() if planted in label.text()])
    box = QMessageBox(window)
    box.setText(planted)
    box.setInformativeText(planted)
    box.open()
    question = ask(window, planted, planted, [(planted, "do", lambda: None)])
    entry = QInputDialog(window)
    entry.setLabelText(planted)
    entry.open()
    assert len([label for label in _shown() if planted in label.text()]) == before + 5
    assert taken_for_html(planted) == []
    for dialog in (box, question, entry):
        dialog.close()
        dialog.deleteLater()


def test_html_is_written_in_few_places_only() -> None:
    ways = re.compile(
        r"RichText|AutoText|MarkdownText|setHtml|insertHtml|setMarkdown|QErrorMessage|convertFromPlainText"
    )
    uses = {str(path.relative_to(APP).as_posix()) for path in APP.rglob("*.py") if ways.search(path.read_text("utf-8"))}
    assert uses == MEANT | {"theme.py"}  # which has the rule
    assert all("html.escape(" in (APP / name).read_text("utf-8") for name in MEANT)
