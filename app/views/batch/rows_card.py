"""Finished rows: the latest while the job runs, all of them, those that failed, or those that were cut off."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QModelIndex, Qt, Signal, SignalInstance
from PySide6.QtGui import QGuiApplication, QKeyEvent
from PySide6.QtWidgets import QButtonGroup, QLabel, QPlainTextEdit, QSizePolicy, QWidget

from app.models.batch_rows import ROW_ROLE, AnsweredRowsModel, Column
from app.services.background import LatestTask, timer
from app.services.batch_job import PAGE_ROWS, RESUMABLE, UNDER_WAY, JobAnswers, JobEntry, JobState
from app.theme import use_tabular_figures
from app.views.batch.phrases import end_text
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, count, translate
from app.widgets.scaffold import RIGHT, Card, add_items, muted_label, push_button, text_label
from app.widgets.text_table import TextTable
from engine.batch_files.journal import Ended
from engine.common.plain_text import few_marks
from engine.protocol import BatchRow

BOX_PX = 96


class RowDetail(Card):
    closed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._reading = LatestTask(self)
        self._facts = muted_label(self)
        self.prompt = self._box(self.tr("Prompt"))
        self.reasoning = self._box(self.tr("Reasoning"))
        self.answer = self._box(self.tr("Answer"))
        copy = push_button(
            self, self.tr("Copy"), lambda: QGuiApplication.clipboard().setText(self.answer.toPlainText())
        )
        copy.setProperty("compact", "true")
        copy.setAccessibleName(self.tr("Copy the answer"))
        close = push_button(self, self.tr("Close"), self.close_detail)
        close.setProperty("compact", "true")
        self.head.setSpacing(6)
        add_items(self.head, copy, close)
        self.body.setSpacing(6)
        self.body.addWidget(self._facts)
        self._labels: dict[QPlainTextEdit, QLabel] = {}
        for box, share in ((self.prompt, 2), (self.reasoning, 2), (self.answer, 3)):
            label = text_label(self, box.accessibleName(), role="caption", buddy=box)
            add_items(self.body, label, (box, share))
            self._labels[box] = label
        self._show_reasoning("")

    def show_row(self, row: BatchRow, answers: JobAnswers | None) -> None:
        self._show(row)
        if answers is not None:
            self._reading.ask(lambda: answers.whole(row.row), self._on_whole)

    def close_detail(self) -> None:
        self._reading.forget()
        self.closed.emit()

    def close_down(self) -> None:
        self._reading.close()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape:
            self.close_detail()
            return
        super().keyPressEvent(event)

    def _on_whole(self, row: BatchRow | None) -> None:
        if row is not None:
            self._show(row)

    def _show(self, row: BatchRow) -> None:
        self.set_heading(self.tr("Row {0}").format(count(row.row + 1)))
        facts = [end_text(row), self.tr("{0} tokens").format(count(row.generated_tokens))]
        if row.problem:
            facts = [self.tr("Failed: the row {0}.").format(row.problem)]
        self._facts.setText(SEPARATOR.join(facts))
        if row.prompt or not self.prompt.toPlainText():
            self.prompt.setPlainText(
                few_marks(row.prompt) or self.tr("The input can no longer be read, or the row was not sent.")
            )
        self.answer.setPlainText(few_marks(row.answer))
        self._show_reasoning(row.reasoning)

    def _show_reasoning(self, text: str) -> None:
        self.reasoning.setPlainText(text)
        for widget in (self.reasoning, self._labels[self.reasoning]):
            widget.setVisible(bool(text))

    def _box(self, name: str) -> QPlainTextEdit:
        box = QPlainTextEdit(self)
        box.setReadOnly(True)
        box.setAccessibleName(name)
        box.setTabChangesFocus(True)
        # Its own size hint would make the page scroll even while no row is open.
        box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Ignored)
        box.setMinimumHeight(BOX_PX)
        return box


LATEST, ALL, FAILED, CUT_OFF = range(4)
_ENDED: dict[int, Ended] = {FAILED: "failed", CUT_OFF: "cut_off"}
READ_AGAIN_MS = 1500
NEAR_END_PX = 400
_PROMPT_SHARE = 0.24


class RowsCard(Card):
    """Signals: `opened`, the `BatchRow` to show in full; `moved`, the row the keys moved to; `left`, on Esc;
    `redo_wanted`, to answer the rows that were cut off again, with more tokens."""

    opened = Signal(object)
    moved = Signal(object)
    left = Signal()
    redo_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("RowsCard", "Finished rows"), parent)
        self._entry: JobEntry | None = None
        self._answers: JobAnswers | None = None
        self._reading = LatestTask(self)
        self._complete = False
        self.model = AnsweredRowsModel(
            (self.tr("Row"), self.tr("Prompt"), self.tr("Answer"), self.tr("End"), self.tr("Tokens")),
            end_text,
            count,
            self,
        )
        self.table = TextTable(self.model, self.tr("Finished rows"), self)
        use_tabular_figures(self.table)
        words = (end_text(BatchRow(0, "", "", "stop", 0, problem)) for problem in ("", "failed"))
        character = self.table.fontMetrics().averageCharWidth()
        widest = max(map(self.table.fontMetrics().horizontalAdvance, words)) / character + 1
        ends = max(widest, 8)
        widths: dict[int, float] = {Column.ROW: 6, Column.PROMPT: _PROMPT_SHARE, Column.END: ends, Column.TOKENS: 7}
        self.table.share_width(widths, Column.TOKENS)
        self.table.opened.connect(lambda index: self._pass_on(index, self.opened))
        self.table.moved.connect(lambda index: self._pass_on(index, self.moved))
        self.table.left.connect(self.left)
        self.table.verticalScrollBar().valueChanged.connect(self._read_more)
        self._nothing = text_label(self, role="secondary", align=Qt.AlignmentFlag.AlignCenter, wrap=True)
        self._again = timer(self, self._read_ended_again, READ_AGAIN_MS, once=True)
        self.filters = QButtonGroup(self)
        chips = Flow(parent=self, gap=10)
        for number in (LATEST, ALL, FAILED, CUT_OFF):
            chip = push_button(self, self._named(number), kind="chip", checkable=True)
            self.filters.addButton(chip, number)
            chips.add(chip)
        self.head.addWidget(chips)
        self.filters.idClicked.connect(self._select)
        self.redo = push_button(
            self,
            self.tr("Answer again with more tokens"),
            self.redo_wanted,
            tip=self.tr("Twice as many as each of them had"),
        )
        self.body.setContentsMargins(16, 14, 16, 10)
        add_items(self.body, (self.table, 1), (self._nothing, 1), (self.redo, RIGHT))

    def show_job(self, entry: JobEntry) -> None:
        self._entry, self._answers = entry, JobAnswers(entry)
        self.model.set_beginning(entry.job.template.partition("{{")[0])
        running = entry.state in UNDER_WAY
        chip = self.filters.button(LATEST)
        chip.setVisible(running)
        self._select(LATEST if running else ALL)

    def update_job(self, entry: JobEntry) -> None:
        before, self._entry = self._entry, entry
        if before is None:
            return
        running, ran = entry.state in UNDER_WAY, before.state in UNDER_WAY
        if running != ran or entry.done < before.done:  # started, ended, or rows were reset
            self.show_job(entry)
            return
        is_new = {FAILED: entry.failed != before.failed, CUT_OFF: entry.cut_off != before.cut_off}
        if is_new.get(self.filters.checkedId(), False) and not self._again.isActive():
            self._again.start()
        self._show_words()

    def add_latest(self, rows: Sequence[BatchRow]) -> None:
        if self.filters.checkedId() == LATEST:
            at_top = self.table.verticalScrollBar().value() == 0
            self.model.put_latest(rows)
            if at_top:
                self.table.verticalScrollBar().setValue(0)
            self._show_words()
        elif self._complete and self.filters.checkedId() == ALL:
            self._complete = False

    def close_down(self) -> None:
        self._again.stop()
        self._reading.close()

    @property
    def answers(self) -> JobAnswers | None:
        return self._answers

    # --- reading pages ------------------------------------------------------------------------------

    def _select(self, number: int) -> None:
        self.filters.button(number).setChecked(True)
        self._reading.forget()
        self.model.set_rows(())
        self._complete = number == LATEST
        self._show_words()
        if number != LATEST:
            self._read(-1)
        else:
            self._read_latest()

    def _read(self, after: int) -> None:
        answers = self._answers
        if answers is not None:
            page = partial(answers.page, after, ended=_ENDED.get(self.filters.checkedId(), "any"))
            self._reading.ask(page, self._on_page, lambda _error: self._on_page([]))

    def _read_latest(self) -> None:
        """Rows that finished before the page was opened come from the journal, whose last rows are the latest."""
        entry = self._entry
        if entry is not None and entry.done:
            self._read(max(-1, entry.done - 60))

    def _on_page(self, rows: list[BatchRow]) -> None:
        if self.filters.checkedId() == LATEST:
            known = {self.model.index(n, 0).data(ROW_ROLE).row for n in range(self.model.rowCount())}
            self.model.append([row for row in reversed(rows) if row.row not in known])
        else:
            self._complete = len(rows) < PAGE_ROWS
            self.model.append(rows)
        self._show_words()

    def _read_more(self, value: int) -> None:
        bar = self.table.verticalScrollBar()
        if not self._complete and not self._reading.is_busy and value >= bar.maximum() - NEAR_END_PX:
            self._read(self.model.last_row)

    def _read_ended_again(self) -> None:
        shown = self.filters.checkedId()
        if shown not in _ENDED:
            return
        if self.table.verticalScrollBar().value() == 0:
            self._select(shown)  # rows finish in any order
        else:
            self._read(self.model.last_row)

    def _named(self, number: int) -> str:
        return (self.tr("Latest"), self.tr("All"), self.tr("Failed"), self.tr("Cut off"))[number]

    # --- showing --------------------------------------------------------------------------------------

    def _show_words(self) -> None:
        entry, shown = self._entry, self.filters.checkedId()
        counts = {FAILED: entry.failed, CUT_OFF: entry.cut_off} if entry is not None else {}
        for number in _ENDED:
            found = count(counts[number]) if counts.get(number) else ""
            self.filters.button(number).setText(f"{self._named(number)} {found}".strip())
        self.filters.button(CUT_OFF).setVisible(bool(counts.get(CUT_OFF)) or shown == CUT_OFF)
        rests = entry is not None and (entry.state is JobState.FINISHED or entry.state in RESUMABLE)
        self.redo.setVisible(shown == CUT_OFF and rests and bool(counts.get(CUT_OFF)))
        empty = self.model.rowCount() == 0
        if counts.get(shown):
            words = ""
        elif shown == FAILED:
            words = self.tr("No row has failed.")
        elif shown == CUT_OFF:
            words = self.tr("No row was cut off at its limit of tokens.")
        elif entry is not None and entry.state in UNDER_WAY:
            words = self.tr("Rows appear here as they are answered.")
        else:
            words = self.tr("No row has been answered yet.") if entry is not None and not entry.done else ""
        self._nothing.setText(words)
        self._nothing.setVisible(empty)
        self.table.setVisible(not empty)

    def _pass_on(self, index: QModelIndex, signal: SignalInstance) -> None:
        row = index.data(ROW_ROLE)
        if row is not None:
            signal.emit(row)
