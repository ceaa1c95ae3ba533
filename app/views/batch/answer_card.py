"""The form's prompt and answers: the template, how answers are drawn and constrained, and the trial's rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import QEvent, QSignalBlocker, QSize, Signal
from PySide6.QtGui import QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QGridLayout,
    QLabel,
    QPlainTextEdit,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)

from app.services.batch_sample import SAMPLE_ROWS
from app.theme import themed
from app.views.batch.phrases import end_text, translate
from app.widgets.fields import ComboBox, DoubleSpinBox, SpinBox, TextBox
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, count
from app.widgets.sampling_popover import SamplingPopover
from app.widgets.scaffold import Card, add_items, muted_label, push_button, set_message, text_label, vbox, warning_label
from engine.batch_files.prompts import parse_template
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.common.untrusted import DEEPEST, parse_json
from engine.protocol import BatchRow

_PLACE = re.compile(r"\{\{\s*(.+?)\s*\}\}")
LINES = 4


class _Places(QSyntaxHighlighter):
    def __init__(self, document: QTextDocument) -> None:
        super().__init__(document)
        self.columns: tuple[str, ...] = ()
        self.known, self.unknown = QTextCharFormat(), QTextCharFormat()

    def highlightBlock(self, text: str) -> None:
        for match in _PLACE.finditer(text):
            look = self.known if match[1] in self.columns else self.unknown
            self.setFormat(match.start(), match.end() - match.start(), look)


class TemplateEdit(TextBox):
    """`{{column}}` is coloured; an unknown column is also underlined."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self._places = _Places(self.document())
        self._apply()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            with QSignalBlocker(self):  # the text is the same
                self._apply()

    def set_columns(self, columns: tuple[str, ...]) -> None:
        self._places.columns = columns
        self._places.rehighlight()

    def insert_column(self, name: str) -> None:
        self.insertPlainText(f"{{{{{name}}}}}")
        self.setFocus()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.fontMetrics().lineSpacing() * LINES + 24)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, self.sizeHint().height())

    def _apply(self) -> None:
        places = self._places
        for look, colour in ((places.known, themed("accent_text")), (places.unknown, themed("danger"))):
            look.setForeground(colour)
            look.setFontWeight(QFont.Weight.DemiBold)
        places.unknown.setUnderlineStyle(QTextCharFormat.UnderlineStyle.SingleUnderline)
        places.unknown.setUnderlineColor(themed("danger"))
        places.rehighlight()


class ShortEdit(TextBox):
    def __init__(self, lines: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lines = lines

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.fontMetrics().lineSpacing() * self._lines + 22)

    def minimumSizeHint(self) -> QSize:
        return QSize(120, self.sizeHint().height())


class TemplateCard(Card):
    """Signals: `changed`, after every edit."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Prompt for each row"), parent)
        self._columns: tuple[str, ...] = ()
        self._chips = Flow(parent=self, gap=6)
        self.edit = TemplateEdit(self)
        self.edit.setAccessibleName(self.tr("Template"))
        self.edit.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._hint = muted_label(
            self, self.tr("Click a column to insert it at the cursor; it stands for each row's own text.")
        )
        self.trouble = warning_label(self)
        self.pictures = ComboBox(self, name=self.tr("Column of pictures"))
        self.pictures.setToolTip(
            self.tr("Its cells are paths of pictures, which begin in the file's folder, for a model that sees")
        )
        self.pictures.activated.connect(self._on_edited)
        self.system = ShortEdit(2, self)  # made after what stands above it, as Tab goes
        self.system.setAccessibleName(self.tr("System prompt"))
        self.system.setPlaceholderText(self.tr("System prompt: instructions for every row (optional)"))
        self.system.setTabChangesFocus(True)
        self.system.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self._blind = warning_label(self)
        column = Flow(self.pictures, parent=self)
        add_items(self.body, self._hint, self._chips, self.edit, self.trouble, column, self._blind, self.system)
        self.edit.textChanged.connect(self._on_edited)
        self.system.textChanged.connect(self.changed)

    def set_columns(
        self, columns: tuple[str, ...], suggestion: str, wordiest: str = "", image_column: str = ""
    ) -> None:
        """Sets the columns of another input; a template that still fits is kept.

        Args:
            wordiest: the column with the longest texts, for the example.
            image_column: the one that seems to have pictures.
        """
        if columns != self._columns or not self.pictures.count():
            self.pictures.clear()
            self.pictures.addItem(self.tr("Pictures: none"), "")
            for name in columns:
                short = name if len(name) <= 40 else f"{name[:39]}…"
                self.pictures.addItem(self.tr("Pictures: {0}").format(short), name)
            self.pictures.setCurrentIndex(max(self.pictures.findData(image_column), 0))
        self._columns = columns
        self._chips.clear()
        before: QWidget = self.edit.previousInFocusChain() or self.edit
        for name in columns:
            chip = push_button(
                self._chips,
                name if len(name) <= 40 else f"{name[:39]}…",
                lambda _=False, name=name: self.edit.insert_column(name),
                kind="chip",
                name=self.tr("Insert column {0}").format(name),
            )
            self._chips.add(chip)
            self.setTabOrder(before, chip)  # in visual order, whenever they were created
            before = chip
            chip.show()
        self._chips.updateGeometry()
        self.edit.set_columns(columns)
        example = wordiest or next(iter(columns), "text")
        self.edit.setPlaceholderText(self.tr("Summarise in one line: {0}").format(f"{{{{{example}}}}}"))
        if self._handed:
            # Its variables are columns; without any, the row's text follows.
            text, self._handed = self._handed, ""
            self.edit.setPlainText(text if "{{" in text else f"{text}\n\n{suggestion or f'{{{{{example}}}}}'}")
        elif not self.edit.toPlainText().strip() or self.problem():
            self.edit.setPlainText(suggestion or (self.tr("Describe the picture.") if image_column else ""))
        self._on_edited()

    def hand(self, template: str, system: str) -> None:
        self._handed = template
        self.system.setPlainText(system)

    _handed = ""

    @property
    def image_column(self) -> str:
        return str(self.pictures.currentData() or "")

    def show_blind(self, name: str) -> None:
        words = self.tr("{0} reads text only, so rows with pictures get no answer: choose a model that sees.")
        set_message(self._blind, words.format(name) if name and self.image_column else "")

    @property
    def template(self) -> str:
        return self.edit.toPlainText()

    @property
    def system_prompt(self) -> str:
        return self.system.toPlainText().strip()

    def problem(self) -> str:
        if not self.template.strip():
            return self.tr("Write a prompt that includes a column.")
        try:
            parse_template(self.template, self._columns, self.image_column)
        except EngineError as error:
            return error.message
        return ""

    def _on_edited(self) -> None:
        set_message(self.trouble, self.problem() if self.template.strip() else "")
        self.changed.emit()


_SHOWN_CHARACTERS = 400


class SampleCard(Card):
    """Signals: `wanted`, to answer the first rows; `stop_wanted`."""

    wanted = Signal()
    stop_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Try the first rows"), parent)
        self._running = False
        self._rows = SAMPLE_ROWS
        self.button = push_button(self, do=lambda: (self.stop_wanted if self._running else self.wanted).emit())
        self.head.addWidget(self.button)
        self._words = muted_label(self)
        self._trouble = warning_label(self)
        self._answers = vbox(gap=0)
        self._shown: list[_Answer] = []
        add_items(self.body, self._words, self._trouble, self._answers)
        self.clear()

    def clear(self) -> None:
        self._drop_answers()
        self._set_running(False)
        set_message(self._trouble, "")
        set_message(self._words, self.tr("See the answers, and how fast they come, before you start the job."))

    def set_rows(self, rows: int) -> None:
        self._rows = min(rows, SAMPLE_ROWS)
        self._set_running(self._running)

    def begin(self) -> None:
        self._drop_answers()
        self._set_running(True)
        set_message(self._trouble, "")
        set_message(self._words, self.tr("Answering…"))

    def add(self, rows: Sequence[BatchRow]) -> None:
        for row in rows:
            place = sum(other.row < row.row for other in self._shown)
            block = _Answer(row, self)
            self._shown.insert(place, block)
            self._answers.insertWidget(place, block)

    def end(self, sentence: str) -> None:
        self._set_running(False)
        set_message(self._words, sentence or (self.tr("Stopped.") if not self._shown else ""))

    def fail(self, sentence: str) -> None:
        self._set_running(False)
        set_message(self._words, "")
        set_message(self._trouble, sentence)

    def set_able(self, able: bool, why_not: str) -> None:
        self.button.setEnabled(able or self._running)
        self.button.setToolTip(why_not)

    @property
    def answers(self) -> int:
        return len(self._shown)

    def _set_running(self, running: bool) -> None:
        self._running = running
        words = {1: self.tr("Answer one row"), 2: self.tr("Answer two rows")}
        self.button.setText(self.tr("Stop") if running else words.get(self._rows, self.tr("Answer three rows")))
        self.button.setEnabled(True)

    def _drop_answers(self) -> None:
        for block in self._shown:
            self._answers.removeWidget(block)
            block.hide()
            block.deleteLater()
        self._shown.clear()


class _Answer(QWidget):
    def __init__(self, row: BatchRow, parent: QWidget) -> None:
        super().__init__(parent)
        self.row = row.row
        line = QFrame(self)
        line.setProperty("line", "true")
        column = vbox(line, 6, into=self, margins=(0, 4, 0, 6), gap=3)
        parts = [translate("Batch", "Row {0}").format(count(row.row + 1)), end_text(row)]
        if row.generated_tokens:
            parts.append(translate("Batch", "{0} tokens").format(count(row.generated_tokens)))
        self._text(column, SEPARATOR.join(parts), "caption")
        self._text(column, _short(row.prompt), "secondary")
        answer = translate("Batch", "The row {0}.").format(row.problem) if row.problem else _short(row.answer)
        self._text(column, answer or translate("Batch", "(an empty answer)"), "")

    def _text(self, column: QVBoxLayout, text: str, role: str) -> None:
        label = text_label(self, text, role=role, wrap=True)
        label.setTextInteractionFlags(label.textInteractionFlags().TextSelectableByMouse)
        label.setVisible(bool(text))
        column.addWidget(label)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


TEXT, CHOICES, SCHEMA = range(3)
_MOST_TOKENS = 1_000_000


class AnswerCard(Card):
    """Signals: `changed`, after every edit.

    Args:
        page: the widget that the popover opens over.
    """

    changed = Signal()

    def __init__(self, page: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Answers"), parent)
        self.sampling = SamplingParams()
        self._filling = False
        self.max_tokens = SpinBox(self)
        self.max_tokens.setRange(1, _MOST_TOKENS)
        self.max_tokens.setGroupSeparatorShown(True)
        self.temperature = DoubleSpinBox(self)
        self.temperature.setRange(0.0, 2.0)
        self.temperature.setSingleStep(0.1)
        self.temperature.setDecimals(2)
        for box in (self.max_tokens, self.temperature):
            box.lineEdit().setTextMargins(10, 0, 0, 0)
            box.setFixedWidth(112)
            box.valueChanged.connect(self._on_edited)
        self.popover = SamplingPopover(page)
        self.popover.without_beams()
        self.popover.changed.connect(self._on_sampling)
        self.more = push_button(self, self.tr("More sampling…"), lambda: self.popover.edit(self.sampling, self.more))
        line = Flow(
            self._label(self.tr("Max"), self.max_tokens),
            self.max_tokens,
            self._label(self.tr("tokens"), None),
            self._label(self.tr("Temperature"), self.temperature),
            self.temperature,
            self.more,
            parent=self,
        )
        self.max_tokens.setAccessibleName(self.tr("Max tokens per answer"))
        self._show_sampling()
        self._must_be = QWidget(self)
        self._lay_out_kinds()
        add_items(self.body, line, self._must_be)

    def _lay_out_kinds(self) -> None:
        grid = QGridLayout(self._must_be)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setVerticalSpacing(8)
        self.kinds = QButtonGroup(self)
        buttons: list[QWidget] = [self._label(self.tr("Answer must be"), None)]
        for number, name in enumerate((self.tr("Text"), self.tr("One of choices"), self.tr("JSON with a schema"))):
            button = push_button(self, name, kind="segment", checkable=True)
            self.kinds.addButton(button, number)
            buttons.append(button)
        line = Flow(*buttons, parent=self._must_be)
        self.kinds.button(TEXT).setChecked(True)
        self.kinds.idToggled.connect(lambda _number, on: self._show_kind() if on else None)
        self.choices = self._box(self.tr("Choices"), self.tr("One choice per line, such as\npositive\nnegative"))
        self.schema = self._box(
            self.tr("JSON schema"), '{"type": "object", "properties": {"topic": {"type": "string"}}}'
        )
        self.trouble = warning_label(self)
        grid.addWidget(line, 0, 0)
        for row, widget in enumerate((self.choices, self.schema, self.trouble), start=1):
            grid.addWidget(widget, row, 0)
        self._show_kind()

    # --- values ---

    def take(self, sampling: SamplingParams) -> None:
        self._on_sampling(replace(sampling, beams=1))

    def constraint(self) -> tuple[str, tuple[str, ...]]:
        kind = self.kinds.checkedId()
        if kind == SCHEMA:
            return self.schema.toPlainText().strip(), ()
        if kind == CHOICES:
            lines = (line.strip() for line in self.choices.toPlainText().splitlines())
            return "", tuple(dict.fromkeys(line for line in lines if line))
        return "", ()

    def problem(self) -> str:
        kind = self.kinds.checkedId()
        schema, choices = self.constraint()
        if kind == CHOICES and len(choices) < 2:
            return self.tr("Enter at least two choices, one per line.")
        if kind == SCHEMA:
            if not schema:
                return self.tr("Enter the JSON schema that answers must follow.")
            try:
                if not isinstance(parse_json(schema, deepest=DEEPEST), dict):
                    return self.tr("The schema is not a JSON object.")
            except ValueError as error:
                return self.tr("The schema is not JSON: {0}.").format(error)
        return ""

    def set_openai(self, openai: bool) -> None:
        """OpenAI requests bring their own constraints; these settings fill in what a request leaves out."""
        self._must_be.setVisible(not openai)
        self.set_heading(self.tr("Default answer settings") if openai else self.tr("Answers"))

    # --- inside ---

    def _show_kind(self) -> None:
        kind = self.kinds.checkedId()
        self.choices.setVisible(kind == CHOICES)
        self.schema.setVisible(kind == SCHEMA)
        self._on_edited()

    def _on_edited(self) -> None:
        if self._filling:
            return
        self.sampling = replace(
            self.sampling, max_tokens=self.max_tokens.value(), temperature=round(self.temperature.value(), 4)
        )
        empty = not any(self.constraint())
        set_message(self.trouble, "" if empty else self.problem())
        self.changed.emit()

    def _on_sampling(self, sampling: SamplingParams | None) -> None:
        self.sampling = sampling or self.popover.own
        self._show_sampling()
        self.changed.emit()

    def _show_sampling(self) -> None:
        self._filling = True
        self.max_tokens.setValue(self.sampling.max_tokens)
        self.temperature.setValue(self.sampling.temperature)
        self._filling = False

    def _box(self, name: str, example: str) -> QPlainTextEdit:
        box = ShortEdit(4, self)
        box.setAccessibleName(name)
        box.setPlaceholderText(example)
        box.setTabChangesFocus(True)
        box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        box.textChanged.connect(self._on_edited)
        return box

    def _label(self, text: str, buddy: QWidget | None) -> QLabel:
        label = text_label(self, text, role="secondary")
        if buddy is not None:
            label.setBuddy(buddy)
            buddy.setAccessibleName(text)
        return label
