"""Saved prompts: found by typing, filled in where they have variables, kept, changed and removed; their button."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QFormLayout,
    QHBoxLayout,
    QListWidget,
    QListWidgetItem,
    QMenu,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from app.icons import IconButton, icon
from app.services.kept import Named, SavedPrompts, fill, name_for, variables
from app.theme import scaled
from app.views.chat.composer import Composer
from app.views.chat.presenter import ChatPresenter
from app.widgets.fields import TextBox
from app.widgets.page import BatchDraft, Popover, note_keys
from app.widgets.scaffold import WrappedLabel, add_items, hbox, line_edit, push_button, text_label, vbox

WIDTH_PX = 440
MOST_ROWS = 6
_PREVIEW_CHARACTERS = 240


class PromptPopover(Popover):
    """One of three: the list, the form for a prompt's variables, or the editor.

    Signals:
        chosen: a text for the message.
        typed: what was typed to find a prompt and is to be a message after all.
    """

    chosen = Signal(str)
    typed = Signal(str)

    _by_slash = False

    def __init__(self, prompts: SavedPrompts, page: QWidget) -> None:
        super().__init__(self.tr("Saved prompts"), page)
        self._prompts = prompts
        self._message = ""
        self._editing = ""
        self._filling: Named[str] | None = None
        self._removed: Named[str] | None = None
        self.least_width = scaled(WIDTH_PX)
        self._make_list()
        self._make_form()
        self._make_editor()
        add_items(self.column, self._list_part, self._form_part, self._edit_part)
        prompts.changed.connect(self._show_found)
        self._show(self._list_part)

    # --- opening ---

    def open_list(self, button: QWidget, message: str, *, by_slash: bool = False) -> None:
        self._message, self._by_slash, self._removed = message, by_slash, None
        self.save_button.setEnabled(bool(message.strip()))
        self.filter.clear()
        self._show_found()
        self._show(self._list_part)
        self.open_at(button)
        self.filter.setFocus()

    def open_editor(self, button: QWidget, text: str, name: str = "") -> None:
        self._by_slash = False
        self._editing = name
        self.name.setText(name or name_for(text))
        self.text.setPlainText(text)
        self._show(self._edit_part)
        if not self.isVisible():
            self.open_at(button)
        self.name.setFocus()
        self.name.selectAll()

    def hideEvent(self, event: QEvent) -> None:
        super().hideEvent(event)
        if self._by_slash:
            self._by_slash = False
            if self.filter.text():  # it began with a slash, and was no name of a prompt
                self.typed.emit(f"/{self.filter.text()}")

    # --- the list ---

    def _make_list(self) -> None:
        self._list_part, column = self._part()
        self.filter = line_edit(self, self.tr("Find a prompt"), clears=True, hints=True)
        self.filter.textChanged.connect(self._show_found)
        self.filter.installEventFilter(self)
        self.list = QListWidget(self)
        self.list.setAccessibleName(self.tr("Saved prompts"))
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list.currentItemChanged.connect(self._show_preview)
        self.list.itemActivated.connect(self._choose)
        self.list.itemClicked.connect(self._choose)
        note_keys(self.list, ((self.tr("/"), self.tr("Saved prompts, in an empty message")),))
        self.preview = WrappedLabel("", self, role="secondary")
        self.save_button = self._action(self.tr("Save this message…"), self._save_message)
        self.new_button = self._action(self.tr("New…"), lambda: self.open_editor(self, ""))
        self.edit_button = self._action(self.tr("Edit…"), self._edit)
        self.remove_button = self._action(self.tr("Delete"), self._remove)
        self.undo_button = self._action(self.tr("Undo"), self._undo)
        add_items(
            column,
            self.filter,
            self.list,
            self.preview,
            _row(self.save_button, self.new_button, None, self.undo_button, self.edit_button, self.remove_button),
        )

    def _show_found(self) -> None:
        current = self._current
        words = self.filter.text().casefold().split()
        found = [
            entry
            for entry in self._prompts.entries
            if all(word in f"{entry.name}\n{entry.value}".casefold() for word in words)
        ]
        self.list.clear()
        for entry in found:
            item = QListWidgetItem(entry.name, self.list)
            item.setData(Qt.ItemDataRole.UserRole, entry.name)
        again = next((n for n, entry in enumerate(found) if current is not None and entry.name == current.name), 0)
        self.list.setCurrentRow(again if found else -1)
        rows = max(1, min(len(found), MOST_ROWS))
        self.list.setFixedHeight(rows * max(self.list.sizeHintForRow(0), 32) + 8)
        self.list.setVisible(bool(found))
        self._show_preview()

    @property
    def _current(self) -> Named[str] | None:
        item = self.list.currentItem()
        return None if item is None else self._prompts.find(item.data(Qt.ItemDataRole.UserRole))

    def _show_preview(self) -> None:
        entry = self._current
        if entry is not None:
            text = " ".join(entry.value.split())
            words = text if len(text) <= _PREVIEW_CHARACTERS else f"{text[: _PREVIEW_CHARACTERS - 1]}…"
        elif self._prompts.entries:
            words = self.tr("No saved prompt has these words.")
        else:
            words = self.tr(
                "Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are "
                "asked for the topic each time."
            )
        self.preview.setText(words)
        for button in (self.edit_button, self.remove_button):
            button.setVisible(entry is not None)
        self.undo_button.setVisible(self._removed is not None)

    def _choose(self, item: QListWidgetItem | None = None) -> None:
        entry = self._current if item is None else self._prompts.find(item.data(Qt.ItemDataRole.UserRole))
        if entry is None:
            return
        if variables(entry.value):
            self._open_form(entry)
        else:
            self._give(entry.value)

    def _give(self, text: str) -> None:
        self._by_slash = False
        self.hide()
        self.chosen.emit(text)

    def _save_message(self) -> None:
        self.open_editor(self, self._message)

    def _edit(self) -> None:
        entry = self._current
        if entry is not None:
            self.open_editor(self, entry.value, entry.name)

    def _remove(self) -> None:
        entry = self._current
        if entry is not None:
            self._removed = entry
            self._prompts.remove(entry.name)
            self.undo_button.setFocus()

    def _undo(self) -> None:
        removed, self._removed = self._removed, None
        if removed is not None:
            self._prompts.put(removed.name, removed.value)
            self.filter.setFocus()

    # --- variables ---

    def _make_form(self) -> None:
        self._form_part, column = self._part()
        self._form_name = text_label(self, tone="head", wrap=True)
        self._fields_holder = QWidget(self)
        self.fields: dict[str, TextBox] = {}
        self.insert_button = self._action(self.tr("Insert"), self._insert, kind="primary")
        back = self._action(self.tr("Back"), self._back)
        add_items(column, self._form_name, self._fields_holder, _row(None, back, self.insert_button))

    def _open_form(self, entry: Named[str]) -> None:
        self._filling, self._by_slash = entry, False
        self._form_name.setText(entry.name)
        old, self._fields_holder = self._fields_holder, QWidget(self)
        form = QFormLayout(self._fields_holder)
        form.setContentsMargins(0, 0, 0, 0)
        form.setRowWrapPolicy(QFormLayout.RowWrapPolicy.WrapAllRows)
        self.fields = {}
        for name in variables(entry.value):
            field = TextBox(self._fields_holder)
            field.setTabChangesFocus(True)
            field.setAccessibleName(name)
            field.setFixedHeight(2 * field.fontMetrics().lineSpacing() + 20)
            field.installEventFilter(self)
            label = text_label(self._fields_holder, name, role="secondary")
            form.addRow(label, field)
            self.fields[name] = field
        layout = self._form_part.layout()
        assert layout is not None
        layout.replaceWidget(old, self._fields_holder)
        old.deleteLater()
        old.hide()
        order: list[QWidget] = [self.list, *self.fields.values(), self.insert_button]
        for before, after in pairwise(order):
            self.setTabOrder(before, after)
        self._show(self._form_part)
        next(iter(self.fields.values())).setFocus()

    def _insert(self) -> None:
        if self._filling is not None:
            given = {name: field.toPlainText() for name, field in self.fields.items() if field.toPlainText()}
            self._give(fill(self._filling.value, given))

    def _back(self) -> None:
        self._show_found()
        self._show(self._list_part)
        self.filter.setFocus()

    # --- the editor ---

    def _make_editor(self) -> None:
        self._edit_part, column = self._part()
        self.name = line_edit(self, self.tr("Name of the prompt"), hint=self.tr("Name"))
        self.text = TextBox(self)
        self.text.setAccessibleName(self.tr("Prompt"))
        self.text.setTabChangesFocus(True)
        self.text.setMinimumHeight(8 * self.text.fontMetrics().lineSpacing())
        self.text.setPlaceholderText(self.tr("Summarise {{text}} in {{number}} sentences."))
        hint = WrappedLabel(
            self.tr("A name between double braces, such as {{topic}}, is asked for each time."), self, role="secondary"
        )
        self.keep_button = self._action(self.tr("Save"), self._keep, kind="primary")
        back = self._action(self.tr("Back"), self._back)
        self.name.textChanged.connect(self._on_edited)
        self.name.returnPressed.connect(self._keep)
        self.text.textChanged.connect(self._on_edited)
        self._taken = WrappedLabel("", self, role="secondary")
        add_items(column, self.name, self.text, hint, self._taken, _row(None, back, self.keep_button))
        self._on_edited()

    def _on_edited(self) -> None:
        name = self._prompts.clean_name(self.name.text())
        self.keep_button.setEnabled(bool(name and self.text.toPlainText().strip()))
        is_taken = self._prompts.find(name) is not None and name.casefold() != self._editing.casefold()
        self._taken.setText(self.tr("Another prompt has this name: saving replaces it.") if is_taken else "")
        self._taken.setVisible(is_taken)

    def _keep(self) -> None:
        if self.keep_button.isEnabled():
            self._prompts.put(self.name.text(), self.text.toPlainText(), instead_of=self._editing)
            self._back()

    # --- all ---

    def eventFilter(self, watched: object, event: QEvent) -> bool:
        if isinstance(event, QKeyEvent) and event.type() == QEvent.Type.KeyPress:
            enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
            if watched is self.filter and event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
                step = 1 if event.key() == Qt.Key.Key_Down else -1
                self.list.setCurrentRow(max(0, min(self.list.currentRow() + step, self.list.count() - 1)))
                return True
            if watched is self.filter and enter:
                if self._current is not None:
                    self._choose()
                else:
                    self.close_and_return()
                return True
            if watched in self.fields.values() and enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
                self._insert()
                return True
        return super().eventFilter(watched, event)  # type: ignore[arg-type]

    def _show(self, part: QWidget) -> None:
        for one in (self._list_part, self._form_part, self._edit_part):
            one.setVisible(one is part)

    def _part(self) -> tuple[QWidget, QVBoxLayout]:
        part = QWidget(self)
        column = vbox(into=part, gap=10)
        return part, column

    def _action(self, text: str, do: Callable[[], object], *, kind: str = "") -> QPushButton:
        return push_button(self, text, do, kind=kind, compact=True)


def _row(*widgets: QWidget | None) -> QHBoxLayout:
    """Buttons in a line; None is where it stretches."""
    row = hbox()
    for widget in widgets:
        if widget is None:
            row.addStretch(1)
        else:
            row.addWidget(widget)
    return row


class MessageTools(QObject):
    """The buttons beside the message, and what they open."""

    batch_wanted = Signal(object)

    def __init__(
        self,
        presenter: ChatPresenter,
        composer: Composer,
        prompts: SavedPrompts,
        tell: Callable[[str], object],
        compare: Callable[[str], object],
        page: QWidget,
    ) -> None:
        super().__init__(page)
        self._presenter, self._composer, self._prompts, self._compare = presenter, composer, prompts, compare
        self.popover = PromptPopover(prompts, page)
        self.popover.chosen.connect(self._insert)
        self.popover.typed.connect(self._insert)
        prompts.trouble.connect(tell)
        self.prompts_button = IconButton("prompts", self.tr("Saved prompts  /"), self.open_prompts, composer)
        self.more_button = IconButton("more", self.tr("More for this message"), self._open_more, composer)
        for button in (self.prompts_button, self.more_button):
            composer.add_tool(button)
        composer.box.slashed.connect(self._on_slash)
        prompts.changed.connect(self._on_prompts)
        self._on_prompts()

    def open_prompts(self) -> None:
        self.popover.open_list(self.prompts_button, self._composer.text)

    def compare(self) -> None:
        self._compare(self._composer.text)

    def to_batch(self, text: str) -> None:
        chat = self._presenter.conversation
        self.batch_wanted.emit(BatchDraft(text, chat.system_prompt, chat.sampling))

    def last_question(self) -> str:
        asked = (row.message.content for row in reversed(self._presenter.model.rows) if row.message.role == "user")
        return self._composer.text if self._composer.text.strip() else next(asked, "")

    def menu(self) -> QMenu:
        menu, text = QMenu(self._composer), self._composer.text
        menu.addAction(icon("prompts"), self.tr("Saved prompts…\t/"), self.open_prompts)
        save = menu.addAction(self.tr("Save this message as a prompt…"))
        save.triggered.connect(lambda: self.popover.open_editor(self.prompts_button, text))
        save.setEnabled(bool(text.strip()))
        menu.addSeparator()
        menu.addAction(icon("columns"), self.tr("Ask two, side by side…\tCtrl+Shift+D"), self.compare)
        rows = menu.addAction(icon("rows"), self.tr("Ask this of every row of a file…"))
        rows.triggered.connect(lambda: self.to_batch(self.last_question()))
        rows.setEnabled(bool(self.last_question().strip()))
        return menu

    def _open_more(self) -> None:
        menu = self.menu()
        menu.aboutToHide.connect(menu.deleteLater)
        at = self.more_button.mapToGlobal(QPoint(0, 0))
        menu.popup(at - QPoint(0, menu.sizeHint().height() + 4))

    def _on_slash(self) -> None:
        self.popover.open_list(self.prompts_button, "", by_slash=True)

    def _on_prompts(self) -> None:
        self._composer.box.opens_prompts = bool(self._prompts.entries)

    def _insert(self, text: str) -> None:
        self._composer.box.insertPlainText(text)
        self._composer.setFocus()
