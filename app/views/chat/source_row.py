"""The numbered sources under an answer, and the passage that one of them opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QDialog, QPlainTextEdit, QPushButton, QTextEdit, QWidget

from app.services.chat_store import Source
from app.theme import themed
from app.views.chat.phrases import source_place
from app.widgets.chip import ElidedLabel
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import STRETCH, hbox, push_button, text_label, vbox
from engine.common.plain_text import few_marks

_MOST_NAME = 34
_MARKED_ALPHA = 56


class SourceRow(QWidget):
    """Signals: `opened`, with a `Source`."""

    opened = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._shown: tuple[Source, ...] = ()
        self._title = text_label(self, self.tr("Sources"), role="secondary")
        self._flow = Flow(parent=self, gap=6)
        self.buttons: list[QPushButton] = []
        vbox(self._title, self._flow, into=self, margins=(0, 2, 0, 2), gap=5)
        self.hide()

    def show_sources(self, sources: Sequence[Source]) -> None:
        if tuple(sources) == self._shown:
            return
        self._shown = tuple(sources)
        self._flow.clear()
        self.buttons = [self._button(source) for source in sources]
        for button in self.buttons:
            self._flow.add(button)
        self.setVisible(bool(sources))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def _button(self, source: Source) -> QPushButton:
        name = few_marks(source.name.rsplit("/", 1)[-1])
        short = name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 10]}…{name[-9:]}"
        page = self.tr(" p. {0}").format(source.page) if source.page else ""
        button = push_button(
            self._flow,
            f"[{source.number}] {short}{page}".replace("&", "&&"),
            lambda: self.opened.emit(source),
            kind="chip",
        )
        button.setCursor(Qt.CursorShape.PointingHandCursor)
        words = source_words(source)
        button.setToolTip(words)
        button.setAccessibleName(self.tr("Source {0}: {1}").format(source.number, words))
        return button


def source_words(source: Source) -> str:
    return f"{source.name}, {source_place(source)}".rstrip(", ")


Surroundings = Callable[[Source, Callable[[tuple[str, str, str]], object]], object]


class PassageDialog(QDialog):
    """A source's text, marked, amid what stands around it in its document."""

    def __init__(self, source: Source, surroundings: Surroundings, parent: QWidget) -> None:
        super().__init__(parent)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Source {0}").format(source.number) if source.number else self.tr("Document"))
        name = ElidedLabel(self, role="heading")
        name.set_full_text(source.name)
        place = text_label(self, few_marks(source_place(source)))
        place.setTextFormat(Qt.TextFormat.PlainText)
        place.setProperty("role", "secondary")
        place.setWordWrap(True)
        place.setVisible(bool(place.text()))
        self.text = QPlainTextEdit(self)
        self.text.setReadOnly(True)
        self.text.setAccessibleName(self.tr("The passage and what stands around it"))
        self.text.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self.text.setPlaceholderText(self.tr("Looking for the passage…"))
        close = push_button(self, self.tr("Close"), self.accept)
        close.setDefault(True)
        vbox(name, place, (self.text, 1), hbox(STRETCH, close, gap=-1), into=self, margins=(20, 18, 20, 16))
        room = parent.window().size()
        self.resize(min(720, room.width() - 80), min(560, room.height() - 80))
        self._is_there = True
        self.finished.connect(self._leave)
        surroundings(source, self._show)

    def _leave(self) -> None:
        self._is_there = False

    def _show(self, found: tuple[str, str, str]) -> None:
        if not self._is_there:
            return
        before, text, after = map(few_marks, found)
        if not text:
            self.text.setPlaceholderText(
                self.tr("This passage is no longer there: the document has changed or was removed since.")
            )
            return
        self.text.setPlainText(f"{before}{text}{after}")
        cursor = self.text.textCursor()
        cursor.setPosition(len(before.encode("utf-16-le")) // 2)
        begin = QTextCursor(cursor)
        cursor.setPosition(len(f"{before}{text}".encode("utf-16-le")) // 2, QTextCursor.MoveMode.KeepAnchor)
        marked = QTextEdit.ExtraSelection()
        look = QTextCharFormat()
        colour = QColor(themed("accent"))
        colour.setAlpha(_MARKED_ALPHA)
        look.setBackground(colour)
        marked.format = look
        marked.cursor = cursor
        if before or after:
            self.text.setExtraSelections([marked])
        self.text.setTextCursor(begin)
        QTimer.singleShot(0, self.text, self._scroll)

    def _scroll(self) -> None:
        """The passage begins a few lines below the top."""
        bar = self.text.verticalScrollBar()
        line = self.text.document().findBlock(self.text.textCursor().position())
        layout = line.layout()
        within = layout.lineForTextPosition(self.text.textCursor().positionInBlock()).lineNumber() if layout else 0
        bar.setValue(max(line.firstLineNumber() + within - 2, 0))
