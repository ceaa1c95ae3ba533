"""What people do to turns that have been said: fold them, edit them, delete them; each of it can be taken back.

Nothing is lost by any of it.  An edited turn becomes another version, which what followed goes along with, so the old
one still has all that was said after it.  A deleted one is passed over, and a fold only says what is sent instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from PySide6.QtCore import QObject, Signal

from app.services.chat_store import ChatStore, Fold, Message, MessageState, new_id
from app.services.chat_store.records import EDITED, digest_of
from app.views.chat.phrases import translate
from app.views.chat.presenter import ChatPresenter


class MessageEdits(QObject):
    """Changes the chat on screen, in memory and in the store.

    Signals:
        done(str): one sentence on what can be undone now.
        refused(str): one sentence on why something is not done.
    """

    done = Signal(str)
    refused = Signal(str)

    def __init__(
        self,
        presenter: ChatPresenter,
        store: ChatStore,
        parent: QObject | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(parent)
        self._presenter, self._store, self._now = presenter, store, now

    # --- deleting and editing ---

    def delete(self, message_id: str) -> None:
        model = self._presenter.model
        if message_id not in model.tree or not self._may(model.tree[message_id]):
            return
        at = self._now()
        chosen = model.tree.delete(message_id, at)
        model.refresh()
        self._store_choices(chosen)
        self._store.set_message_deleted(message_id, at)
        self._can_undo(translate("Chat", "The message was deleted."), lambda: self._undelete(message_id))

    def _undelete(self, message_id: str) -> None:
        model = self._presenter.model
        chosen = model.tree.restore(message_id)
        model.refresh()
        self._store.set_message_deleted(message_id, None)
        self._store_choices(chosen)

    def edit(self, message_id: str, text: str) -> None:
        model = self._presenter.model
        if message_id not in model.tree:
            return
        old = model.tree[message_id]
        if text == old.content or not (text.strip() or old.pictures) or not self._may(old):
            return
        copies = self._copies(old, text)
        model.add_all(copies)
        self._store.add_messages(copies)
        ids = [copy.id for copy in copies]
        self._can_undo(translate("Chat", "The message was changed."), lambda: self._unedit(message_id, ids))

    def _copies(self, old: Message, text: str) -> list[Message]:
        edited = replace(
            old,
            id=new_id(),
            content=text,
            state=MessageState.COMPLETE,
            reason="",
            reason_code=EDITED if old.role == "assistant" else "",
            created_at=self._now(),
            stats=None,
            chosen=True,
        )
        copies = [edited]
        for node in self._presenter.model.tree.nodes_after(old.id):
            if node.deleted_at:  # the copy is not there; what it stood for still is
                copies[-1] = replace(copies[-1], fold=node.fold or copies[-1].fold)
                continue
            stats = node.stats and replace(node.stats, prompt_tokens=0)  # it was counted with the old text
            copies.append(replace(node, id=new_id(), parent_id=copies[-1].id, stats=stats, chosen=True))
        return copies

    def _unedit(self, old_id: str, ids: list[str]) -> None:
        model = self._presenter.model
        if model.tree.remove(ids):
            self._store.remove_messages(ids)
        self._store_choices(model.choose(old_id))

    # --- folding ---

    def fold(self, message_id: str, summary: str, model_name: str = "", *, chat: str = "", turns: str = "") -> None:
        """Send the summary instead of all turns up to this one; an empty one leaves them out.

        Args:
            chat: where that is, if it may be another one than on screen by now.
            turns: `digest_of` the turns that were summarised, if they may be others by now.
        """
        tree = self._presenter.tree_of(chat or self._presenter.conversation.id)
        if tree is None or message_id not in tree:
            return
        turns = turns or digest_of(tree.lineage(message_id))
        fold = Fold(summary.strip(), changed_at=self._now(), model=model_name, turns=turns)
        if tree is not self._presenter.model.tree:
            tree.set_fold(message_id, fold)
            self._store.set_fold(message_id, fold)
        elif fold.summary:
            self._set_fold(message_id, fold, translate("Chat", "Earlier turns are folded into a summary."))
        else:
            words = translate("Chat", "The oldest turns are left out of what the model reads.")
            self._set_fold(message_id, fold, words)

    def unfold(self, message_id: str) -> None:
        fold = self._presenter.model.tree[message_id].fold
        if fold is not None:
            undone = replace(fold, is_on=False, changed_at=self._now())
            self._set_fold(message_id, undone, translate("Chat", "The turns are sent as they are again."))

    def rewrite(self, message_id: str, summary: str) -> None:
        fold = self._presenter.model.tree[message_id].fold
        if fold is not None and summary.strip() != fold.summary:
            changed = replace(fold, summary=summary.strip(), changed_at=self._now(), model="")
            self._set_fold(message_id, changed, translate("Chat", "The summary was changed."))

    def _set_fold(self, message_id: str, fold: Fold, words: str) -> None:
        before = self._presenter.model.tree[message_id].fold
        self._put_fold(message_id, fold)
        # What is counted of the chat is older than this change, too.
        back = Fold(is_on=False, changed_at=fold.changed_at) if before is None else before
        self._can_undo(words, lambda: self._put_fold(message_id, replace(back, changed_at=self._now())))

    def _put_fold(self, message_id: str, fold: Fold) -> None:
        model = self._presenter.model
        if message_id in model.tree:
            model.tree.set_fold(message_id, fold)
            model.refresh()
            self._store.set_fold(message_id, fold)

    # --- inside ---

    def _may(self, message: Message) -> bool:
        if self._presenter.answering_id is None or message.deleted_at:
            return not message.deleted_at
        self.refused.emit(translate("Chat", "An answer is being written here: wait for it, or stop it first."))
        return False

    def _store_choices(self, nodes: list[str]) -> None:
        for node in nodes:
            self._store.choose(node)

    def _can_undo(self, words: str, do: Callable[[], object]) -> None:
        chat = self._presenter.conversation.id

        def undo() -> None:
            self._presenter.open(chat)
            if self._presenter.conversation.id == chat:
                do()

        self._presenter.can_undo(undo)
        self.done.emit(words)
