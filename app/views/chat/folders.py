"""Folders of chats: made, renamed, filled and deleted, and brought back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QMessageBox, QWidget

from app.models.conversation_list import ConversationListModel
from app.services.chat_store import ChatStore, Conversation, Folder, new_id
from app.views.chat.phrases import translate
from app.views.chat.presenter import ChatPresenter
from app.widgets.asking import ask
from app.widgets.quantities import count


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
    """The last that was asked."""

    def make(self, conversation_ids: Sequence[str] = ()) -> None:
        """A new folder with these chats in it."""
        folder = Folder(new_id(), self._free_name(), created_at=time.time())
        self._put(folder)
        self.move(conversation_ids, folder.id)
        self.made.emit(folder.id)

    def rename(self, folder_id: str, name: str) -> None:
        """An empty name changes nothing."""
        folder, name = self._list.folder(folder_id), " ".join(name.split())
        if folder is not None and name:
            self._put(replace(folder, name=name))

    def toggle(self, folder_id: str) -> None:
        """Show what lies in it, or hide it."""
        folder = self._list.folder(folder_id)
        if folder is not None:
            self._put(replace(folder, is_open=not folder.is_open))

    def move(self, conversation_ids: Sequence[str], folder_id: str) -> None:
        """Put chats into a folder, or into none ("")."""
        for id_ in conversation_ids:
            known = self._list.conversation(id_)
            if known is not None and known.folder_id != folder_id and not self._store.leaves_out(id_):
                self._presenter.move(id_, folder_id)

    def delete(self, folder_id: str) -> None:
        """Remove a folder: at once if it is empty, else people are asked what becomes of its chats."""
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
