"""The Batch page by hand: a file dropped, a form, three rows tried, a job that runs, pauses, fails and is removed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import openpyxl
import pytest
from PySide6.QtCore import QMimeData, QPoint, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import (
    QApplication,
    QLabel,
    QMessageBox,
    QPlainTextEdit,
    QPushButton,
    QWidget,
)
from pytestqt.qtbot import QtBot

from app.models.batch_rows import Column
from app.services.batch_job import JobState
from app.services.engine_client import EngineState
from app.views.batch.job_view import CUT_OFF
from app.views.batch.page import BatchPage
from app.widgets.asking import before_loading
from app.widgets.page import BatchDraft
from engine.batch_files.openai_format import errors_path
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, failed
from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import ErrorCode
from engine.protocol import BatchFinished
from tests.app.scripted_batches import ScriptedBatches, row, shown_page
from tests.app.scripted_engine import STARTER

ROWS = 6


@pytest.fixture
def engine(qapp: QApplication) -> Iterator[ScriptedBatches]:
    result = ScriptedBatches()
    yield result
    result.deleteLater()


@pytest.fixture
def page(engine: ScriptedBatches, switchyard_home: Path, qtbot: QtBot) -> Iterator[BatchPage]:
    with shown_page(engine, qtbot) as page:
        yield page


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "complaints.csv"
    file.write_text("text,mark\n" + "".join(f"line {n},{n}\n" for n in range(ROWS)), encoding="utf-8")
    return file


def drop(page: BatchPage, *paths: Path) -> None:
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(QPoint(9, 9), Qt.DropAction.CopyAction, data, buttons, keys)
    QApplication.sendEvent(page, enter)
    assert enter.isAccepted()
    QApplication.sendEvent(page, QDropEvent(QPointF(9, 9), Qt.DropAction.CopyAction, data, buttons, keys))


def fill(page: BatchPage, qtbot: QtBot, file: Path) -> None:
    """The form, ready to start."""
    drop(page, file)
    qtbot.waitUntil(page.form.foot.start.isEnabled)


def start(page: BatchPage, qtbot: QtBot, file: Path) -> None:
    fill(page, qtbot, file)
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: page.pages.currentWidget() is page.job_view)


def only_state(page: BatchPage) -> JobState:
    (entry,) = page._jobs.entries
    return entry.state


def answer_dialog(label: str) -> None:
    (box,) = [w for w in QApplication.topLevelWidgets() if isinstance(w, QMessageBox) and w.isVisible()]
    next(button for button in box.buttons() if button.text() == label).click()


def words(widget: QWidget) -> str:
    labels = [label for label in widget.findChildren(QLabel) if label.isVisible()]
    return "\n".join(label.text() for label in sorted(labels, key=lambda one: one.mapTo(widget, QPoint()).y()))


# --- a new job ------------------------------------------------------------------------------------


def test_an_empty_page_says_what_to_do_first(page: BatchPage, qtbot: QtBot, tmp_path: Path) -> None:
    assert page.pages.currentWidget() is page.empty
    assert "csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html" in words(page.empty)
    assert page.empty.choose.isVisible()
    assert not page.strip.isVisible()
    # What is no file of rows is refused in a sentence.
    drop(page, tmp_path / "song.mp3")
    assert page.trouble.text.startswith("song.mp3 has an unsupported file type")
    empty = tmp_path / "empty.csv"
    empty.touch()
    drop(page, empty)
    qtbot.waitUntil(lambda: "empty.csv" in words(page.form.input) and "Reading" not in words(page.form.input))
    assert not page.form.foot.start.isEnabled()


def test_a_dropped_file_shows_its_columns_and_rows(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    model = page.form.input.table.model()
    assert [model.headerData(n, Qt.Orientation.Horizontal) for n in range(2)] == ["text", "mark"]
    assert model.rowCount() == 5
    assert page.form.template.template == "{{text}}"
    assert page.form.job().sampling == SamplingParams()
    assert page.form.output.path == table.with_name("complaints.answers.csv")
    qtbot.waitUntil(lambda: "6 rows" in words(page.form.input))


def test_an_unknown_column_is_told_at_once(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    template = page.form.template
    template.edit.clear()
    chip = next(b for b in template.findChildren(QPushButton) if b.accessibleName() == "Insert column mark")
    chip.click()
    assert template.template == "{{mark}}"
    template.edit.insertPlainText(" {{nme}}")
    assert "{{nme}}" in template.trouble.text()
    assert not page.form.foot.start.isEnabled()
    template.edit.setPlainText("Say {{text}}")
    assert not template.trouble.isVisible()
    assert page.form.foot.start.isEnabled()


def test_choices_and_schemas_are_checked(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    answers = page.form.answers
    answers.kinds.button(1).click()
    assert not page.form.foot.start.isEnabled()
    answers.choices.setPlainText("good\nbad\ngood\n")
    assert page.form.job().choices == ("good", "bad")
    answers.kinds.button(2).click()
    answers.schema.setPlainText("{")
    assert "not JSON" in answers.trouble.text()
    answers.schema.setPlainText('{"type": "object"}')
    assert page.form.job().schema == '{"type": "object"}'
    assert page.form.job().choices == ()
    answers.max_tokens.setValue(48)
    answers.popover.fill(page.form.job().sampling)
    answers.popover.fields["top_k"].setValue(40)
    sampling = page.form.job().sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (48, 40, 0.0)

    def ground(box: QPlainTextEdit) -> str:
        return box.grab().toImage().pixelColor(box.width() // 2, box.height() - 6).name()

    assert answers.schema.isEnabled()
    qtbot.waitUntil(lambda: answers.schema.height() > 40)
    assert ground(answers.schema) == ground(page.form.template.system)  # it looks like every field


def test_no_more_rows_are_to_be_tried_than_there_are(page: BatchPage, qtbot: QtBot, tmp_path: Path) -> None:
    for rows, words_shown in ((1, "one row"), (2, "two rows"), (3, "three rows"), (9, "three rows")):
        file = tmp_path / f"{rows}.txt"
        file.write_text("line\n" * rows)
        fill(page, qtbot, file)
        qtbot.waitUntil(lambda said=words_shown: said in page.form.sample.button.text())
        page.form.foot.cancel.click()


def test_three_rows_are_tried_and_the_plan_follows(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    fill(page, qtbot, table)
    qtbot.waitUntil(lambda: "6 rows" in words(page.form.input))
    page.form.sample.button.click()
    assert engine.samples[-1].command.job.start == "resume"
    engine.answer(row(1), sample=True)
    engine.answer(row(0), row(2, problem="is empty"), sample=True)
    engine.plan(sample=True, measured=True)
    engine.end_sample()
    qtbot.waitUntil(lambda: "The row is empty." in words(page.form.sample))
    shown = words(page.form.sample)
    assert shown.index("answer 0") < shown.index("answer 1") < shown.index("The row is empty.")
    assert "3 rows took 2.0 s, at 15 tokens/s." in shown
    assert "24 rows share each load of a layer's weights; 200 to 400 tokens/s" in page.form.foot.plan.text()
    page.form.template.edit.setPlainText("Say {{text}}")  # now it is another job
    assert page.form.sample.answers == 0
    assert page.form.foot.plan.text() == ""


def test_an_existing_result_is_asked_about(page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    page.form.output.path.write_text("precious", encoding="utf-8")
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: any(isinstance(w, QMessageBox) for w in QApplication.topLevelWidgets() if w.isVisible()))
    answer_dialog("Back")
    assert engine.jobs == []
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: any(isinstance(w, QMessageBox) for w in QApplication.topLevelWidgets() if w.isVisible()))
    answer_dialog("Replace it")
    assert engine.jobs[-1].command.job.start == "restart"


def test_the_input_is_never_the_output(page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path) -> None:
    fill(page, qtbot, table)
    page.form.output.name.selectAll()
    qtbot.keyClicks(page.form.output.name, table.name)
    page.form.foot.start.click()
    qtbot.waitUntil(page.form.foot.trouble.isVisible)
    assert "the input" in page.form.foot.trouble.text()
    assert engine.jobs == []


def test_several_files_are_taken_one_after_the_other(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    second = table.with_name("second.csv")
    second.write_text(table.read_text(encoding="utf-8"), encoding="utf-8")
    drop(page, table, second)
    qtbot.waitUntil(page.form.foot.start.isEnabled)
    page.form.template.edit.setPlainText("Say {{text}}")
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: page.form.output.path.name == "second.answers.csv")
    assert page.form.template.template == "Say {{text}}"
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: len(page._jobs.entries) == 2)
    assert [entry.state for entry in page._jobs.entries] == [JobState.QUEUED, JobState.RUNNING]
    assert page.strip.isVisible()


def test_a_workbook_asks_which_sheet(page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, tmp_path: Path) -> None:
    book, file = openpyxl.Workbook(), tmp_path / "tickets.xlsx"
    for name, line in (("Open", "door"), ("Closed", "window")):
        sheet = book.create_sheet(name)
        sheet.append([f"{name} text"])
        sheet.append([line])
    book.save(file)
    fill(page, qtbot, file)
    card = page.form.input
    assert [card.sheet.itemText(place) for place in range(card.sheet.count())] == ["Sheet: Open", "Sheet: Closed"]
    assert card.sheet.isVisible()
    assert card.sheet.accessibleName()
    assert not card.encoding.isVisible()
    qtbot.keyClick(card.sheet, Qt.Key.Key_Down)
    card.sheet.activated.emit(1)
    qtbot.waitUntil(lambda: page.form.template.template == "{{Closed text}}")
    assert card.sheet.currentData() == "Closed"
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: bool(engine.jobs))
    assert engine.jobs[0].command.job.sheet == "Closed"


@pytest.mark.parametrize(("height", "writes"), [(760, True), (330, False)])
def test_a_form_opens_at_its_top_and_the_keyboard_goes_to_what_is_in_view(
    page: BatchPage, qtbot: QtBot, table: Path, height: int, writes: bool
) -> None:
    page.resize(720, height)
    page.activateWindow()
    fill(page, qtbot, table)
    bar = page.form._scroll.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0)
    bar.setValue(bar.maximum())
    page.form.foot.cancel.click()
    second = table.with_name("second.csv")
    second.write_text(table.read_text(encoding="utf-8"), encoding="utf-8")
    fill(page, qtbot, second)
    assert bar.value() == 0
    focused = page.form.template.edit if writes else page.form.input.change
    qtbot.waitUntil(focused.hasFocus)
    view = page.form._scroll.viewport()
    assert view.rect().contains(focused.mapTo(view, focused.rect().bottomLeft()))


# --- a job that runs ------------------------------------------------------------------------------


def test_progress_is_shown_and_rows_come_in(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    start(page, qtbot, table)
    engine.tell(3, ROWS, failed=1, rate=31.0, left=60.0)
    engine.answer(row(2), row(0), row(1, problem="has nothing in 'text'"))
    parts = ("50%", "3 of 6 rows", "1 failed", "31 tokens/s", "done ")
    qtbot.waitUntil(lambda: all(part in words(page.job_view) for part in parts))  # once there is room for them
    model = page.job_view.rows.model
    assert [model.index(n, Column.ROW).data() for n in range(3)] == ["2", "1", "3"]
    assert page.job_view.rows.filters.button(2).text() == "Failed 1"
    assert "this PC" in words(page.job_view.settings).split("\n")  # whole, in the narrow column
    engine.tell(3, ROWS, failed=1, blocked="Waiting: the disk is full.")
    assert "Waiting: the disk is full." in words(page.job_view.progress)


def test_pause_resume_the_end_and_a_death(page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path) -> None:
    start(page, qtbot, table)
    page.head.pause.click()
    assert not page.head.pause.isEnabled()
    engine.end(2, finished=False)
    assert page.head.resume.isVisible()
    assert not page.head.pause.isVisible()
    page.head.resume.click()
    engine.end(ROWS, 1)
    assert "100%" in words(page.job_view.progress)
    assert page.head.retry.isVisible()
    assert page.head.open.isVisible()
    page.head.retry.click()
    assert engine.jobs[-1].command.job.start == "retry_failed"
    # A dead engine is told, and resuming offered.
    engine.set_state(EngineState.DIED)
    engine.fail_job(ErrorCode.ENGINE_DIED, "The engine was killed (signal 9).")
    assert "signal 9" in words(page.job_view.progress)
    assert page.head.resume.isVisible()


def test_rows_that_were_cut_off_are_shown_alone_and_answered_again_with_one_click(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    start(page, qtbot, table)
    rows = page.job_view.rows
    assert rows.filters.button(CUT_OFF).isHidden()
    engine.tell(3, ROWS, cut_off=2)
    assert rows.filters.button(CUT_OFF).text() == "Cut off 2"
    qtbot.waitUntil(lambda: "2 cut off" in words(page.job_view.progress))  # once there is room for it
    rows.filters.button(CUT_OFF).click()
    assert rows.redo.isHidden()  # while it runs
    engine.end(ROWS, 1, cut_off=3)
    rows.filters.button(CUT_OFF).click()
    rows.redo.click()
    assert engine.jobs[-1].command.job.start == "redo_cut_off"
    assert rows.redo.isHidden()
    (entry,) = page._jobs.entries
    assert (entry.done, entry.failed, entry.cut_off) == (ROWS - 3, 1, 0)


def test_a_job_taken_off_the_list_can_be_brought_back(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    start(page, qtbot, table)
    page.head.remove_wanted.emit()
    assert len(page._jobs.entries) == 1  # not while it runs
    engine.end(ROWS)
    page.head.remove_wanted.emit()
    assert page._jobs.entries == []
    assert page.pages.currentWidget() is page.empty
    page.toast.button.click()
    assert only_state(page) is JobState.FINISHED
    assert page.pages.currentWidget() is page.job_view


def test_rows_of_a_finished_job_are_read_from_its_journal(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    start(page, qtbot, table)
    prepared = prepare(engine.jobs[-1].command.job)
    journal = prepared.open_journal(prepared.manifest("m", "fp32"), "M")
    thoughts = ("", "", "hm " * 200, "", "")
    answers = [Answer(n, f"answer {n} " * 200, "stop", 1, 2, reasoning=thought) for n, thought in enumerate(thoughts)]
    journal.record([*answers, failed(5, "is empty")])
    journal.close()
    engine.end(ROWS, 1)
    model = page.job_view.rows.model
    qtbot.waitUntil(lambda: model.rowCount() == ROWS)
    assert model.index(1, Column.PROMPT).data() == "line 1"
    table_view = page.job_view.rows.table
    table_view.setFocus()
    table_view.selectRow(1)
    qtbot.keyClick(table_view, Qt.Key.Key_Return)
    detail = page.job_view.detail
    qtbot.waitUntil(lambda: len(detail.answer.toPlainText()) == len("answer 1 ") * 200)
    assert detail.isVisible()
    assert not detail.reasoning.isVisible()
    qtbot.keyClick(table_view, Qt.Key.Key_Down)
    qtbot.waitUntil(lambda: detail.prompt.toPlainText() == "line 2")
    qtbot.waitUntil(lambda: detail.reasoning.toPlainText() == "hm " * 200)  # its beginning was there at once
    assert detail.reasoning.isVisible()
    qtbot.keyClick(table_view, Qt.Key.Key_Escape)
    assert not detail.isVisible()
    page.job_view.rows.filters.button(2).click()
    qtbot.waitUntil(lambda: model.rowCount() == 1)
    assert model.index(0, Column.ANSWER).data() == "Is empty"


def test_another_model_is_loaded_only_when_the_user_agrees(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    loads: list[int] = []
    before_loading(page._jobs, page, lambda: loads.append(1))
    assert loads == [1]
    start(page, qtbot, table)
    before_loading(page._jobs, page, lambda: loads.append(2))
    answer_dialog("Cancel")
    assert loads == [1]
    assert only_state(page) is JobState.RUNNING
    before_loading(page._jobs, page, lambda: loads.append(2))
    answer_dialog("Pause the job")
    assert loads == [1, 2]
    assert engine.cancelled == ["b0"]


# --- for everybody --------------------------------------------------------------------------------


# --- a job that began with other settings, or whose result is elsewhere ----------------------------


def begun_elsewhere(page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path, done: int) -> str:
    """A job that was paused with so many answers, in a model that is loaded in bf16; its key."""
    engine.model = replace(STARTER, path="/models/starter")
    engine.config = EngineConfig("starter")
    start(page, qtbot, table)
    engine.tell(done, ROWS)
    page.head.pause.click()
    engine.end(done, finished=False)
    assert only_state(page) is JobState.PAUSED
    return page._jobs.entries[0].key


def test_a_job_of_another_precision_asks_and_goes_on_with_its_own(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    key = begun_elsewhere(page, engine, qtbot, table, done=2)
    engine.model = replace(STARTER, path="/models/starter", precision="int8")  # tuned since
    page.head.resume.click()
    assert only_state(page) is JobState.PAUSED
    answer_dialog("Load it and resume")
    assert [load.command.config for load in engine.loads] == [EngineConfig("starter", precision="bf16")]
    assert page._jobs.entry(key) is not None
    assert only_state(page) in (JobState.QUEUED, JobState.RUNNING)


def test_a_job_of_another_model_asks_for_it(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    begun_elsewhere(page, engine, qtbot, table, done=2)
    engine.model = replace(STARTER, path="/models/other")
    page.head.resume.click()
    answer_dialog("Load it and resume")
    assert [load.command.config for load in engine.loads] == [EngineConfig("/models/starter", precision="bf16")]


def test_a_job_without_answers_or_that_starts_over_asks_nothing_of_the_model(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path
) -> None:
    begun_elsewhere(page, engine, qtbot, table, done=0)
    engine.model = replace(STARTER, path="/models/starter", precision="int8")
    page.head.resume.click()
    assert only_state(page) is JobState.RUNNING
    engine.tell(2, ROWS)
    page.head.pause.click()
    engine.end(2, finished=False)
    page.head.resume.click()  # those answers were made with int8
    assert only_state(page) is JobState.RUNNING
    assert engine.loads == []


def test_a_result_beside_its_place_is_said_and_opened(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, table: Path, tmp_path: Path
) -> None:
    start(page, qtbot, table)
    there = tmp_path / "complaints.answers-2.csv"
    there.touch()
    ending = BatchFinished(
        engine.jobs[-1].id, True, ROWS, 0, ROWS, 60, 2.0, "It is in complaints.answers-2.csv.", str(there)
    )
    engine.jobs[-1].end(ending)
    (entry,) = page._jobs.entries
    assert entry.result_file == there
    assert "complaints.answers-2.csv" in words(page.job_view)


def test_openai_requests_need_no_template_and_an_errors_file_of_somebody_else_is_told(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, tmp_path: Path
) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    file = tmp_path / "in.jsonl"
    file.write_text(f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n')
    fill(page, qtbot, file)
    assert not page.form.template.isVisible()
    assert "OpenAI" in words(page.form.input)
    assert page.form.output.path.suffix == ".jsonl"
    assert page.form.job().template == ""
    errors = errors_path(page.form.output.path)
    errors.write_text("mine")
    page.form.foot.start.click()
    qtbot.waitUntil(lambda: errors.name in page.form.foot.trouble.text())
    assert engine.jobs == []


def test_a_chats_prompt_is_asked_of_the_rows_of_the_next_file(page: BatchPage, qtbot: QtBot, table: Path) -> None:
    page.take_draft(BatchDraft("Sum up {{text}}", "Be brief.", SamplingParams(temperature=0.3, beams=4)))
    assert page.pages.currentWidget() is page.empty
    assert "Your chat's prompt" in page.handed._text.text()
    fill(page, qtbot, table)
    assert page.handed.isHidden()
    job = page.form.job()
    assert (job.template, job.system) == ("Sum up {{text}}", "Be brief.")
    assert (job.sampling.temperature, job.sampling.beams) == (0.3, 1)
    page.take_draft(BatchDraft("Sum this up."))  # of the file that is open: without columns, it gets the rows' text
    assert page.pages.currentWidget() is page.form
    assert page.form.job().template == "Sum this up.\n\n{{text}}"
    page.form.foot.cancel.click()
    page.take_draft(BatchDraft("Sum up {{story}}"))  # with other columns it stays, and says so
    drop(page, table)
    qtbot.waitUntil(lambda: page.form.template.template == "Sum up {{story}}")
    assert "{{story}}" in page.form.template.trouble.text()
    assert not page.form.foot.start.isEnabled()


def test_a_column_of_pictures_is_found_chosen_and_part_of_the_job(
    page: BatchPage, engine: ScriptedBatches, qtbot: QtBot, tmp_path: Path
) -> None:
    file = tmp_path / "photos.csv"
    file.write_text("photo,place\na.png,Rome\nb.JPG,Oslo\nc,Bonn\n", encoding="utf-8")
    page.open_files([file])
    form = page.form
    qtbot.waitUntil(form.foot.start.isEnabled)
    assert form.template.image_column == "photo"
    assert form.template.template == "Describe the picture."
    assert "reads text only" in form.template._blind.text()
    assert form.job().image_column == "photo"
    form.template.pictures.setCurrentIndex(form.template.pictures.findData("place"))
    form.template.pictures.activated.emit(0)
    assert form.job().image_column == "place"
    form.template.pictures.setCurrentIndex(0)
    form.template.pictures.activated.emit(0)
    assert form.template.problem()  # it names no column
    assert form.template._blind.isHidden()
    form.template.edit.setPlainText("Where is {{place}}?")
    assert not form.template.problem()
    assert form.job().image_column == ""
