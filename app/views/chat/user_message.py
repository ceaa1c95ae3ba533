"""A user's message: a bubble on the right, which turns into an editor."""

from __future__ import annotations

import html
import re

from PySide6.QtCore import QEvent, QRect, QSize, Qt, Signal
from PySide6.QtGui import QFontMetrics, QGuiApplication, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QFrame, QWidget

from app.icons import IconButton
from app.models.conversation import MessageRow
from app.services.pictures import Thumbnails
from app.theme import scaled
from app.views.chat.attachment_row import AttachmentRow, PictureRow
from app.views.chat.composer import GrowingEdit
from app.views.chat.thought import VersionSwitch
from app.widgets.answer_text.style import MOST_MATCHES, mark_format
from app.widgets.scaffold import STRETCH, hbox, push_button, text_label, vbox
from engine.common.plain_text import few_marks

BUBBLE_PX = 540
PADDING = QSize(16, 9)
LINE_HEIGHT = 140
BESIDE_PX = 177
"""Space kept beside a bubble for its actions."""
EDIT_BESIDE_PX = 12


class UserMessage(QWidget):
    """Signals: `resent` (the edited text), `edited` (the same, not to be sent), `rows_wanted` (its text), `deleted`,
    `version_stepped` (-1 or 1)."""

    resent = Signal(str)
    edited = Signal(str)
    rows_wanted = Signal(str)
    deleted = Signal()
    version_stepped = Signal(int)

    def __init__(self, row: MessageRow, thumbnails: Thumbnails, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._row = row
        self.editor: GrowingEdit | None = None
        self._matches: list[tuple[int, int]] = []
        """Where what is looked for stands, and which of these is shown."""
        self._match: int | None = None
        self._bubble = QFrame(self)
        self._bubble.setProperty("bubble", True)
        self._text = text_label(self._bubble)
        self._text.setTextFormat(Qt.TextFormat.RichText)
        self._text.setWordWrap(True)
        self._text.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        self._inside = vbox(
            into=self._bubble, margins=(PADDING.width(), PADDING.height(), PADDING.width(), PADDING.height())
        )
        self._pictures = PictureRow(thumbnails, self._bubble)
        self._pictures.resized.connect(self._fit)
        self.attachments = AttachmentRow(self._bubble)
        self._inside.addWidget(self.attachments)
        self._inside.addWidget(self._pictures)
        self._inside.addWidget(self._text)
        self._versions = VersionSwitch(self)
        self._versions.step.connect(self.version_stepped)
        copy = IconButton("copy", self.tr("Copy"), self._copy, self)
        edit = IconButton("edit", self.tr("Edit the message"), self.start_editing, self)
        rows = IconButton("rows", self.tr("Ask this of every row of a file"), self._to_rows, self)
        delete = IconButton("trash", self.tr("Delete this message"), self.deleted.emit, self)
        self._buttons = (copy, edit, rows, delete)
        row_layout = hbox(STRETCH, into=self, gap=2)
        for button in self._buttons:
            button.is_shy = True
        for widget in (*self._buttons, self._versions):
            row_layout.addWidget(widget, 0, Qt.AlignmentFlag.AlignBottom)
        row_layout.addSpacing(6)
        row_layout.addWidget(self._bubble)
        self.setAttribute(Qt.WidgetAttribute.WA_Hover)
        self.set_row(row)

    @property
    def message_id(self) -> str:
        return self._row.message.id

    def set_row(self, row: MessageRow) -> None:
        if row.message.content != self._row.message.content:
            self._matches, self._match = [], None
        self._row = row
        self._show_text()
        self._text.setAccessibleName(self.tr("You: {0}").format(row.message.content))
        self._pictures.show_pictures(row.message.pictures)
        self.attachments.show_attachments(row.message.attachments)
        self._text.setVisible(self.editor is None and self._has_text)
        self._versions.show_version(row.version, row.versions)
        self._fit()

    def find_text(self, text: str) -> int:
        content = few_marks(self._row.message.content)
        found = re.finditer(re.escape(text), content, re.IGNORECASE) if text else ()
        matches = [match.span() for match in found][:MOST_MATCHES]
        if matches or self._matches:
            self._matches, self._match = matches, None
            self._show_text()
        return len(matches)

    def show_match(self, number: int | None) -> QRect:
        if number != self._match:
            self._match = number
            self._show_text()
        box = QRect(self._text.mapTo(self, self._text.rect().topLeft()), self._text.size())
        if number is not None and number < len(self._matches):  # about where it is in a long message
            share = self._matches[number][0] / max(len(self._row.message.content), 1)
            line = self._text.fontMetrics().lineSpacing()
            box = QRect(box.x(), box.y() + int(share * max(box.height() - line, 0)), box.width(), line)
        return box

    def _show_text(self) -> None:
        content, at, parts = few_marks(self._row.message.content), 0, []
        for number, (start, end) in enumerate(self._matches):
            look = mark_format(is_chosen=number == self._match)
            style = f"background: {look.background().color().name()}; color: {look.foreground().color().name()}"
            under = "; text-decoration: underline" if look.fontUnderline() else ""
            marked = f'<span style="{style}{under}">{html.escape(content[start:end])}</span>'
            parts += [html.escape(content[at:start]), marked]
            at = end
        text = "".join([*parts, html.escape(content[at:])])
        self._text.setText(f'<div style="white-space: pre-wrap; line-height: {LINE_HEIGHT}%">{text}</div>')

    def start_editing(self) -> None:
        if self.editor is not None:
            return
        self._text.hide()
        editor = self.editor = GrowingEdit(self._bubble)
        editor.setAccessibleName(self.tr("Edit message"))
        editor.setPlainText(self._row.message.content)
        editor.selectAll()
        editor.entered.connect(self._resend)
        editor.installEventFilter(self)
        self._inside.addWidget(editor)
        self._actions = QWidget(self._bubble)
        cancel = push_button(self._actions, self.tr("Cancel"), self.stop_editing, kind="quiet")
        save = push_button(
            self._actions, self.tr("Save"), self._save, tip=self.tr("Changes the message; the answers after it stay.")
        )
        send = push_button(self._actions, self.tr("Send as new version"), self._resend)
        hbox(STRETCH, cancel, save, send, into=self._actions, margins=(0, 6, 0, 0), gap=-1)
        self._inside.addWidget(self._actions)
        for button in self._buttons:
            button.hide()
        self._fit()
        editor.setFocus()

    def stop_editing(self) -> None:
        if self.editor is not None:
            self.editor.deleteLater()
            self.editor = None
            self._actions.deleteLater()
            self._text.setVisible(self._has_text)
            for button in self._buttons:
                button.show()
            self._fit()

    def eventFilter(self, _watched: object, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape:
            if event.type() == QEvent.Type.ShortcutOverride:
                event.accept()
                return True
            if event.type() == QEvent.Type.KeyPress:
                self.stop_editing()
                return True
        return False

    def minimumSizeHint(self) -> QSize:
        # The bubble has a fixed width, but the window may become narrower; the bubble then follows.
        return QSize(0, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def event(self, event: QEvent) -> bool:
        if event.type() in (QEvent.Type.HoverEnter, QEvent.Type.HoverLeave):
            for button in self._buttons:
                button.update()
        return super().event(event)

    def _resend(self) -> None:
        if self.editor is not None:
            text = self.editor.toPlainText()
            if text.strip() or self._row.message.pictures or self._row.message.attachments:
                self.stop_editing()
                self.resent.emit(text)

    @property
    def _has_text(self) -> bool:
        message = self._row.message
        return bool(message.content) or not (message.pictures or message.attachments)

    def _save(self) -> None:
        if self.editor is not None:
            text = self.editor.toPlainText()
            self.stop_editing()
            self.edited.emit(text)

    def _to_rows(self) -> None:
        self.rows_wanted.emit(self._row.message.content)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self._row.message.content)

    def _fit(self) -> None:
        widest = scaled(BUBBLE_PX)
        if self.editor is not None:
            width = min(widest, max(self.width() - EDIT_BESIDE_PX, 120))
            self._bubble.setFixedWidth(width)
            self._fit_pictures(width - 2 * PADDING.width())
            return
        most = min(widest, max(self.width() - BESIDE_PX, 120))
        metrics = QFontMetrics(self._text.font())
        # Qt puts a line's extra height below its text: move half of it above.
        lift = round(metrics.height() * (LINE_HEIGHT - 100) / 200)
        self._inside.setContentsMargins(
            PADDING.width(), PADDING.height() + lift, PADDING.width(), PADDING.height() - lift
        )
        room = most - 2 * PADDING.width()
        longest = max(
            (metrics.horizontalAdvance(line[:2000]) for line in self._row.message.content.split("\n")), default=0
        )
        width = max(min(longest + 3, room), self._pictures.widest(room), self.attachments.widest(room))
        self._fit_pictures(width)
        self._bubble.setFixedWidth(width + 2 * PADDING.width())
        self._text.setMinimumHeight(0)  # or the minimum would bound heightForWidth from below
        self._text.setFixedHeight(max(self._text.heightForWidth(width), metrics.lineSpacing()))

    def _fit_pictures(self, width: int) -> None:
        for row in (self._pictures, self.attachments):
            if not row.isHidden():
                row.setFixedHeight(row.heightForWidth(width))
