"""One job: its progress, its settings, and its finished rows: the latest, all, those that failed or were cut off."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from functools import partial

from PySide6.QtCore import QEvent, QModelIndex, Qt, QTimer, Signal, SignalInstance
from PySide6.QtGui import QGuiApplication, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QButtonGroup,
    QFrame,
    QGridLayout,
    QLabel,
    QPlainTextEdit,
    QProgressBar,
    QSizePolicy,
    QStackedWidget,
    QWidget,
)

from app.models.batch_rows import ROW_ROLE, AnsweredRowsModel, Column
from app.services.background import LatestTask, timer
from app.services.batch_job import PAGE_ROWS, RESUMABLE, UNDER_WAY, JobAnswers, JobEntry, JobState
from app.theme import colours, scaled, set_look, use_tabular_figures
from app.views.batch.phrases import (
    cost_text,
    end_text,
    pace_text,
    place_name,
    place_text,
    rows_text,
    state_text,
    status_text,
)
from app.widgets.chip import ElidedLabel
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, count, number, percent, translate
from app.widgets.scaffold import (
    RIGHT,
    STRETCH,
    Card,
    PageBody,
    WrappedLabel,
    add_items,
    hbox,
    muted_label,
    push_button,
    text_label,
    vbox,
)
from app.widgets.text_table import TextTable
from engine.batch_files.job_watcher import PlacePace
from engine.batch_files.journal import Ended
from engine.common.config import HERE
from engine.common.plain_text import few_marks
from engine.protocol import BatchRow
from engine.remote.endpoint import named_at

_PLACE = re.compile(r"\{\{.+?\}\}")
_PLACE_NAME = re.compile(r"\{\{\s*(.+?)\s*\}\}")
_MOST_CHARACTERS = 600


class SharedSettingsCard(Card):
    """Read-only: all answers of a job come from the same settings."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("SharedSettingsCard", "Template"), parent)
        self._entry: JobEntry | None = None
        self._template = text_label(self, wrap=True)
        self._template.setTextFormat(Qt.TextFormat.RichText)
        self._template.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._template.setObjectName("templateText")
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(6)
        self._grid.setColumnStretch(1, 1)
        add_items(self.body, self._template, self._grid, STRETCH)
        self._values: list[ElidedLabel] = []
        for row, name in enumerate(
            (
                self.tr("Input"),
                self.tr("Result"),
                self.tr("Model"),
                self.tr("Answered by"),
                self.tr("Max tokens"),
                self.tr("Temperature"),
                self.tr("Answer must be"),
                self.tr("System prompt"),
            )
        ):
            label, value = QLabel(name, self), ElidedLabel(self)
            label.setProperty("role", "secondary")
            value.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self._grid.addWidget(label, row, 0)
            self._grid.addWidget(value, row, 1)
            self._values.append(value)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self._entry is not None:
            self.show_job(self._entry)  # the columns' colour is part of the HTML

    def show_job(self, entry: JobEntry) -> None:
        self._entry = entry
        job = entry.job
        text = job.template or self.tr("Each row's own messages")
        if job.image_column and job.image_column not in _PLACE_NAME.findall(text):
            text = f"{{{{{job.image_column}}}}}\n{text}"  # which is before the text
        shown = html.escape(text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…")
        colour = colours().accent_text
        marked = _PLACE.sub(lambda match: f'<span style="color: {colour}">{match[0]}</span>', shown)
        self._template.setText(marked.replace("\n", "<br>"))
        if job.schema:
            must_be = self.tr("JSON with a schema")
        elif job.choices:
            must_be = self.tr("one of {0}").format(", ".join(job.choices))
        else:
            must_be = self.tr("text")
        temperature = job.sampling.temperature
        values = (
            job.input,
            job.output,
            self._model_text(entry),
            self._answered_by(entry),
            count(job.sampling.max_tokens),
            self.tr("0 (the likeliest token)") if temperature == 0 else number(temperature, 2),
            must_be,
            job.system or self.tr("none"),
        )
        for label, value in zip(self._values, values, strict=True):
            label.set_full_text(value if label not in self._values[:2] else _name(value))
            if label in self._values[:2]:
                label.setToolTip(value)

    def _model_text(self, entry: JobEntry) -> str:
        if entry.job.is_remote and not entry.job.ray:
            return self.tr("the servers' own")
        return _name(entry.model) or self.tr("the loaded one")

    def _answered_by(self, entry: JobEntry) -> str:
        if not entry.job.is_remote:
            return self.tr("this PC")
        if entry.job.ray:
            return self.tr("the Ray cluster at {0}").format(entry.job.ray)
        hosts = [named_at(place.name, place.host) for place in entry.places if place.host]
        here = [self.tr("this PC")] if HERE in entry.job.endpoints else []
        return ", ".join([*here, *(hosts or (name for name in entry.job.endpoints if name != HERE))])


def _name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


SIDE_PX = 320
NARROW_PX = 860
LEAST_ROWS_PX = 260


_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter


class PlaceRows(QWidget):
    """A small table; hidden while there is only this PC."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(18)
        self._grid.setVerticalSpacing(4)
        self._grid.setColumnStretch(1, 1)
        self._lines: list[tuple[QLabel, ElidedLabel, QLabel, QLabel]] = []
        self.setAccessibleName(self.tr("Who answers the rows"))
        self.hide()

    def show_places(self, places: Sequence[PlacePace]) -> None:
        while len(self._lines) < len(places):
            self._add_line()
        for line, place in zip(self._lines, places, strict=False):
            name, state, rows, cost = line
            name.setText(place_name(place))
            name.setToolTip(place.host)
            state.set_full_text(place_text(place))
            set_look(state, "tone", "warning" if place.state == "out" else "")
            rows.setText(
                self.tr("1 row") if place.rows == 1 else self.tr("{0} rows", "", place.rows).format(count(place.rows))
            )
            cost.setText(cost_text(place))
        costs = any(place.cost is not None for place in places)  # else its column would leave a gap at the right
        for at, line in enumerate(self._lines):
            for label in line:
                label.setVisible(at < len(places) and (costs or label is not line[-1]))
        self.setVisible(bool(places))
        self.setAccessibleDescription(
            ". ".join(f"{place_name(place)}: {place_text(place)}, {count(place.rows)}" for place in places)
        )

    def _add_line(self) -> None:
        at = len(self._lines)
        name, state, rows, cost = QLabel(self), ElidedLabel(self), QLabel(self), QLabel(self)
        for label in (state, rows, cost):
            label.setProperty("role", "secondary")
        for label in (rows, cost):
            label.setAlignment(_RIGHT)
            use_tabular_figures(label)
        for column, label in enumerate((name, state, rows, cost)):
            self._grid.addWidget(label, at, column)
        self._lines.append((name, state, rows, cost))


class ProgressCard(QFrame):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._percent = text_label(self)
        self._percent.setObjectName("percent")
        self._rows = ElidedLabel(self, role="lead")
        self._rate = text_label(self)
        self._rate.setStyleSheet("font-weight: 600;")
        self._end = text_label(self, role="lead")
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setRange(0, 1000)
        self._bar.setAccessibleName(self.tr("Job progress"))
        self._status = WrappedLabel("", self, role="secondary")
        for label in (self._percent, self._rows, self._rate, self._end):
            use_tabular_figures(label)
        left = QWidget(self)
        hbox(
            (self._percent, Qt.AlignmentFlag.AlignBaseline),
            (self._rows, Qt.AlignmentFlag.AlignBaseline),
            into=left,
            gap=10,
        )
        # An end on another day is long: in a narrow window it is below the rate.
        self._right = right = Flow(self._rate, self._end, parent=self, gap=10)
        right.hide()
        column = vbox(
            Flow(left, right, parent=self, ends_right=True),
            self._bar,
            self._status,
            into=self,
            margins=(16, 14, 16, 14),
            gap=10,
        )
        self._places = PlaceRows(self)
        column.addWidget(self._places)
        self._column = column
        self._make_strip: Callable[[QWidget], QWidget] | None = None
        self._strip: QWidget | None = None

    def add_strip(self, make: Callable[[QWidget], QWidget]) -> None:
        self._make_strip = make

    def _show_strip(self, shown: bool) -> None:
        if shown and self._strip is None and self._make_strip is not None:
            self._strip = self._make_strip(self)
            self._column.addWidget(self._strip)
        if self._strip is not None:
            self._strip.setVisible(shown)

    def show_job(self, job: JobEntry) -> None:
        share = job.share
        self._percent.setText(percent(share) if share is not None else state_text(job).capitalize())
        self._rows.set_full_text(rows_text(job))
        rate, end = pace_text(job)
        self._rate.setText(rate)
        self._end.setText(end)
        self._right.setVisible(bool(rate or end))
        busy = share is None and job.state is JobState.RUNNING
        self._bar.setRange(0, 0 if busy else 1000)
        if not busy:
            self._bar.setValue(int((share or 0.0) * 1000))
        self._show_strip(job.state in UNDER_WAY and job.needs_model)
        self._places.show_places(job.places)
        status = status_text(job)
        warns = bool(job.blocked) or job.state is JobState.FAILED
        set_look(self._status, "tone", "warning" if warns else "")
        self._status.setText(status)
        self.setAccessibleName(self.tr("Job progress"))
        self.setAccessibleDescription(f"{self._percent.text()}. {self._rows.full_text}. {rate} {end}. {status}")


class JobView(QWidget):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._key = ""
        self.progress = ProgressCard(self)
        self.rows = RowsCard(self)
        self.settings = SharedSettingsCard(self)
        self.detail = RowDetail(self)
        self._side = QStackedWidget(self)
        self._side.addWidget(self.settings)
        self._side.addWidget(self.detail)
        self.rows.setMinimumHeight(LEAST_ROWS_PX)
        self._below = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._below.setSpacing(14)
        add_items(self._below, (self.rows, 1), self._side)
        self._scroll = PageBody(self, self.progress, (self._below, 1), below=0)
        vbox(self._scroll, into=self)
        self.rows.opened.connect(self._open_row)
        self.rows.moved.connect(self._move_to)
        self.rows.left.connect(self._close_row)
        self.detail.closed.connect(self._close_row)
        self._fit()

    @property
    def key(self) -> str:
        return self._key

    def show_job(self, entry: JobEntry) -> None:
        self.progress.show_job(entry)
        if entry.key != self._key:
            self._key = entry.key
            self._scroll.verticalScrollBar().setValue(0)  # a different job is shown from its top
            self._side.setCurrentWidget(self.settings)
            self.settings.show_job(entry)
            self.rows.show_job(entry)
        else:
            self.settings.show_job(entry)
            self.rows.update_job(entry)

    def forget(self) -> None:
        self._key = ""

    def add_rows(self, key: str, rows: Sequence[BatchRow]) -> None:
        if key == self._key:
            self.rows.add_latest(rows)

    def close_down(self) -> None:
        self.rows.close_down()
        self.detail.close_down()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _open_row(self, row: BatchRow) -> None:
        self.detail.show_row(row, self.rows.answers)
        self._side.setCurrentWidget(self.detail)
        # In a narrow window it is below the rows: lay out first, then scroll to it.
        QTimer.singleShot(0, self, lambda: self._scroll.ensureWidgetVisible(self.detail, 0, 0))

    def _move_to(self, row: BatchRow) -> None:
        if self._side.currentWidget() is self.detail:
            self.detail.show_row(row, self.rows.answers)

    def _close_row(self) -> None:
        self._side.setCurrentWidget(self.settings)
        self.rows.table.setFocus()

    def _fit(self) -> None:
        narrow = self.width() < scaled(NARROW_PX)
        self._below.setDirection(QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight)
        if narrow:
            self._side.setMinimumWidth(0)
            self._side.setMaximumWidth(16_777_215)
        else:
            self._side.setFixedWidth(scaled(SIDE_PX))


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
        for which in (LATEST, ALL, FAILED, CUT_OFF):
            chip = push_button(self, self._named(which), kind="chip", checkable=True)
            self.filters.addButton(chip, which)
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
        for which in _ENDED:
            found = count(counts[which]) if counts.get(which) else ""
            self.filters.button(which).setText(f"{self._named(which)} {found}".strip())
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
