"""The prompt for each row: the template with its columns, and the system prompt."""

from __future__ import annotations

import re

from PySide6.QtCore import QEvent, QSignalBlocker, QSize, Signal
from PySide6.QtGui import QFont, QSyntaxHighlighter, QTextCharFormat, QTextDocument
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import themed
from app.widgets.fields import ComboBox
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import Card, add_items, muted_label, push_button, set_message, warning_label
from app.widgets.text_box import TextBox
from engine.batch_files.prompts import parse_template
from engine.common.errors import EngineError

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
