"""The list of chats on the left: search, open, rename, pin, delete, export and import."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from PySide6.QtCore import (
    QAbstractItemModel,
    QEvent,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QPoint,
    QPointF,
    QRect,
    QRectF,
    QSize,
    Qt,
    QTimer,
    Signal,
)
from PySide6.QtGui import QFont, QFontMetrics, QKeyEvent, QPainter, QPainterPath, QTextDocument
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QLineEdit,
    QListView,
    QMenu,
    QMessageBox,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QToolButton,
    QWidget,
)

from app.icons import icon
from app.models.conversation_list import ENTRY_ROLE, ConversationListModel, Entry
from app.services.chat_store import ChatStore, Conversation, Folder, new_id
from app.services.chat_store.records import MATCH_END, MATCH_START
from app.theme import colours, scaled, themed
from app.views.chat.phrases import translate
from app.views.chat.presenter import ChatPresenter
from app.widgets.asking import ask
from app.widgets.quantities import count
from app.widgets.scaffold import hbox, line_edit, text_label, vbox

Index = QModelIndex | QPersistentModelIndex
RADIUS = 8
INSET = 9


class ConversationDelegate(QStyledItemDelegate):
    """Paints an `Entry`; renaming happens in place.

    Signals: `renamed`, a conversation's id and its new title; `folder_renamed`, the same of a folder.
    """

    renamed = Signal(str, str)
    folder_renamed = Signal(str, str)

    def sizeHint(self, _option: QStyleOptionViewItem, index: Index) -> QSize:
        entry: Entry = index.data(ENTRY_ROLE)
        line = QFontMetrics(self._font(12.5)).lineSpacing()
        if _is_heading(entry):
            return QSize(0, line + (12 if index.row() == 0 else 22))
        snippet = self._snippet_lines(entry) * QFontMetrics(self._font(11.5)).lineSpacing() + 4
        return QSize(0, line + 18 + (snippet if self._has_snippet(entry) else 0))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        entry: Entry = index.data(ENTRY_ROLE)
        rect: QRect = option.rect
        state: QStyle.StateFlag = option.state
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if _is_heading(entry):
            painter.setFont(self._heading_font())
            painter.setPen(themed("muted"))
            place = rect.adjusted(INSET, 0, -INSET, -6)
            flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom
            painter.drawText(place, flags, str(index.data()).upper())
            painter.restore()
            return
        selected = bool(state & QStyle.StateFlag.State_Selected)
        hovered = bool(state & QStyle.StateFlag.State_MouseOver)
        pill = QPainterPath()
        pill.addRoundedRect(QRectF(rect).adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        if selected or hovered:
            painter.fillPath(pill, themed("accent_background" if selected else "hover"))
        if state & QStyle.StateFlag.State_HasFocus and state & QStyle.StateFlag.State_KeyboardFocusChange:
            painter.setPen(themed("accent"))
            painter.drawPath(pill)
        if entry.conversation is None and entry.folder is not None:
            self._paint_folder(painter, rect, entry.folder, entry.chats)
        else:
            self._paint_title(painter, rect, str(index.data()), entry)
        if self._has_snippet(entry):
            self._paint_snippet(painter, rect, entry.snippet)
        painter.restore()

    def createEditor(self, parent: QWidget, _option: QStyleOptionViewItem, _index: Index) -> QWidget:
        editor = QLineEdit(parent)
        editor.setMaxLength(200)
        editor.setAccessibleName(self.tr("New title"))
        editor.setStyleSheet("padding: 2px 7px;")
        return editor

    def updateEditorGeometry(self, editor: QWidget, option: QStyleOptionViewItem, _index: Index) -> None:
        rect: QRect = option.rect
        line = QFontMetrics(self._font(12.5)).lineSpacing() + 16
        editor.setGeometry(rect.x(), rect.y() + 1, rect.width(), line)

    def setModelData(self, editor: QWidget, _model: QAbstractItemModel, index: Index) -> None:
        # The page updates the model, as it also updates the store.
        entry: Entry = index.data(ENTRY_ROLE)
        if isinstance(editor, QLineEdit) and entry.conversation is not None:
            self.renamed.emit(entry.conversation.id, editor.text())
        elif isinstance(editor, QLineEdit) and entry.folder is not None:
            self.folder_renamed.emit(entry.folder.id, editor.text())

    # --- inside ---

    def _paint_folder(self, painter: QPainter, rect: QRect, folder: Folder, chats: int) -> None:
        font, side = self._font(12.5), scaled(14)
        font.setWeight(QFont.Weight.Medium)
        painter.setFont(font)
        metrics = QFontMetrics(font)
        place = rect.adjusted(INSET, 8, -INSET, 0)
        place.setHeight(metrics.lineSpacing())
        top = place.y() + (place.height() - side) // 2
        icon("chevron-down" if folder.is_open else "chevron-right", "muted").paint(
            painter, QRect(place.x() - 3, top, side, side)
        )
        icon("folder", "muted").paint(painter, QRect(place.x() + side, top, side, side))
        number = count(chats)
        room = metrics.horizontalAdvance(number)
        painter.setPen(themed("muted"))
        flags = Qt.AlignmentFlag.AlignVCenter
        painter.drawText(place, flags | Qt.AlignmentFlag.AlignRight, number)
        painter.setPen(themed("text"))
        words = place.adjusted(2 * side + 6, 0, -room - 8, 0)
        elided = metrics.elidedText(folder.name, Qt.TextElideMode.ElideRight, words.width())
        painter.drawText(words, flags | Qt.AlignmentFlag.AlignLeft, elided)

    def _paint_title(self, painter: QPainter, rect: QRect, text: str, entry: Entry) -> None:
        font = self._font(12.5)
        font.setWeight(QFont.Weight.Medium if self._has_snippet(entry) else QFont.Weight.Normal)
        painter.setFont(font)
        painter.setPen(themed("text"))
        metrics = QFontMetrics(font)
        inside = scaled(14) if entry.folder is not None else 0
        place = rect.adjusted(INSET + inside, 8, -INSET, 0)
        place.setHeight(metrics.lineSpacing())
        elided = metrics.elidedText(text.replace("\n", " "), Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, elided)

    def _paint_snippet(self, painter: QPainter, rect: QRect, snippet: str) -> None:
        marked = html.escape(snippet).replace(MATCH_START, "<b>").replace(MATCH_END, "</b>")
        document = QTextDocument()
        font = self._font(11.5)
        document.setDefaultFont(font)
        document.setDocumentMargin(0)
        width = rect.width() - 2 * INSET
        document.setTextWidth(width)
        document.setHtml(f'<div style="color: {colours().muted}">{marked}</div>')
        line = QFontMetrics(self._font(12.5)).lineSpacing()
        painter.translate(QPointF(rect.x() + INSET, rect.y() + 10 + line))
        document.drawContents(painter, QRectF(0, 0, width, QFontMetrics(font).lineSpacing() * 2))

    def _snippet_lines(self, entry: Entry) -> int:
        view = self.parent()
        room = view.viewport().width() - 2 * INSET if isinstance(view, QAbstractItemView) else 200
        return (
            1 if QFontMetrics(self._font(11.5)).horizontalAdvance(_without_marks(entry.snippet)) <= room * 0.95 else 2
        )

    def _has_snippet(self, entry: Entry) -> bool:
        return bool(entry.snippet) and entry.message_id is not None

    def _font(self, px: float) -> QFont:
        font = QFont(self._theme_font_family())
        font.setPixelSize(max(8, scaled(px)))
        return font

    def _heading_font(self) -> QFont:
        font = self._font(11)
        font.setLetterSpacing(QFont.SpacingType.AbsoluteSpacing, 0.3)
        return font

    def _theme_font_family(self) -> str:
        parent = self.parent()
        return parent.font().family() if isinstance(parent, QWidget) else ""


def _is_heading(entry: Entry) -> bool:
    return entry.conversation is None and entry.folder is None


def _without_marks(snippet: str) -> str:
    return snippet.replace(MATCH_START, "").replace(MATCH_END, "")


class Folders(QObject):
    """Keeps the store and the list in sync.

    Signals: `done` (one sentence on what can be undone now), `made` (id of a new folder, to be named).
    """

    done = Signal(str)
    made = Signal(str)

    def __init__(
        self, page: QWidget, presenter: ChatPresenter, store: ChatStore, list_model: ConversationListModel
    ) -> None:
        super().__init__(page)
        self._page, self._presenter, self._store, self._list = page, presenter, store, list_model
        list_model.dropped.connect(self.move)

    question: QMessageBox | None = None

    def make(self, conversation_ids: Sequence[str] = ()) -> None:
        folder = Folder(new_id(), self._free_name(), created_at=time.time())
        self._put(folder)
        self.move(conversation_ids, folder.id)
        self.made.emit(folder.id)

    def rename(self, folder_id: str, name: str) -> None:
        folder, name = self._list.folder(folder_id), " ".join(name.split())
        if folder is not None and name:
            self._put(replace(folder, name=name))

    def toggle(self, folder_id: str) -> None:
        folder = self._list.folder(folder_id)
        if folder is not None:
            self._put(replace(folder, is_open=not folder.is_open))

    def move(self, conversation_ids: Sequence[str], folder_id: str) -> None:
        for id_ in conversation_ids:
            known = self._list.conversation(id_)
            if known is not None and known.folder_id != folder_id and not self._store.leaves_out(id_):
                self._presenter.move(id_, folder_id)

    def delete(self, folder_id: str) -> None:
        folder, inside = self._list.folder(folder_id), self._list.in_folder(folder_id)
        if folder is None:
            return
        if not inside:
            self._delete(folder, ())
            return
        one, more = (
            translate("Chat", "Delete its chat, too"),
            translate("Chat", "Delete its {0} chats, too", "", len(inside)),
        )
        both = one if len(inside) == 1 else more.format(count(len(inside)))
        self.question = ask(
            self._page.window(),
            translate("Chat", "Delete the folder “{0}”?").format(folder.name),
            translate("Chat", "Its chats can stay, outside of any folder. Either way you can undo it."),
            [
                (translate("Chat", "Delete only the folder"), "do", lambda: self._delete(folder, ())),
                (both, "destroy", lambda: self._delete(folder, inside)),
            ],
        )

    def _delete(self, folder: Folder, chats: Sequence[Conversation]) -> None:
        stays = [chat.id for chat in self._list.in_folder(folder.id) if chat not in chats]
        for chat in chats:
            self._presenter.delete(chat.id, tells=False)
        for id_ in stays:
            self._presenter.move(id_, "")
        self._list.remove_folder(folder.id)
        self._store.remove_folder(folder.id)

        def undo() -> None:
            self._put(folder)
            for _ in chats:
                self._presenter.undo()
            for id_ in (*stays, *(chat.id for chat in chats)):
                self._presenter.move(id_, folder.id)

        self._presenter.can_undo(undo)
        self.done.emit(translate("Chat", "The folder “{0}” was deleted.").format(folder.name))

    def _put(self, folder: Folder) -> None:
        self._list.put_folder(folder)
        self._store.put_folder(folder)

    def _free_name(self) -> str:
        name, number = translate("Chat", "New folder"), 1
        taken = {folder.name for folder in self._list.folders}
        while name in taken:
            number += 1
            name = translate("Chat", "New folder {0}").format(number)
        return name


WIDTH_PX = 232
SEARCH_MS = 150


class ConversationPanel(QFrame):
    """Signals carry conversation ids; `searched` the text ("" ends the search), `renamed` id and title; `folder_wanted`
    the chats to be put into a new one, and `moved` also the id of the folder."""

    opened = Signal(str, str)
    searched = Signal(str)
    renamed = Signal(str, str)
    pin_wanted = Signal(str, bool)
    delete_wanted = Signal(str)
    export_wanted = Signal(object)
    import_wanted = Signal()
    scratch_wanted = Signal()
    folder_wanted = Signal(list)
    folder_renamed = Signal(str, str)
    folder_toggled = Signal(str)
    folder_deleted = Signal(str)
    moved = Signal(list, str)
    print_wanted = Signal(str)

    def __init__(self, model: ConversationListModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self._current = ""
        self.setObjectName("chatPanel")
        self.search = line_edit(self, self.tr("Search chats"), clears=True, hints=True)
        self.search.installEventFilter(self)
        self._search_timer = QTimer(self, singleShot=True, interval=SEARCH_MS)
        self.search.textChanged.connect(lambda: self._search_timer.start())
        self._search_timer.timeout.connect(lambda: self.searched.emit(self.search.text().strip()))
        self.more = QToolButton(self)
        self.more.setProperty("kind", "quiet")
        self.more.setIcon(icon("more", "muted"))
        self.more.setToolTip(self.tr("Folders, scratch chats, import and export"))
        self.more.setAccessibleName(self.tr("More for chats"))
        self.more.setIconSize(QSize(16, 16))
        self.more.clicked.connect(self._open_more)
        self.list = QListView(self)
        self.list.setModel(model)
        self._delegate = ConversationDelegate(self.list)
        self._delegate.renamed.connect(self.renamed)
        # Later: a folder moves by its name, while the view still closes the editor of its line.
        self._delegate.folder_renamed.connect(self.folder_renamed, Qt.ConnectionType.QueuedConnection)
        self.list.setItemDelegate(self._delegate)
        self.list.setAccessibleName(self.tr("Chats"))
        # Thousands of chats, as after an import, are laid out some at a time: all at once took a sixth of a second.
        self.list.setLayoutMode(QListView.LayoutMode.Batched)
        self.list.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.list.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setDragDropMode(QAbstractItemView.DragDropMode.DragDrop)
        self.list.setDefaultDropAction(Qt.DropAction.MoveAction)
        self.list.setDropIndicatorShown(True)
        self.list.setMouseTracking(True)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._open_menu)
        self.list.clicked.connect(self._open_index)
        self.list.activated.connect(self._open_index)
        self.list.installEventFilter(self)
        self.nothing = text_label(self, self.tr("No chat contains these words."), role="secondary", wrap=True)
        self.nothing.setContentsMargins(9, 4, 9, 0)
        self.nothing.hide()
        vbox(
            hbox((self.search, 1), self.more, gap=4),
            self.nothing,
            (self.list, 1),
            into=self,
            margins=(12, 12, 12, 8),
            gap=6,
        )
        model.rowsInserted.connect(self._select_current)

    def fill(self, filling: bool) -> None:
        self._fills = filling
        self._set_width()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_width()

    def _set_width(self) -> None:
        width = scaled(WIDTH_PX)
        self.setMinimumWidth(0 if self._fills else width)
        self.setMaximumWidth(16_777_215 if self._fills else width)

    _fills = False

    def set_current(self, conversation_id: str) -> None:
        self._current = conversation_id
        self._select_current()

    def focus_search(self) -> None:
        self.search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.search.selectAll()

    def rename(self, conversation_id: str) -> None:
        row = self._model.row_of(conversation_id)
        if row is not None:
            index = self._model.index(row)
            self.list.setCurrentIndex(index)
            self.list.edit(index)

    def rename_folder(self, folder_id: str) -> None:
        row = self._model.row_of_folder(folder_id)
        if row is not None:
            index = self._model.index(row)
            self.list.setCurrentIndex(index)
            self.list.edit(index)

    def set_nothing_found(self, nothing: bool) -> None:
        self.nothing.setVisible(nothing)

    def eventFilter(self, watched: object, event: QEvent) -> bool:
        if not isinstance(event, QKeyEvent):
            return False
        if event.type() == QEvent.Type.ShortcutOverride and watched is self.search:
            if event.key() == Qt.Key.Key_Escape and self.search.text():
                event.accept()
            return False
        if event.type() != QEvent.Type.KeyPress:
            return False
        return self._search_key(event) if watched is self.search else self._list_key(event)

    # --- inside ---

    def _search_key(self, event: QKeyEvent) -> bool:
        if event.key() == Qt.Key.Key_Escape and self.search.text():
            self.search.clear()
            return True
        if event.key() == Qt.Key.Key_Down:
            self.list.setFocus(Qt.FocusReason.TabFocusReason)
            self._step_into_list()
            return True
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._step_into_list()
            self._open_index(self.list.currentIndex())
            return True
        return False

    def _list_key(self, event: QKeyEvent) -> bool:
        if self.list.state() == QAbstractItemView.State.EditingState:
            return False  # Enter ends the editing of a line and comes here, too
        entry = self._entry(self.list.currentIndex())
        is_menu = event.key() == Qt.Key.Key_Menu or (
            event.key() == Qt.Key.Key_F10 and bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        )
        if is_menu and entry is not None:
            self._open_menu(self.list.visualRect(self.list.currentIndex()).center())
            return True
        if entry is not None and entry.conversation is None and entry.folder is not None:
            return self._folder_key(event, entry.folder)
        if entry is None or entry.conversation is None:
            return False
        if event.key() in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.delete_wanted.emit(entry.conversation.id)
            return True
        if event.key() == Qt.Key.Key_F2:
            self.rename(entry.conversation.id)
            return True
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self._open_index(self.list.currentIndex())
            return True
        return False

    def _folder_key(self, event: QKeyEvent, folder: Folder) -> bool:
        key = event.key()
        if key in (Qt.Key.Key_Delete, Qt.Key.Key_Backspace):
            self.folder_deleted.emit(folder.id)
        elif key == Qt.Key.Key_F2:
            self.rename_folder(folder.id)
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self._toggle(folder)
        elif key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            if folder.is_open == (key == Qt.Key.Key_Left):
                self._toggle(folder)
        else:
            return False
        return True

    def _toggle(self, folder: Folder) -> None:
        self.folder_toggled.emit(folder.id)
        row = self._model.row_of_folder(folder.id)
        if row is not None:
            self.list.setCurrentIndex(self._model.index(row))

    def _step_into_list(self) -> None:
        for row in range(self._model.rowCount()):
            if self._model.entries[row].conversation is not None:
                self.list.setCurrentIndex(self._model.index(row))
                return

    def _entry(self, index: QModelIndex) -> Entry | None:
        entry: Entry | None = index.data(ENTRY_ROLE) if index.isValid() else None
        return entry

    def _open_index(self, index: QModelIndex) -> None:
        entry = self._entry(index)
        if entry is not None and entry.conversation is not None:
            self.opened.emit(entry.conversation.id, entry.message_id or "")
        elif entry is not None and entry.folder is not None:
            self._toggle(entry.folder)

    def _select_current(self) -> None:
        row = self._model.row_of(self._current)
        if row is None:
            self.list.clearSelection()
        else:
            self.list.setCurrentIndex(self._model.index(row))

    def _open_menu(self, at: QPoint) -> None:
        entry = self._entry(self.list.indexAt(at))
        if entry is not None and (entry.conversation is not None or entry.folder is not None):
            conversation, folder = entry.conversation, entry.folder
            menu = self.menu_for(conversation) if conversation is not None else self.folder_menu(folder)
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(self.list.viewport().mapToGlobal(at))

    def menu_for(self, conversation: Conversation) -> QMenu:
        id_, menu = conversation.id, QMenu(self)
        menu.addAction(icon("edit"), self.tr("Rename\tF2"), lambda: self.rename(id_))
        if self._model.is_scratch(id_):
            menu.addAction(icon("close"), self.tr("Close for good\tDel"), lambda: self.delete_wanted.emit(id_))
            return menu
        pin = self.tr("Unpin") if conversation.pinned else self.tr("Pin to the top")
        menu.addAction(icon("pin"), pin, lambda: self.pin_wanted.emit(id_, not conversation.pinned))
        menu.addMenu(self._move_menu(conversation, menu))
        menu.addAction(icon("export"), self.tr("Export…"), lambda: self.export_wanted.emit([id_]))
        menu.addAction(icon("print"), self.tr("Print…"), lambda: self.print_wanted.emit(id_))
        menu.addSeparator()
        menu.addAction(icon("trash"), self.tr("Delete\tDel"), lambda: self.delete_wanted.emit(id_))
        return menu

    def _move_menu(self, conversation: Conversation, parent: QMenu) -> QMenu:
        id_, menu = conversation.id, QMenu(self.tr("Move to folder"), parent)
        menu.setIcon(icon("folder"))
        for folder in self._model.folders:
            action = menu.addAction(folder.name.replace("&", "&&"), partial(self.moved.emit, [id_], folder.id))
            action.setCheckable(True)
            action.setChecked(folder.id == conversation.folder_id)
        if self._model.folder(conversation.folder_id) is not None:
            menu.addAction(self.tr("No folder"), lambda: self.moved.emit([id_], ""))
        if self._model.folders:
            menu.addSeparator()
        menu.addAction(icon("plus"), self.tr("New folder…"), lambda: self.folder_wanted.emit([id_]))
        return menu

    def folder_menu(self, folder: Folder | None) -> QMenu:
        menu = QMenu(self)
        if folder is not None:
            fold = self.tr("Collapse") if folder.is_open else self.tr("Expand")
            menu.addAction(icon("chevron-up" if folder.is_open else "chevron-down"), fold, lambda: self._toggle(folder))
            menu.addAction(icon("edit"), self.tr("Rename\tF2"), lambda: self.rename_folder(folder.id))
            menu.addSeparator()
            menu.addAction(icon("trash"), self.tr("Delete…\tDel"), lambda: self.folder_deleted.emit(folder.id))
        return menu

    def _open_more(self) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction(icon("folder"), self.tr("New folder"), lambda: self.folder_wanted.emit([]))
        menu.addAction(icon("scratch"), self.tr("New scratch chat\tCtrl+Shift+N"), self.scratch_wanted.emit)
        menu.addSeparator()
        menu.addAction(icon("import"), self.tr("Import chats…"), self.import_wanted.emit)
        export = menu.addAction(icon("export"), self.tr("Export chat…"))
        export.triggered.connect(lambda: self.export_wanted.emit([self._current]))
        is_kept = not self._model.is_scratch(self._current)
        export.setEnabled(is_kept and self._model.conversation(self._current) is not None)
        paper = menu.addAction(icon("print"), self.tr("Print chat…"))
        paper.triggered.connect(lambda: self.print_wanted.emit(self._current))
        paper.setEnabled(export.isEnabled())
        everything = menu.addAction(icon("export"), self.tr("Export all chats…"))
        everything.triggered.connect(lambda: self.export_wanted.emit(None))
        everything.setEnabled(bool(self._model.kept))
        menu.popup(self.more.mapToGlobal(QPoint(0, self.more.height() + 4)))
