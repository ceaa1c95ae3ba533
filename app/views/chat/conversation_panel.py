"""The list of chats on the left: search, open, rename, pin, delete, export and import."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QModelIndex, QPoint, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QFrame,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QListView,
    QMenu,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.icons import icon
from app.models.conversation_list import ENTRY_ROLE, ConversationListModel, Entry
from app.services.chat_store import Conversation
from app.theme import scaled
from app.views.chat.conversation_delegate import ConversationDelegate

WIDTH_PX = 232
SEARCH_MS = 150


class ConversationPanel(QFrame):
    """Signals carry conversation ids; `searched` the text ("" ends the search), `renamed` id and title."""

    opened = Signal(str, str)
    searched = Signal(str)
    renamed = Signal(str, str)
    pin_wanted = Signal(str, bool)
    delete_wanted = Signal(str)
    export_wanted = Signal(object)
    import_wanted = Signal()

    def __init__(self, model: ConversationListModel, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self._current = ""
        self.setObjectName("chatPanel")
        self.search = QLineEdit(self)
        self.search.setPlaceholderText(self.tr("Search chats"))
        self.search.setAccessibleName(self.tr("Search chats"))
        self.search.setClearButtonEnabled(True)
        self.search.installEventFilter(self)
        self._search_timer = QTimer(self, singleShot=True, interval=SEARCH_MS)
        self.search.textChanged.connect(lambda: self._search_timer.start())
        self._search_timer.timeout.connect(lambda: self.searched.emit(self.search.text().strip()))
        self.more = QToolButton(self)
        self.more.setProperty("kind", "quiet")
        self.more.setIcon(icon("more", "muted"))
        self.more.setToolTip(self.tr("Import and export"))
        self.more.setAccessibleName(self.tr("Import and export"))
        self.more.setIconSize(QSize(16, 16))
        self.more.clicked.connect(self._open_more)
        self.list = QListView(self)
        self.list.setModel(model)
        self._delegate = ConversationDelegate(self.list)
        self._delegate.renamed.connect(self.renamed)
        self.list.setItemDelegate(self._delegate)
        self.list.setAccessibleName(self.tr("Chats"))
        self.list.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.list.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setMouseTracking(True)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.customContextMenuRequested.connect(self._open_menu)
        self.list.clicked.connect(self._open_index)
        self.list.activated.connect(self._open_index)
        self.list.installEventFilter(self)
        self.nothing = QLabel(self.tr("No chat contains these words."), self)
        self.nothing.setProperty("role", "secondary")
        self.nothing.setWordWrap(True)
        self.nothing.setContentsMargins(9, 4, 9, 0)
        self.nothing.hide()
        top = QHBoxLayout()
        top.setContentsMargins(0, 0, 0, 0)
        top.setSpacing(4)
        top.addWidget(self.search, 1)
        top.addWidget(self.more)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 12, 12, 8)
        column.setSpacing(6)
        column.addLayout(top)
        column.addWidget(self.nothing)
        column.addWidget(self.list, 1)
        model.rowsInserted.connect(self._select_current)

    def fill(self, filling: bool) -> None:
        """Fills the page instead of being a sidebar."""
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
        """Select the current chat."""
        self._current = conversation_id
        self._select_current()

    def focus_search(self) -> None:
        """Focus the search field."""
        self.search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.search.selectAll()

    def rename(self, conversation_id: str) -> None:
        """Edit a title in place."""
        row = self._model.row_of(conversation_id)
        if row is not None:
            index = self._model.index(row)
            self.list.setCurrentIndex(index)
            self.list.edit(index)

    def set_nothing_found(self, nothing: bool) -> None:
        """Show that a search found nothing."""
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
        entry = self._entry(self.list.currentIndex())
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

    def _select_current(self) -> None:
        row = self._model.row_of(self._current)
        if row is None:
            self.list.clearSelection()
        else:
            self.list.setCurrentIndex(self._model.index(row))

    def _open_menu(self, at: QPoint) -> None:
        entry = self._entry(self.list.indexAt(at))
        if entry is not None and entry.conversation is not None:
            menu = self.menu_for(entry.conversation)
            menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
            menu.popup(self.list.viewport().mapToGlobal(at))

    def menu_for(self, conversation: Conversation) -> QMenu:
        """A chat's context menu."""
        id_, menu = conversation.id, QMenu(self)
        menu.addAction(icon("edit"), self.tr("Rename\tF2"), lambda: self.rename(id_))
        pin = self.tr("Unpin") if conversation.pinned else self.tr("Pin to the top")
        menu.addAction(icon("pin"), pin, lambda: self.pin_wanted.emit(id_, not conversation.pinned))
        menu.addAction(icon("export"), self.tr("Export…"), lambda: self.export_wanted.emit([id_]))
        menu.addSeparator()
        menu.addAction(icon("trash"), self.tr("Delete\tDel"), lambda: self.delete_wanted.emit(id_))
        return menu

    def _open_more(self) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addAction(icon("import"), self.tr("Import chats…"), self.import_wanted.emit)
        export = menu.addAction(icon("export"), self.tr("Export chat…"))
        export.triggered.connect(lambda: self.export_wanted.emit([self._current]))
        export.setEnabled(self._model.conversation(self._current) is not None)
        everything = menu.addAction(icon("export"), self.tr("Export all chats…"))
        everything.triggered.connect(lambda: self.export_wanted.emit(None))
        everything.setEnabled(self._model.first() is not None)
        menu.popup(self.more.mapToGlobal(QPoint(0, self.more.height() + 4)))
