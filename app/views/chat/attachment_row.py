"""What goes with messages: documents and pictures, above the box that one writes in too, and sources of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPixmap, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import (
    QDialog,
    QFrame,
    QLabel,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QTextEdit,
    QWidget,
)

from app.icons import SIDE_PX, IconButton, IconMark
from app.services.chat_store import Attachment, Source
from app.services.pictures import Thumbnail, Thumbnails, fitting, size_of
from app.theme import scaled, set_look, themed
from app.views.chat.phrases import attachment_text, source_place
from app.widgets.chip import ElidedLabel, small_font
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import LEFT, STRETCH, TOP, hbox, push_button, text_label, vbox
from engine.common.chat import Picture
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
        bar = self.text.verticalScrollBar()
        line = self.text.document().findBlock(self.text.textCursor().position())
        layout = line.layout()
        within = layout.lineForTextPosition(self.text.textCursor().positionInBlock()).lineNumber() if layout else 0
        bar.setValue(max(line.firstLineNumber() + within - 2, 0))


HEIGHT_PX, WIDEST_PICTURE_PX = 88, 176
CAPTION_PX = 12


class PictureRow(Flow):
    """Wraps into lines.

    Each takes its place at once, and is shown there when it is decoded.

    Args:
        removable: each has a button that takes it away.

    Signals: `removed`, with the number of a picture from 0; `resized`, when one takes another place than was expected.
    """

    removed = Signal(int)
    resized = Signal()

    def __init__(self, thumbnails: Thumbnails, parent: QWidget, *, removable: bool = False) -> None:
        super().__init__(parent=parent, gap=GAP_PX)
        self._thumbnails = thumbnails
        self._removable = removable
        self._pictures: tuple[Picture, ...] = ()
        self._captions: tuple[str, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.buttons: list[IconButton] = []
        self.hide()

    def show_pictures(self, pictures: Sequence[Picture], captions: Sequence[str] = ()) -> None:
        if tuple(pictures) == self._pictures and tuple(captions) == self._captions:
            return
        self._pictures, self._captions = tuple(pictures), tuple(captions)
        self.clear()
        self.buttons.clear()
        for number, picture in enumerate(self._pictures):
            self.add(self._framed(number, picture))
        self.setVisible(bool(self._pictures))
        self._lines.invalidate()
        self.updateGeometry()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def _framed(self, number: int, picture: Picture) -> QWidget:
        shown = self._place_of(number, picture)
        if not self._removable:
            return shown
        frame = QWidget(self)
        name = self.tr("Remove picture {0}").format(number + 1)
        button = IconButton("close", name, lambda: self.removed.emit(number), frame)
        hbox(shown, (button, TOP), into=frame, gap=2)
        self.buttons.append(button)
        caption = self._captions[number] if number < len(self._captions) else ""
        if not caption:
            return frame
        column = QWidget(self)
        words = text_label(column, caption, role="secondary")
        words.setFont(small_font(words.font(), CAPTION_PX))
        column.setMinimumHeight(scaled(HEIGHT_PX) + 2 + words.sizeHint().height())  # so that captions are on one line
        # A gap on the right, so that one caption ends before the next begins.
        vbox(STRETCH, (frame, LEFT), (words, LEFT), into=column, gap=2, margins=(0, 0, GAP_PX, 0))
        shown.setAccessibleDescription(caption)
        return column

    def _place_of(self, number: int, picture: Picture) -> QLabel:
        ratio = self.devicePixelRatioF()
        most = QSize(scaled(WIDEST_PICTURE_PX), scaled(HEIGHT_PX)) * ratio
        place = text_label(self)
        place.setProperty("picture", "awaited")
        pixels = size_of(picture)
        self._name(place, number, pixels)
        expected = fitting(pixels, most) if pixels.isValid() else QSize(most.height(), most.height())
        place.setFixedSize(_in_window(expected, ratio))
        known = self._thumbnails.ask(picture, most, place, lambda made: self._show_in(place, number, made, ratio))
        if known is not None:
            self._show_in(place, number, known, ratio)
        return place

    def _show_in(self, place: QLabel, number: int, made: Thumbnail, ratio: float) -> None:
        if made.image.isNull():
            place.setText(self.tr("damaged picture"))
            size = place.sizeHint()
        else:
            image = QPixmap.fromImage(made.image)
            image.setDevicePixelRatio(ratio)
            place.setPixmap(image)
            size = _in_window(made.image.size(), ratio)
        set_look(place, "picture", "shown")
        self._name(place, number, made.pixels)
        if size != place.size():
            place.setFixedSize(size)
            self._lines.invalidate()
            self.updateGeometry()
            self.resized.emit()

    def _name(self, place: QLabel, number: int, pixels: QSize) -> None:
        words = self.tr("Picture {0} of {1}").format(number + 1, len(self._pictures))
        if pixels.isValid():
            words = self.tr("{0}, {1} by {2} pixels").format(words, pixels.width(), pixels.height())
        place.setAccessibleName(words)
        place.setToolTip(words)


def _in_window(size: QSize, ratio: float) -> QSize:
    return QSize(math.ceil(size.width() / ratio), math.ceil(size.height() / ratio))


WIDEST_PX, LEAST_PX = 300, 150
GAP_PX = 8
LARGEST_SHARE, LEAST_HEIGHT_PX = 0.27, 44
"""Of the window's height that they may take above the box."""
ICON_PX, ABOVE_PX = 18, 6
BESIDE_PX = 10 + ICON_PX + GAP_PX + 8 + 2
"""The icon, margins and frame."""


class AttachmentRow(Flow):
    """Wraps into lines.

    Args:
        share: how much of one has been read; None if it is not being read.
        removable: each has a button that takes it away, and so does Delete on it.

    Signals: `removed`, with the id of one; `opened`, with one.
    """

    removed = Signal(str)
    opened = Signal(object)

    def __init__(
        self, parent: QWidget, share: Callable[[str], float | None] = lambda _id: None, *, removable: bool = False
    ) -> None:
        super().__init__(parent=parent, gap=GAP_PX)
        self._share, self._removable = share, removable
        self._where = ""
        self.chips: list[AttachmentChip] = []
        self.hide()

    def show_attachments(self, attachments: Sequence[Attachment], where: str = "") -> None:
        """Shows these instead; hidden without any.

        Args:
            where: the server that they go to; empty if they stay on this PC.
        """
        self._where = where
        if [chip.attachment.id for chip in self.chips] != [one.id for one in attachments]:
            self._make(attachments)
        for chip, one in zip(self.chips, attachments, strict=True):
            chip.show_attachment(one, self._share(one.id), where)
        self.setVisible(bool(attachments))
        self._lines.invalidate()
        self.updateGeometry()

    def update_one(self, attachment_id: str) -> None:
        for chip in self.chips:
            if chip.attachment.id == attachment_id:
                chip.show_attachment(chip.attachment, self._share(attachment_id), self._where)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def _make(self, attachments: Sequence[Attachment]) -> None:
        self.clear()
        self.chips = [AttachmentChip(one, self, removable=self._removable) for one in attachments]
        for chip in self.chips:
            chip.removed.connect(self.removed)
            chip.opened.connect(self.opened)
            self.add(chip)
            chip.show()


class Shelf(QScrollArea):
    """A row that scrolls where it would take too much of the window."""

    def __init__(self, row: Flow, parent: QWidget) -> None:
        super().__init__(parent)
        self._row = row
        self.setProperty("bare", True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setWidget(row)
        self.viewport().setAutoFillBackground(False)
        row.setAutoFillBackground(False)
        self.fit()

    def fit(self) -> None:
        self.setVisible(not self._row.is_empty)
        self.updateGeometry()

    def heightForWidth(self, width: int) -> int:
        return min(self._row.heightForWidth(width), self._most)

    def hasHeightForWidth(self) -> bool:
        return True

    def sizeHint(self) -> QSize:
        hint = self._row.sizeHint()
        return QSize(hint.width(), min(hint.height(), self._most))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, LEAST_HEIGHT_PX // 2)

    @property
    def _most(self) -> int:
        return max(int(LARGEST_SHARE * self.window().height()), scaled(LEAST_HEIGHT_PX))


class AttachmentChip(QFrame):
    """A name, and below it pages and tokens, how much has been read, or in a sentence why it cannot be."""

    removed = Signal(str)
    opened = Signal(object)

    def __init__(self, attachment: Attachment, parent: QWidget, *, removable: bool) -> None:
        super().__init__(parent)
        self.attachment = attachment
        self._removable = removable
        self.setProperty("attachment", "sound")
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        icon = "folder" if attachment.kind == "folder" else "document"
        self._mark = IconMark(icon, "muted", ICON_PX, self)
        self._warning = IconMark("warning", "danger", ICON_PX, self)
        self._name = ElidedLabel(self)
        self._details = text_label(self, role="caption", wrap=True)
        row = hbox(
            self._mark,
            self._warning,
            (vbox(self._name, self._details, gap=0), 1),
            into=self,
            margins=(10, ABOVE_PX, 8, ABOVE_PX),
        )
        self.button: IconButton | None = None
        if removable:
            name = self.tr("Remove {0}").format(attachment.name)
            self.button = IconButton("close", name, lambda: self.removed.emit(self.attachment.id), self)
            row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignTop)
        else:
            self.setCursor(Qt.CursorShape.PointingHandCursor)

    def show_attachment(self, attachment: Attachment, share: float | None, where: str) -> None:
        self.attachment = attachment
        details = attachment_text(attachment, share, where)
        fails = bool(attachment.problem) and share is None
        self._name.set_full_text(attachment.name)
        self._details.setText(details)
        self._mark.setVisible(not fails)
        self._warning.setVisible(fails)
        set_look(self, "attachment", "failed" if fails else "sound")
        self.setAccessibleName(f"{attachment.name}: {details}")
        self.setToolTip("\n".join(filter(None, (attachment.path or attachment.name, details, attachment.remark))))
        self.updateGeometry()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self._removable and event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.removed.emit(self.attachment.id)
        elif not self._removable and event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self.opened.emit(self.attachment)
        else:
            super().keyPressEvent(event)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if not self._removable and self.rect().contains(event.position().toPoint()):
            self.opened.emit(self.attachment)
        else:
            super().mouseReleaseEvent(event)

    def sizeHint(self) -> QSize:
        for label in (self._name, self._details):
            label.ensurePolished()
        words = self._details.fontMetrics().horizontalAdvance(self._details.text()) + 4
        wanted = max(self._name.sizeHint().width(), words) + self._beside
        width = min(max(wanted, scaled(LEAST_PX)), scaled(WIDEST_PX))
        return QSize(width, self.heightForWidth(width))

    def minimumSizeHint(self) -> QSize:
        return QSize(scaled(LEAST_PX) // 2, 0)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        self._details.ensurePolished()
        metrics = self._details.fontMetrics()
        room = max(width - self._beside, 20)
        lines = metrics.boundingRect(0, 0, room, 10_000, Qt.TextFlag.TextWordWrap, self._details.text()).height()
        return self._name.sizeHint().height() + max(lines, metrics.lineSpacing()) + 2 * ABOVE_PX + 2

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.StyleChange, QEvent.Type.FontChange):
            self.updateGeometry()

    @property
    def _beside(self) -> int:
        return BESIDE_PX + (SIDE_PX + GAP_PX if self._removable else 0)
