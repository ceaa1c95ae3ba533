"""The chat page's logic without its widgets: conversations, turns, and what is saved of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from PySide6.QtCore import QObject, Signal

from app.engine_words import said
from app.models.conversation import ConversationModel
from app.models.conversation_list import ConversationListModel
from app.services.answer_queue import AnswerQueue, Stage, ToolOffer, instructions_with, prompt_of, sent_text
from app.services.background import timer
from app.services.chat_store import Attachment, ChatStore, Conversation, Message, MessageState, MessageTree, new_id
from app.services.chat_store.records import new_conversation, title_from
from app.services.chat_store.tree import without_deleted
from app.services.documents import Asked, Documents, Given
from app.services.endpoints import Endpoints
from app.services.engine_client import EngineClient
from app.services.settings import Settings
from app.views.chat.phrases import gone_text, left_out_text, not_looked_into_text, translate
from engine.common.chat import Picture
from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode
from engine.remote.endpoint import RemoteModel, is_remote

if TYPE_CHECKING:
    from app.services.tools import Tools

Permission = Literal["once", "chat", "always", "deny"]

DRAFT_MS = 400
ROOM_UNKNOWN = 2500
"""Tokens for documents where nobody knows the model's context."""
LAST_CHAT = "last_chat"


@dataclass(frozen=True, slots=True)
class Way:
    model: str = ""
    sampling: SamplingParams | None = None


class ChatPresenter(QObject):
    """Keeps the store, the list and the current conversation in sync.

    Opened chats stay in memory, so that nothing on screen waits for, or depends on, the disk.

    Signals:
        shown: another `Conversation` is on screen, with its draft and settings.
        changed: the current `Conversation` has new fields.
        deleted: a `Conversation` that `undo` can restore.
        attached: what goes with the next message of the current chat is other pictures or documents now.
        told: a sentence about the documents of the current chat.
    """

    shown = Signal(object)
    changed = Signal(object)
    deleted = Signal(object)
    attached = Signal()
    told = Signal(str)

    def __init__(
        self,
        client: EngineClient,
        store: ChatStore,
        settings: Settings,
        answers: AnswerQueue,
        endpoints: Endpoints,
        documents: Documents,
        tools: Callable[[], Tools],
        list_model: ConversationListModel,
        parent: QObject | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(parent)
        self._client = client
        self._store = store
        self._settings = settings
        self._endpoints = endpoints
        self._documents = documents
        self._tools = tools
        self._now = now
        self.list_model = list_model
        self.model = ConversationModel(self)
        self.queue = answers
        self._trees: dict[str, MessageTree] = {}
        self._undo: list[Callable[[], object]] = []
        self._attached: dict[str, tuple[Picture, ...]] = {}
        """By chat: what is to be sent with its next message."""
        self._unsent: dict[str, tuple[Attachment, ...]] = {}
        self.document_room: Callable[[Sequence[str]], int] = lambda _texts: ROOM_UNKNOWN
        """How many tokens documents may take beside these texts."""
        self.sees_here: Callable[[], bool] = lambda: False
        """Whether the model on this PC that answers reads pictures."""
        self._wanted = ""
        self._wanted_message = ""
        self._opens_last = False
        self._goes_on = False
        """Whether what another one showed is shown."""
        self.conversation = self._new_conversation()
        self._is_stored = False
        self._draft_timer = timer(self, self._save_draft, DRAFT_MS, once=True)
        self.draft = ""
        self.queue.changed.connect(self._on_answer)
        documents.changed.connect(self._on_document)
        self.shown.connect(self._remember)
        self.changed.connect(self._remember)
        store.foldered.connect(list_model.set_folders)
        store.listed.connect(self._on_listed)
        store.loaded.connect(self._on_loaded)

    # --- which conversation ---

    def begin(self) -> None:
        """Show an empty chat, then the list and the last chat once they are read.

        An empty chat that another server was to answer is shown again instead.
        """
        empty, last = self._new_conversation(), self._settings.last_model
        if is_remote(last) and self._endpoints.find(last) is not None:
            empty, self._began_elsewhere = replace(empty, model=last), last
        self._show(empty, MessageTree(), stored=False)
        self._store.list_conversations()

    def take_over(self, before: ChatPresenter) -> None:
        """Shows what another one showed, and knows the chats and what goes with their messages that it knew."""
        before.flush()
        self._trees, self._attached, self._unsent = before._trees, before._attached, before._unsent
        self._wanted, self._opens_last, self._goes_on = "", False, True
        self.list_model.set_folders(before.list_model.folders)
        self.list_model.set_conversations(before.list_model.known)
        self._show(before.conversation, before.model.tree, stored=before._is_stored)

    def tree_of(self, conversation_id: str) -> MessageTree | None:
        return self._trees.get(conversation_id)

    def new_scratch(self) -> None:
        """Show an empty chat of which nothing is ever stored: it is gone once it is deleted, or the window closes."""
        self._leave()
        scratch = self._new_conversation()
        self._store.leave_out(scratch.id)
        self._show(scratch, MessageTree(), stored=False)
        self._store_if_new()
        self.shown.emit(scratch)

    @property
    def is_scratch(self) -> bool:
        return self._store.leaves_out(self.conversation.id)

    def keep_scratch(self) -> None:
        if self.is_scratch and self.answering_id is None:
            first = next((m.content for m in self.model.tree.path() if m.role == "user"), "")
            title = self.conversation.title or title_from(first) or translate("Chat", "Chat")
            self.conversation = replace(self.conversation, title=title)
            self._store.take_in(self.conversation, self.model.tree.messages())
            self._store.set_unsent_pictures(self.conversation.id, self.pictures)
            self._store.set_unsent_attachments(self.conversation.id, self.attachments)
            self._documents.keep(self._documents_of(self.conversation.id).values())
            self.list_model.put(self.conversation)
            self._note_last()
            self.shown.emit(self.conversation)

    def new_chat(self) -> None:
        """Show an empty chat; the current one if it is empty."""
        if self._is_stored:
            self._leave()
            self._show(self._new_conversation(), MessageTree(), stored=False)
        else:
            self.shown.emit(self.conversation)

    def open(self, conversation_id: str, message_id: str | None = None) -> None:
        """Show a conversation; `message_id` is put on the visible path."""
        self._wanted_message = message_id or ""
        known = self.list_model.conversation(conversation_id)
        if conversation_id == self.conversation.id:
            self._choose_wanted()
            return
        if known is not None and conversation_id in self._trees:
            self._leave()
            self._show(known, self._trees[conversation_id], stored=True)
        else:
            self._wanted = conversation_id
            self._store.load(conversation_id)

    def step(self, offset: int) -> None:
        rows = [entry.conversation.id for entry in self.list_model.entries if entry.conversation is not None]
        if rows:
            at = rows.index(self.conversation.id) + offset if self.conversation.id in rows else 0
            self.open(rows[max(0, min(at, len(rows) - 1))])

    # --- a conversation's own fields ---

    def keep(self) -> None:
        self._store_if_new()

    def rename(self, conversation_id: str, title: str) -> None:
        title = " ".join(title.split())
        if title:
            self._change(conversation_id, title=title)

    def set_pinned(self, conversation_id: str, pinned: bool) -> None:
        self._change(conversation_id, pinned=pinned)

    def move(self, conversation_id: str, folder_id: str) -> None:
        self._change(conversation_id, folder_id=folder_id)

    def set_system_prompt(self, text: str) -> None:
        self._store_if_new()
        self._change(self.conversation.id, system_prompt=text)

    def set_sampling(self, sampling: SamplingParams | None) -> None:
        self._store_if_new()
        self._change(self.conversation.id, sampling=sampling)

    def choose_model(self, model: str) -> None:
        if self._is_stored:
            self._change(self.conversation.id, model=model)
        else:
            self.conversation = replace(self.conversation, model=model)
            self.changed.emit(self.conversation)

    @property
    def is_elsewhere(self) -> bool:
        return is_remote(self.conversation.model)

    @property
    def remote(self) -> RemoteModel | None:
        return self._endpoints.find(self.conversation.model)

    _began_elsewhere = ""
    """What was to answer when the window was last closed, if it is another server's."""

    def _remember(self, conversation: Conversation) -> None:
        self._settings.last_model = conversation.model if is_remote(conversation.model) else ""

    def _new_conversation(self) -> Conversation:
        default = self._settings.default_sampling
        return replace(new_conversation(), model=self._settings.chat_model, sampling=default)

    def set_draft(self, text: str) -> None:
        self.draft = text
        self._draft_timer.start()

    def flush(self) -> None:
        if self._draft_timer.isActive():
            self._draft_timer.stop()
            self._save_draft()

    def delete(self, conversation_id: str, *, tells: bool = True) -> None:
        """Remove a conversation from the list; `undo` restores it, unless nothing of it was stored.  With `tells`,
        `deleted` says so."""
        known = self.conversation if conversation_id == self.conversation.id else None
        conversation = self.list_model.conversation(conversation_id) or known
        if conversation is None or (known is not None and not self._is_stored):
            return
        if conversation_id in self._trees:
            ids = [m.id for m in self._trees[conversation_id].messages() if m.state is MessageState.STREAMING]
            self.queue.stop_all(ids)
        if known is not None:
            self.flush()
        if self._store.leaves_out(conversation_id):
            gone = self._documents_of(conversation_id).keys()
            for of_chats in (self._trees, self._unsent, self._attached):
                of_chats.pop(conversation_id, None)
            others = {*self._trees, *self._unsent}
            self._documents.forget(gone - {id_ for chat in others for id_ in self._documents_of(chat)})
        else:
            self._store.delete(conversation_id)
            kept = self.list_model.conversation(conversation_id) or conversation
            self.can_undo(lambda: self._restore(kept))
        row = self.list_model.row_of(conversation_id)
        self.list_model.remove(conversation_id)
        if known is not None:
            self._show_near(row)
        if tells:
            self.deleted.emit(conversation)

    def can_undo(self, do: Callable[[], object]) -> None:
        self._undo.append(do)

    def undo(self) -> bool:
        if not self._undo:
            return False
        self._undo.pop()()
        return True

    def _restore(self, conversation: Conversation) -> None:
        self._store.restore(conversation.id)
        self.list_model.put(conversation)
        self.open(conversation.id)

    # --- turns ---

    @property
    def answering_id(self) -> str | None:
        last = self.model.last
        return last.id if last is not None and last.state is MessageState.STREAMING else None

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return self._attached.get(self.conversation.id, ())

    def attach(self, pictures: Sequence[Picture]) -> None:
        """These go with the next message, and no others; kept as the draft is until then."""
        if tuple(pictures) != self.pictures:
            self._store_if_new()
            self._attached[self.conversation.id] = tuple(pictures)
            self._store.set_unsent_pictures(self.conversation.id, self.pictures)
        self.attached.emit()

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return self._unsent.get(self.conversation.id, ())

    def attach_documents(self, attachments: Sequence[Attachment]) -> None:
        """These documents go with the next message, and no others; kept as the draft is until then."""
        if tuple(attachments) != self.attachments:
            self._store_if_new()
            self._unsent[self.conversation.id] = tuple(attachments)
            self._store.set_unsent_attachments(self.conversation.id, self.attachments)
        self.attached.emit()

    @property
    def has_documents(self) -> bool:
        return bool(self.attachments) or any(row.message.attachments for row in self.model.rows)

    @property
    def reads_pictures(self) -> bool:
        """Whether who answers may read them: a model on this PC that sees, or another server's that refused none."""
        remote = self.remote
        return (remote is not None or not self.is_elsewhere) and self._sees(remote)

    def _sees(self, remote: RemoteModel | None) -> bool:
        return self.sees_here() if remote is None else not remote.is_blind

    def send(self, text: str) -> bool:
        question = self.put_question(text)
        if question:
            self._answer(question)
        return bool(question)

    def put_question(self, text: str) -> str:
        pictures, attachments = self.pictures, self.attachments
        if not (text.strip() or pictures or attachments) or self.answering_id is not None:
            return ""
        self._draft_timer.stop()
        self.draft = ""
        self._store_if_new()
        changes: dict[str, Any] = {"draft": "", "updated_at": self._now()}
        if self._client.model is not None and not is_remote(self.conversation.model):
            changes["model"] = self._client.model.name
        if not self.conversation.title:
            changes["title"] = title_from(text) or _title_without_text(attachments)
        # The message first: a window that is killed in between still has it as a draft, too, and never lost it.
        question = self._say(text, self.model.tree.leaf_id(), pictures, attachments)
        self._change(self.conversation.id, **changes)
        self.attach(())
        self.attach_documents(())
        return question

    def answer_with(self, question_id: str, way: Way) -> str:
        return self._answer(question_id, way)

    def choose(self, message_id: str) -> None:
        if message_id in self.model.tree:
            self._choose(message_id)

    def resend(self, message_id: str, text: str) -> None:
        """Send an edited message as another version; what followed the first one is kept."""
        edited = self.model.tree[message_id]
        if (text.strip() or edited.pictures or edited.attachments) and self.answering_id is None:
            self._answer(self._say(text, edited.parent_id, edited.pictures, edited.attachments))

    def regenerate(self, message_id: str) -> None:
        if self.answering_id is None and message_id in self.model.tree:
            parent = self.model.tree[message_id].parent_id
            if parent is not None:
                self._answer(parent)

    def said(self, message_id: str | None = None) -> list[str]:
        """What is sent of the path to a message, of the visible one (None), or of none (""): first the instructions."""
        at, _, later = self.model.tree.folded(message_id) if message_id != "" else (None, [], [])
        return self._said(
            instructions_with(self.conversation.system_prompt, at.fold if at is not None else None), later
        )

    def _said(self, instructions: str, lineage: Sequence[Message]) -> list[str]:
        offered = [each.tool for each in self._tools().offered()] if self.conversation.tools else []
        tools = "\n".join(f"{each.name} {each.description} {each.parameters}" for each in offered)
        texts = (instructions, tools, *map(self.sent_text, lineage))
        return [text for text in texts if text.strip()]

    def sent_text(self, message: Message) -> str:
        return sent_text(message, calls=bool(self.conversation.tools))

    def continue_answer(self, message_id: str) -> None:
        if self.answering_id is None and message_id in self.model.tree:
            self._answer(self._say(translate("Chat", "Please continue."), message_id))

    def branch(self, message_id: str) -> None:
        source = self.conversation
        lineage = without_deleted(self.model.tree.nodes_to(message_id))
        now = self._now()
        title = translate("Chat", "Branch: {0}").format(source.title or translate("Chat", "Chat"))
        conversation = replace(source, id=new_id(), title=title, pinned=False, created_at=now, updated_at=now, draft="")
        copies: list[Message] = []
        for message in lineage:
            parent = copies[-1].id if copies else None
            copies.append(replace(message, id=new_id(), conversation_id=conversation.id, parent_id=parent, chosen=True))
        if self.is_scratch:
            self._store.leave_out(conversation.id)
        self._leave()
        self._store.create(conversation, copies)
        self.list_model.put(conversation)
        self._show(conversation, MessageTree(copies), stored=True)

    def set_tools(self, offers: bool) -> None:
        self._store_if_new()
        self._change(self.conversation.id, tools="[]" if offers else "")

    def decide(self, message_id: str, call_id: str, answer: Permission) -> None:
        """Let a call of a tool run, or not; with `chat` and `always` further ones of the same tool, too."""
        if message_id not in self.model.tree:
            return
        tools = self._tools()
        uses = [use for step in self.model.tree[message_id].steps for use in step.calls]
        name = next((use.name for use in uses if use.id == call_id), "")
        offered = next((each for each in tools.offered() if each.tool.name == name), None)
        if offered is not None and answer == "always":
            tools.allow_always(offered.key)
        if offered is not None and answer == "chat":
            allowed = sorted({*allowed_in(self.conversation), offered.key})
            self._change(self.conversation.id, tools=json.dumps(allowed))
            self.queue.allow_in_chat(message_id, offered.key)
        self.queue.decide(message_id, call_id, allowed=answer != "deny")
        if answer in ("chat", "always"):
            for other in uses:
                if other.name == name and other.id in self.queue.waiting_calls(message_id):
                    self.queue.decide(message_id, other.id, allowed=True)

    def step_version(self, message_id: str, offset: int) -> None:
        sibling = self.model.tree.sibling(message_id, offset)
        if sibling is not None:
            self._choose(sibling)

    def stop(self) -> bool:
        answering = self.answering_id
        if answering is not None:
            self.queue.stop(answering)
        return answering is not None

    def add_imported(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            is_shown = conversation.id == self.conversation.id
            if not is_shown or self.answering_id is None:
                self._trees.pop(conversation.id, None)
                if is_shown:
                    self._wanted = conversation.id
                    self._store.load(conversation.id)
        self.list_model.put_all(conversations)

    # --- inside ---

    def _show(self, conversation: Conversation, tree: MessageTree, *, stored: bool) -> None:
        self._wanted = ""
        self.conversation = conversation
        self._is_stored = stored
        self.draft = conversation.draft
        if stored:
            self._trees[conversation.id] = tree
            self._note_last()
        self.model.show(conversation, tree)
        self.shown.emit(conversation)
        self._choose_wanted()

    def _documents_of(self, conversation_id: str) -> dict[str, Attachment]:
        """All that go with its next message or came with one, by their ids."""
        tree = self._trees.get(conversation_id)
        turns = [message.attachments for message in tree.messages()] if tree is not None else []
        return {one.id: one for some in (self._unsent.get(conversation_id, ()), *turns) for one in some}

    def _show_near(self, row: int | None) -> None:
        rest = [entry.conversation for entry in self.list_model.entries[row or 0 :] if entry.conversation is not None]
        near = rest[0] if rest else self.list_model.first()
        self._show(self._new_conversation(), MessageTree(), stored=False)
        if near is not None:
            self.open(near.id)

    def _leave(self) -> None:
        self.flush()
        said = len(self.model.tree) or self.draft.strip() or self.pictures or self.attachments
        empty = not said and not self.conversation.system_prompt
        if self._is_stored and empty and not self.conversation.title:
            self._trees.pop(self.conversation.id, None)
            self._store.delete(self.conversation.id)
            self.list_model.remove(self.conversation.id)

    def _store_if_new(self) -> None:
        if not self._is_stored:
            self._is_stored = True
            self._trees[self.conversation.id] = self.model.tree
            self._store.create(self.conversation)
            self.list_model.put(self.conversation)
            self._note_last()

    def _note_last(self) -> None:
        if not self.is_scratch:
            self._settings.set(LAST_CHAT, self.conversation.id)

    def _change(self, conversation_id: str, **changes: Any) -> None:
        if conversation_id == self.conversation.id:
            if not self._is_stored:
                self._store_if_new()
            self.conversation = replace(self.conversation, **changes)
            self.model.set_conversation(self.conversation)
            self.list_model.put(self.conversation)
            self.changed.emit(self.conversation)
        else:
            known = self.list_model.conversation(conversation_id)
            if known is not None:
                self.list_model.put(replace(known, **changes))
        self._store.change(conversation_id, **changes)

    def _save_draft(self) -> None:
        if self.draft != self.conversation.draft:
            self._store_if_new()
            self._change(self.conversation.id, draft=self.draft)

    def _say(
        self,
        text: str,
        parent_id: str | None,
        pictures: tuple[Picture, ...] = (),
        attachments: tuple[Attachment, ...] = (),
    ) -> str:
        question = Message(
            new_id(),
            self.conversation.id,
            parent_id,
            "user",
            text,
            created_at=self._now(),
            pictures=pictures,
            attachments=attachments,
        )
        self.model.add(question)
        self._store.add_message(question)
        return question.id

    def _answer(self, parent_id: str, way: Way | None = None) -> str:
        way = way or Way(self.conversation.model, self.conversation.sampling)
        remote = self._endpoints.find(way.model)
        with_tools = self.conversation.tools
        answer = Message(
            new_id(), self.conversation.id, parent_id, "assistant", "", MessageState.STREAMING, created_at=self._now()
        )
        at, _, lineage = self.model.tree.folded(parent_id)
        instructions = instructions_with(self.conversation.system_prompt, at.fold if at is not None else None)
        self.model.add(answer)
        self._store.add_message(answer)
        if is_remote(way.model) and remote is None:
            self.queue.refuse(answer, gone_text(way.model))
        elif with_tools:
            self.queue.hold(answer, Stage.STARTING_TOOLS)
            self._tools().when_known(lambda: self._ask_with_tools(answer, instructions, lineage, way.sampling, remote))
        else:
            self._ask(answer, instructions, lineage, way.sampling, remote)
        return answer.id

    def _ask_with_tools(
        self,
        answer: Message,
        instructions: str,
        lineage: Sequence[Message],
        sampling: SamplingParams | None,
        remote: RemoteModel | None,
    ) -> None:
        """Asks once it is known which tools there are."""
        if not self.queue.is_held(answer.id):
            return  # it was stopped
        tools, chat = self._tools(), self.list_model.conversation(answer.conversation_id) or self.conversation
        if tools.problems:
            self.told.emit(" ".join(map(said, tools.problems.values())))
        attached = {one.id: one for message in lineage for one in message.attachments}
        offer = ToolOffer(tools, tools.offered(), allowed_in(chat), tuple(attached.values()))
        self._ask(answer, instructions, lineage, sampling, remote, offer if offer.offered else None)

    def _ask(
        self,
        answer: Message,
        instructions: str,
        lineage: Sequence[Message],
        sampling: SamplingParams | None,
        remote: RemoteModel | None,
        offer: ToolOffer | None = None,
    ) -> None:
        if any(message.attachments for message in lineage):
            self._ask_with_documents(answer, instructions, lineage, sampling, remote, offer)
        else:
            messages = prompt_of(instructions, lineage, sees=self._sees(remote), calls=offer is not None)
            self.queue.ask(answer, messages, sampling, remote, offer)

    def _ask_with_documents(
        self,
        answer: Message,
        instructions: str,
        lineage: Sequence[Message],
        sampling: SamplingParams | None,
        remote: RemoteModel | None,
        offer: ToolOffer | None,
    ) -> None:
        """Asks once it has been found out what the model is given to read of them."""
        sees = self._sees(remote)
        asked = asked_of(lineage, self.document_room(self._said(instructions, lineage)))

        def ask(given: Given) -> None:
            if not self.queue.is_held(answer.id):
                return  # it was stopped
            told = replace(answer, sources=given.sources)
            if given.sources:
                self._store.set_sources(told)
                self._on_answer(told)
            if given.left_out:
                self.told.emit(left_out_text(given.left_out))
            calls = offer is not None
            messages = prompt_of(instructions, lineage, sees=sees, given=given.before, calls=calls)
            self.queue.ask(told, messages, sampling, remote, offer)

        def ask_without(error: Exception) -> None:
            self.told.emit(not_looked_into_text(error))
            ask(Given())

        self.queue.hold(answer)
        self._documents.ask(asked, ask, ask_without)

    def _choose(self, message_id: str) -> None:
        for node in self.model.choose(message_id):
            self._store.choose(node)

    def _choose_wanted(self) -> None:
        wanted, self._wanted_message = self._wanted_message, ""
        if wanted and wanted in self.model.tree and self.model.row_of(wanted) is None:
            if all(message.id != wanted for message in self.model.tree.path()):
                for message in self.model.tree.nodes_to(wanted):
                    self._choose(message.id)
            if self.model.row_of(wanted) is None:
                self.model.show_folded(True)

    # --- from the store and the queue ---

    def _on_answer(self, answer: Message) -> None:
        if answer.reason_code == ErrorCode.PICTURES_NOT_READ:
            asked = self.list_model.conversation(answer.conversation_id)
            self._endpoints.saw_blind(asked.model if asked is not None else "")
        tree = self._trees.get(answer.conversation_id)
        if tree is None or answer.id not in tree:
            return
        if tree is self.model.tree:
            self.model.update(answer)
        else:
            tree.update(answer)

    def _on_document(self, found: Attachment) -> None:
        for chat, unsent in self._unsent.items():
            if any(one.id == found.id for one in unsent):
                self._unsent[chat] = tuple(found if one.id == found.id else one for one in unsent)
        for tree in self._trees.values():
            for message in tree.messages():
                if any(one.id == found.id for one in message.attachments):
                    known = tuple(found if one.id == found.id else one for one in message.attachments)
                    (self.model if tree is self.model.tree else tree).update(replace(message, attachments=known))
        self.attached.emit()

    def _on_listed(self, conversations: tuple[Conversation, ...]) -> None:
        # Chats made before the list was read are newer than the list, which has none that are never stored.
        own = {each.id: each for each in self.list_model.known if self._store.leaves_out(each.id)}
        if self._is_stored:
            own[self.conversation.id] = self.conversation
        self.list_model.set_conversations([*(each for each in conversations if each.id not in own), *own.values()])
        last = self.list_model.conversation(self._settings.get(LAST_CHAT, ""))
        opens_last = self._is_untouched and not self._goes_on
        if opens_last and last is not None and self._began_elsewhere in ("", last.model):
            self._opens_last = True
            self.open(last.id)

    @property
    def _is_untouched(self) -> bool:
        return not self._is_stored and not self.draft

    def _on_loaded(
        self,
        conversation: Conversation,
        messages: tuple[Message, ...],
        pictures: tuple[Picture, ...],
        attachments: tuple[Attachment, ...],
    ) -> None:
        opens_last, self._opens_last = self._opens_last, False
        if conversation.id != self._wanted or (opens_last and not self._is_untouched):
            return
        self._leave()
        known = self.list_model.conversation(conversation.id) or conversation
        tree = self._trees.get(conversation.id) or MessageTree(messages)
        self._attached.setdefault(conversation.id, pictures)
        self._unsent.setdefault(conversation.id, attachments)
        self._show(known, tree, stored=True)


def allowed_in(conversation: Conversation) -> tuple[str, ...]:
    try:
        kept = json.loads(conversation.tools or "[]")
    except ValueError:
        return ()
    return tuple(str(each) for each in kept) if isinstance(kept, list) else ()


def _title_without_text(attachments: Sequence[Attachment]) -> str:
    return title_from(attachments[0].name) if attachments else translate("Chat", "Picture")


def asked_of(lineage: Sequence[Message], room: int) -> Asked:
    """What is asked of the documents in a chat, the last message of which is the question."""
    questions = [message for message in lineage if message.role == "user"]
    attached = tuple((message.id, message.attachments) for message in lineage if message.attachments)
    last, before = questions[-1], questions[-2].content if len(questions) > 1 else ""
    return Asked(attached, last.id, last.content, before, room)
