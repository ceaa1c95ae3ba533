"""The composer: the input box with the chat's settings, the context meter, and Send or Stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import QEvent, QPoint, QSignalBlocker, QSize, Qt, Signal
from PySide6.QtGui import QFocusEvent, QKeyEvent, QKeySequence, QResizeEvent
from PySide6.QtWidgets import QFrame, QMenu, QPushButton, QSizePolicy, QWidget

from app.icons import IconButton, icon
from app.models.conversation import ContextUse
from app.services.chat_store import Attachment, Conversation
from app.services.kept import SavedPresets
from app.services.pictures import Thumbnails
from app.theme import set_look
from app.views.chat.attachment_row import AttachmentRow, PictureRow, Shelf
from app.views.chat.context_meter import ContextMeter
from app.widgets.fields import TextBox
from app.widgets.page import Popover
from app.widgets.sampling_popover import SamplingPopover
from app.widgets.scaffold import STRETCH, add_items, hbox, push_button, text_label, vbox
from engine.common.chat import Picture
from engine.common.model_info import ModelInfo

MOST_LINES = 10
LARGEST_SHARE = 0.25
"""Of the window's height: the chat and what is said about it stay in view."""


class GrowingEdit(TextBox):
    """Signals: `entered` (Enter without Shift), `focused` (True when it gains the focus), `slashed` (a slash was typed
    into the empty box, where that `opens_prompts`)."""

    entered = Signal()
    slashed = Signal()
    opens_prompts = False
    focused = Signal(bool)

    most_lines = MOST_LINES
    largest_share = LARGEST_SHARE

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("bare", True)
        self.setTabChangesFocus(True)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.document().setDocumentMargin(0)
        self.document().documentLayout().documentSizeChanged.connect(self.fit)
        self.fit()

    def event(self, event: QEvent) -> bool:
        # With nothing to undo here, Ctrl+Z goes to the page, which restores a deleted chat.
        if (
            event.type() == QEvent.Type.ShortcutOverride
            and isinstance(event, QKeyEvent)
            and event.matches(QKeySequence.StandardKey.Undo)
            and not self.document().isUndoAvailable()
        ):
            event.ignore()
            return False
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if enter and not event.modifiers() & (Qt.KeyboardModifier.ShiftModifier | Qt.KeyboardModifier.AltModifier):
            self.entered.emit()
            return
        if self.opens_prompts and event.text() == "/" and self.document().isEmpty():
            self.slashed.emit()
            return
        super().keyPressEvent(event)

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.focused.emit(True)

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.focused.emit(False)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self.fit()

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self.height())

    def fit(self) -> None:
        # QPlainTextDocumentLayout measures height in lines.
        lines, line = max(1, round(self.document().size().height())), self.fontMetrics().lineSpacing()
        most = max(2, min(self.most_lines, int(self.largest_share * self.window().height() / line)))
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if lines > most else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)
        # What is scrolled ends at the foot of a line.
        self.setFixedHeight(most * line if lines > most else lines * line + 4)


SPACING_PX = 8
TOOL_SPACING_PX = 2
LEAST_CHIP_PX = 60
_MOST_FITS = 4
"""In a row; more would be two sizes that lead to each other."""
BESIDE_CHIPS_SHARE = 0.15
"""Of the window's height, for the box below documents."""


class SystemPromptPopover(Popover):
    changed = Signal(str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(self.tr("System prompt"), parent)
        hint = text_label(
            self,
            self.tr("Instructions the model reads first, such as who it is and how to answer."),
            role="secondary",
            wrap=True,
        )
        self.text = TextBox(self)
        self.text.setPlaceholderText(self.tr("You are a helpful assistant that answers in one sentence."))
        self.text.setAccessibleName(self.tr("System prompt"))
        self.text.setTabChangesFocus(True)
        self.text.setMinimumSize(380, 130)
        self.text.textChanged.connect(lambda: self.changed.emit(self.text.toPlainText()))
        add_items(self.column, hint, self.text)

    def edit(self, system_prompt: str, button: QWidget) -> None:
        with QSignalBlocker(self.text):
            self.text.setPlainText(system_prompt)
        self.open_at(button)
        self.text.setFocus()


class Composer(QFrame):
    """Signals: `sent` (the text), `stopped`, `edited` (the text after every key), and each setting after an edit;
    `files_wanted` and `folder_wanted` (choose some), `given` (what was pasted or dropped and is no text),
    `picture_removed` (which), `attachment_removed` (its id) and `tools_wanted` (whether any are offered)."""

    sent = Signal(str)
    files_wanted = Signal()
    folder_wanted = Signal()
    attachment_removed = Signal(str)
    given = Signal(list)
    picture_removed = Signal(int)
    stopped = Signal()
    edited = Signal(str)
    system_prompt_changed = Signal(str)
    sampling_changed = Signal(object)
    tools_wanted = Signal(bool)

    def __init__(
        self,
        thumbnails: Thumbnails,
        share: Callable[[str], float | None],
        page: QWidget,
        presets: SavedPresets | None = None,
    ) -> None:
        """`page` is the widget that popovers open over."""
        super().__init__(page)
        self.setObjectName("composer")
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)  # beside the box, which then gets it
        self._conversation: Conversation | None = None
        self._answering = False
        self._is_fitting = self._must_fit = self._shows_tools_in_menu = False
        self.box = GrowingEdit(self)
        self.box.setPlaceholderText(self.tr("Message Switchyard…"))
        self.box.setAccessibleName(self.tr("Message"))
        self.box.setAccessibleDescription(self.tr("Enter sends, Shift+Enter starts a new line"))
        self.box.entered.connect(self._send)
        self.box.focused.connect(self._show_focus)
        self.box.textChanged.connect(self._on_text)
        self.box.takes_files = True
        self.box.given.connect(self.given)
        self.pictures = PictureRow(thumbnails, self, removable=True)
        self.pictures.removed.connect(self.picture_removed)
        self.attachments = AttachmentRow(self, share, removable=True)
        self.attachments.removed.connect(self.attachment_removed)
        self._shelves = (Shelf(self.attachments, self), Shelf(self.pictures, self))
        self._has_more = False
        self.attach_button = IconButton("attach", self.tr("Attach files or a folder"), self._choose, self)
        self.tools_button = IconButton("tools", "", self._toggle_tools, self)
        self.tools_button.setCheckable(True)
        self.system_button = self._chip(self.tr("System prompt"))
        self.system_button.clicked.connect(self.edit_system_prompt)
        self.sampling_button = self._chip("")
        self.sampling_button.clicked.connect(self.edit_sampling)
        for chip in (self.system_button, self.sampling_button):
            chip.setMinimumWidth(LEAST_CHIP_PX)  # of a page that is not shown, which keeps the list of chats beside it
        self.meter = ContextMeter(self)
        self.send_button = push_button(self, do=self._on_button)
        self.system_popover = SystemPromptPopover(page)
        self.system_popover.changed.connect(self.system_prompt_changed)
        self.sampling_popover = SamplingPopover(page, presets)
        self.sampling_popover.changed.connect(self.sampling_changed)
        if presets is not None:
            presets.changed.connect(self._on_presets)
        self._tools: list[IconButton] = [self.attach_button, self.tools_button]
        self._tool_row = hbox(self.attach_button, self.tools_button, gap=TOOL_SPACING_PX)
        self._row = row = hbox(
            self._tool_row,
            self.system_button,
            self.sampling_button,
            STRETCH,
            self.meter,
            self.send_button,
            gap=SPACING_PX,
        )
        self._column = vbox(*self._shelves, self.box, row, into=self, margins=(15, 13, 13, 12), gap=12)
        self.setFocusProxy(self.box)
        self._show_button()

    def add_tool(self, button: IconButton) -> None:
        self._tool_row.addWidget(button)
        self.setTabOrder(self._tools[-1], button)
        self._tools.append(button)

    @property
    def text(self) -> str:
        return self.box.toPlainText()

    def show_conversation(self, conversation: Conversation, *, with_draft: bool) -> None:
        """Show a chat's settings, and its draft if it has just been opened."""
        self._conversation = conversation
        self._name_system(is_short=False)
        unset = self.tr("Instructions the model reads first")
        self.system_button.setToolTip(conversation.system_prompt[:400] or unset)
        self._show_sampling(conversation)
        self._show_tools(offers=bool(conversation.tools))
        if with_draft:
            self.set_text(conversation.draft)

    def _show_tools(self, *, offers: bool) -> None:
        self.tools_button.setChecked(offers)
        words = self.tr("The model may call tools in this chat") if offers else self.tr("Let the model call tools")
        self.tools_button.setIcon(icon("tools", "accent" if offers else "muted"))
        self._fit_meter()
        self.tools_button.setToolTip(words)
        self.tools_button.setAccessibleName(words)

    def _toggle_tools(self) -> None:
        self._show_tools(offers=self.tools_button.isChecked())
        self.tools_wanted.emit(self.tools_button.isChecked())

    def set_model(self, model: ModelInfo | None) -> None:
        self.sampling_popover.set_model(model)
        if self._conversation is not None:
            self._show_sampling(self._conversation)

    def _on_presets(self) -> None:
        if self._conversation is not None:
            self._show_sampling(self._conversation)

    def _show_sampling(self, conversation: Conversation) -> None:
        preset = self.sampling_popover.name_of(conversation.sampling)
        self.sampling_button.setText(preset)
        self.sampling_button.setAccessibleName(self.tr("Sampling: {0}").format(preset))
        words = self.sampling_popover.words_of(conversation.sampling)
        self.sampling_button.setToolTip(self.tr("How the next token is chosen: {0}").format(words))
        self._fit_meter()

    def set_text(self, text: str) -> None:
        """Replace the text without emitting `edited`."""
        with QSignalBlocker(self.box):
            self.box.setPlainText(text)
        self.box.moveCursor(self.box.textCursor().MoveOperation.End)
        self._show_button()

    def show_attached(
        self,
        pictures: Sequence[Picture],
        attachments: Sequence[Attachment],
        where: str,
        captions: Sequence[str],
    ) -> None:
        """Shows what will be sent with the text, and the server that it goes to, if any."""
        self.pictures.show_pictures(pictures, captions)
        self.attachments.show_attachments(attachments, where)
        for shelf in self._shelves:
            shelf.fit()
        self.box.largest_share = LARGEST_SHARE if not attachments else BESIDE_CHIPS_SHARE
        self.box.fit()
        self._has_more = bool(pictures or attachments)
        self._show_button()

    def attach_menu(self) -> QMenu:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction(self.tr("Files…"), self.files_wanted.emit)
        menu.addAction(self.tr("Folder…"), self.folder_wanted.emit)
        menu.addSeparator()
        tools = menu.addAction(self.tr("Let the model call tools"))
        tools.setCheckable(True)
        tools.setChecked(self.tools_button.isChecked())
        tools.triggered.connect(self.tools_button.click)
        return menu

    def _choose(self) -> None:
        menu = self.attach_menu()
        menu.popup(self.attach_button.mapToGlobal(QPoint(0, -menu.sizeHint().height() - 4)))

    def set_answering(self, answering: bool) -> None:
        if answering != self._answering:
            self._answering = answering
            self._show_button()

    def show_use(self, use: ContextUse | None) -> None:
        self.meter.show_use(use)
        self._fit_meter()

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() in (QEvent.Type.Resize, QEvent.Type.LayoutRequest):  # or what is beside it has another size
            self._fit_meter()
        return handled

    def minimumSizeHint(self) -> QSize:
        hint = super().minimumSizeHint()
        spare = [tool for tool in (self._extra_tool, self.tools_button) if tool is not None and not tool.isHidden()]
        return QSize(hint.width() - sum(_width(tool) + TOOL_SPACING_PX for tool in spare), hint.height())

    @property
    def _extra_tool(self) -> IconButton | None:
        return self._tools[-2] if len(self._tools) > 3 else None

    def _fit_meter(self) -> None:
        """Fits what is in the row of buttons to its width.

        To show a widget lays out all that is around it, at once: the composer may become narrower meanwhile.
        """
        self._must_fit = True
        if self._is_fitting:
            return
        self._is_fitting = True
        comes_and_goes = [*self._tools, self.meter]
        before = [each.isHidden() for each in comes_and_goes]
        for _ in range(_MOST_FITS):
            if not self._must_fit:
                break
            self._must_fit = False
            self._fit_to_width()
        self._is_fitting = False
        if [each.isHidden() for each in comes_and_goes] != before:
            # The layout that gave it this size, if any, goes on with places from before it was all laid out again.
            self.updateGeometry()

    def _fit_to_width(self) -> None:
        margins = self._column.contentsMargins()
        buttons = (self.sampling_button, self.send_button)
        taken = sum(_width(button) + SPACING_PX for button in buttons) + 2 * SPACING_PX
        room = self.width() - margins.left() - margins.right() - taken
        metrics = self.system_button.fontMetrics()
        frame = self.system_button.sizeHint().width() - metrics.horizontalAdvance(self.system_button.text())
        all_tools = sum(_width(tool) + TOOL_SPACING_PX for tool in self._tools)
        extra = self._extra_tool
        fewer_tools = all_tools - (_width(extra) + TOOL_SPACING_PX if extra is not None else 0)
        # The switch for tools is in the menu of the button before it, too, which then shows whether it is on.
        fewest = fewer_tools - _width(self.tools_button) - TOOL_SPACING_PX
        left, is_short, tools = 0, False, all_tools
        for is_short, tools in ((False, all_tools), (True, all_tools), (True, fewer_tools), (True, fewest)):
            name = metrics.horizontalAdvance(self._system_name(is_short=is_short))
            left = room - tools - max(frame + name, LEAST_CHIP_PX)
            if left >= self.meter.least_width:
                break
        if extra is not None:
            extra.setVisible(tools == all_tools)
        self.tools_button.setVisible(tools >= fewer_tools)
        offers = self.tools_button.isChecked() and tools < fewer_tools
        if offers != self._shows_tools_in_menu:
            self._shows_tools_in_menu = offers
            self.attach_button.setIcon(icon("attach", "accent" if offers else "muted"))
        if self.system_button.text() != self._system_name(is_short=is_short):
            self._name_system(is_short=is_short)
        self.meter.fit(left)

    def _system_name(self, *, is_short: bool) -> str:
        is_set = self._conversation is not None and bool(self._conversation.system_prompt.strip())
        name = self.tr("System") if is_short else self.tr("System prompt")
        return f"{name} ✓" if is_set else name

    def _name_system(self, *, is_short: bool) -> None:
        self.system_button.setText(self._system_name(is_short=is_short))
        self.system_button.setAccessibleName(self._system_name(is_short=False))

    def edit_system_prompt(self) -> None:
        if self._conversation is not None:
            self.system_popover.edit(self._conversation.system_prompt, self.system_button)

    def edit_sampling(self) -> None:
        if self._conversation is not None:
            self.sampling_popover.edit(self._conversation.sampling, self.sampling_button)

    def _chip(self, text: str) -> QPushButton:
        button = push_button(self, text, kind="chip")
        button.setCursor(Qt.CursorShape.PointingHandCursor)
        return button

    def _send(self) -> None:
        if not self._answering and self._can_send:
            self.sent.emit(self.text)

    @property
    def _can_send(self) -> bool:
        return bool(self.text.strip()) or self._has_more

    def _on_button(self) -> None:
        if self._answering:
            self.stopped.emit()
        else:
            self._send()

    def _on_text(self) -> None:
        self._show_button()
        self.edited.emit(self.text)

    def _show_button(self) -> None:
        self.send_button.setText(self.tr("Stop  Esc") if self._answering else self.tr("Send"))
        self.send_button.setAccessibleName(self.tr("Stop the answer") if self._answering else self.tr("Send"))
        kind = "" if self._answering else "primary"
        set_look(self.send_button, "kind", kind)
        self.send_button.setEnabled(self._answering or self._can_send)
        self._fit_meter()

    def _show_focus(self, focused: bool) -> None:
        set_look(self, "active", "true" if focused else "false")


def _width(button: QPushButton | IconButton) -> int:
    return button.sizeHint().expandedTo(button.minimumSize()).width()
