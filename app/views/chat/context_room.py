"""Looks that a chat fits the context of who answers it, and offers what makes room before it no longer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PySide6.QtCore import QObject, Qt, Signal
from PySide6.QtWidgets import QFrame, QProgressBar, QPushButton, QWidget

from app.icons import IconMark
from app.models.conversation import KEPT_SHARE, ContextUse, Level, turns_to_fold
from app.services.chat_store import Attachment, Message, MessageState
from app.services.chat_store.records import digest_of
from app.services.documents import given_tokens
from app.services.engine_client import EngineClient
from app.services.folding import Folding, Wish, summary_tokens
from app.services.kept import ANSWER_TOKENS
from app.services.library import Library
from app.services.pictures import tokens_of
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.theme import set_look
from app.views.chat.composer import Composer
from app.views.chat.context_meter import ContextLength, ContextPopover
from app.views.chat.message_edits import MessageEdits
from app.views.chat.phrases import filling_text, folding_text, full_text, ran_out, too_long_text, translate
from app.views.chat.presenter import ROOM_UNKNOWN, ChatPresenter
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import WrappedLabel, hbox, push_button, vbox
from engine.common.chat import Picture
from engine.common.model_info import ModelInfo
from engine.remote.endpoint import RemoteModel, called

Do = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What people tried to send and there was no room for.

    Attributes:
        path: the message that it is sent after; None is the last that is shown, "" none.
        edited: the text of the message that is sent instead of what the composer holds.
        draft: what the composer held.
    """

    do: Do
    path: str | None
    edited: str | None
    draft: str


class RoomBanner(QFrame):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("banner", "warning")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self._text = WrappedLabel("", self)
        self._mark = IconMark("warning", "danger", 20, self)
        self._info = IconMark("info", "accent_text", 20, self)
        self.fold_button = push_button(
            self,
            translate("Chat", "Fold earlier turns"),
            tip=translate("Chat", "The model summarises them, and reads the summary instead."),
        )
        self.drop_button = push_button(
            self,
            translate("Chat", "Leave out the oldest"),
            tip=translate("Chat", "The model reads nothing of them; they are kept."),
        )
        self.new_button = push_button(self, translate("Chat", "Ask in a new chat"))
        self.anyway_button = push_button(self, translate("Chat", "Send anyway"))
        self.later_button = push_button(self, translate("Chat", "Not now"))
        self.cancel_button = push_button(self, translate("Chat", "Cancel"))
        self._buttons = (
            self.fold_button,
            self.drop_button,
            self.new_button,
            self.anyway_button,
            self.later_button,
        )
        for button in (self.anyway_button, self.later_button):
            button.setProperty("kind", "quiet")
        for button in (*self._buttons, self.cancel_button):
            button.setProperty("compact", "true")
        self.bar = QProgressBar(self)
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        self._flow = Flow(self.fold_button, self.drop_button, self.new_button, parent=self)
        self._working = QWidget(self)
        hbox((self.bar, 1), self.cancel_button, into=self._working, gap=12)
        column = vbox(self._text, self._working, self._flow)
        row = hbox(into=self, margins=(16, 10, 16, 10), gap=12)
        for mark in (self._mark, self._info):
            mark.setFixedSize(mark.sizeHint())
            row.addWidget(mark, 0, Qt.AlignmentFlag.AlignTop)
        row.addLayout(column, 1)
        for button in (self.anyway_button, self.later_button):  # beside the words: alone it takes no line
            row.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text()

    def offer(self, text: str, *buttons: QPushButton, warns: bool = True) -> None:
        self._show(text, buttons, warns=warns, share=None)

    def progress(self, text: str, share: float) -> None:
        self._show(text, (), warns=False, share=share)

    def _show(self, text: str, buttons: Sequence[QPushButton], *, warns: bool, share: float | None) -> None:
        set_look(self, "banner", "warning" if warns else "info")
        self._mark.setVisible(warns)
        self._info.setVisible(not warns)
        self._text.setText(text)
        self.setAccessibleName(text)
        self._working.setVisible(share is not None)
        below = {self.fold_button, self.drop_button, self.new_button}
        self._flow.setVisible(not below.isdisjoint(buttons))
        self.bar.setValue(round(1000 * (share or 0.0)))
        for button in self._buttons:
            button.setVisible(button in buttons)
        self.show()


class ContextRoom(QObject):
    """Signals: `reload_wanted`: load the model again, with another length; `told`: one sentence on what went wrong."""

    reload_wanted = Signal()
    told = Signal(str)
    to_new_chat = Signal(str)
    shown = Signal(bool)

    def __init__(
        self,
        page: QWidget,
        presenter: ChatPresenter,
        composer: Composer,
        edits: MessageEdits,
        client: EngineClient,
        counter: TokenCounter,
        settings: Settings,
        library: Library,
        once_agreed: Callable[[Do], None],
        send: Callable[[str], None],
    ) -> None:
        """`once_agreed` does something once text may leave this PC; `send` sends what was written."""
        super().__init__(page)
        self._presenter, self._composer, self._edits = presenter, composer, edits
        self._client, self.counter, self._settings, self._library = client, counter, settings, library
        self._once_agreed, self._send = once_agreed, send
        self.folding = Folding(client, presenter.queue, self._tokens_of, self)
        self.banner = banner = RoomBanner(page)
        self.popover = ContextPopover(page)
        self._attempt: _Attempt | None = None
        """It is made again once there is room."""
        self._put_off: set[str] = set()
        """Chats in which the offer was declined."""
        self._counting = ""
        banner.fold_button.clicked.connect(self.fold)
        banner.drop_button.clicked.connect(self.drop)
        banner.new_button.clicked.connect(self._ask_in_new_chat)
        banner.anyway_button.clicked.connect(self.try_anyway)
        banner.later_button.clicked.connect(self._not_now)
        banner.cancel_button.clicked.connect(lambda: self.folding.cancel(self._chat))
        composer.meter.clicked.connect(self.open)
        self.popover.fold_wanted.connect(self.fold)
        self.popover.drop_wanted.connect(self.drop)
        self.popover.length_changed.connect(self._set_length)
        self.popover.reload_wanted.connect(self.reload_wanted)
        counter.counted.connect(self._on_counted)
        self.folding.changed.connect(self._show)
        self.folding.folded.connect(self._on_folded)
        self.folding.failed.connect(self._on_failed)

    def close(self) -> None:
        self.folding.close()

    # --- before something is sent ---

    def once_it_fits(
        self, do: Do, *, after: str | None = None, more: str | None = None, edited: str | None = None
    ) -> None:
        """Does it if the context has room for what is sent, or when people say that it is to be tried nevertheless.

        Args:
            after: the message that it is sent after; None is the last that is shown, "" none.
            more: what is sent after that; None is what the composer holds.
            edited: `more`, where it is a message that was edited.
        """
        draft = self._composer.text
        attempt = _Attempt(lambda: self._once_agreed(do), after, edited, draft)
        said = self._presenter.said(after)
        self._attempt = attempt
        pictures = self._pictures(after)
        self._take(self._estimate([*said, draft if more is None else more]) + pictures, is_about=True)
        if not self._is_over:
            self._attempt = None
            attempt.do()

    def try_anyway(self) -> None:
        self.banner.hide()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.do()
        else:
            self._once_agreed(lambda: self._send(self._composer.text))
        self._composer.setFocus()

    @property
    def _text(self) -> str:
        attempt = self._attempt
        return attempt.edited if attempt is not None and attempt.edited is not None else self._composer.text

    @property
    def _path(self) -> str | None:
        return self._attempt.path if self._attempt is not None else None

    def _ask_in_new_chat(self) -> None:
        text = self._text
        if self._attempt is None or self._attempt.edited is None:  # it moves; a draft beside an edited message stays
            self._composer.set_text("")
            self._presenter.set_draft("")
        self.to_new_chat.emit(text)

    def _not_now(self) -> None:
        self._put_off.add(self._chat)
        self._show()
        self._composer.setFocus()

    # --- how full it is ---

    def count(self) -> None:
        """Exact right after an answer; estimated here while there is text that the engine has not counted."""
        presenter, self._attempt = self._presenter, None
        is_here, model, draft = not presenter.is_elsewhere, self._client.model, self._composer.text
        last = presenter.model.last
        if last is not None and last.stats is not None and last.stats.prompt_tokens and self._is_as_counted(last):
            used, more = last.stats.prompt_tokens + last.stats.generated_tokens, [draft] if draft.strip() else []
            if not more or not is_here:
                self._counting = ""
                unsent = self._given_tokens(presenter.attachments) + self._seen(presenter.pictures)
                self._take(used + self.counter.estimate("", more) + unsent, is_about=bool(more or unsent))
                return
        if last is not None and last.state is MessageState.STREAMING:
            if last.steps:
                self._take(self._estimate([*presenter.said(), draft]) + self._pictures(), is_about=True)
            return
        if not is_here:
            self._take(self._estimate([*presenter.said(), draft]), is_about=True)
            return
        pictures = self._pictures()
        if model is None:
            self._take(None, is_about=True)
            return
        if last is not None and not self._is_as_counted(last):  # what is shown is of other turns
            self._take(self._estimate([*presenter.said(), draft]) + pictures, is_about=True)
        self._counting = self._chat
        self.counter.count(self._counting, model.path, _said((*presenter.said(), draft)))

    def forget(self) -> None:
        self._attempt = None
        self.banner.hide()
        self.popover.hide()

    @property
    def limit(self) -> int | None:
        if self._presenter.is_elsewhere:
            return _context_of(self._presenter.remote)
        return self._client.model.context_tokens if self._client.model is not None else None

    @property
    def _chat(self) -> str:
        return self._presenter.conversation.id

    @property
    def _is_over(self) -> bool:
        return self._use is not None and self._use.level is Level.OVER

    _use: ContextUse | None = None

    def _is_as_counted(self, last: Message) -> bool:
        """Whether what was counted with the last answer would be sent again."""
        nodes = self._presenter.model.tree.nodes_to(last.id)
        return all(
            node.deleted_at <= last.created_at and (node.fold is None or node.fold.changed_at <= last.created_at)
            for node in nodes
        )

    def _estimate(self, prompt: Sequence[str]) -> int:
        path = self._client.model.path if self._client.model is not None else ""
        return self.counter.estimate(path, _said(prompt))

    def document_room(self, texts: Sequence[str]) -> int:
        limit = self.limit
        if limit is None:
            return ROOM_UNKNOWN
        answer = min(ANSWER_TOKENS, limit // 4)
        return max(limit - int(1.1 * self._estimate(texts)) - answer, 0)

    def _given_tokens(self, attachments: Sequence[Attachment]) -> int:
        some = [one for one in attachments if one.characters]
        room = self.document_room([*self._presenter.said(), self._composer.text]) if some else 0
        return given_tokens(some, room) if some else 0

    def _pictures(self, after: str | None = None) -> int:
        _, _, later = self._presenter.model.tree.folded(after) if after != "" else (None, [], [])
        sent = [picture for message in later for picture in message.pictures]
        return self._seen([*sent, *self._presenter.pictures])

    def _seen(self, pictures: Sequence[Picture]) -> int:
        model = self._client.model
        is_read = pictures and model is not None and model.sees and not self._presenter.is_elsewhere
        return tokens_of(pictures, model.path) if is_read and model is not None else 0

    def _tokens_of(self, text: str) -> int:
        return self._estimate([text])

    def _on_counted(self, key: str, tokens: int) -> None:
        if self._client.model is not None and key == self._counting and not self._presenter.is_elsewhere:
            _, _, later = self._presenter.model.tree.folded()
            attached = [one for message in later for one in message.attachments]
            tokens += self._given_tokens((*attached, *self._presenter.attachments)) + self._pictures()
            self._take(tokens, is_about=tokens > 0)

    def _take(self, used: int | None, *, is_about: bool) -> None:
        limit = self.limit
        self._use = use = None if used is None or limit is None else ContextUse(used, limit, is_about)
        self._composer.show_use(use)
        if use is not None and self._presenter.has_documents:  # which take what room there is, and not more
            self._use = replace(use, used=self._estimate([*self._presenter.said(self._path), self._text]))
        self._show()

    def _show(self) -> None:
        use, banner = self._use, self.banner
        wish = self.folding.of(self._chat)
        if wish is not None:
            banner.progress(folding_text(wish.share, is_writing=self.folding.is_writing(wish)), wish.share)
        elif use is None or use.level in (Level.FREE, Level.NEAR):
            banner.hide()
        elif use.level is Level.OVER:
            fits_alone = self._estimate([self._text]) < use.limit
            folds = (banner.fold_button, banner.drop_button) if fits_alone and self._folds() else ()
            alone = (banner.new_button,) if fits_alone else ()
            words = too_long_text(use.used, use.limit, is_chat=fits_alone, folds=bool(folds))
            last = self._presenter.model.last
            if self._attempt is not None or self._composer.text.strip():
                banner.offer(words, *folds, *alone, banner.anyway_button)
            elif last is not None and ran_out(last) and folds:
                banner.hide()  # it is offered there
            else:
                banner.offer(full_text(use.used, use.limit), *folds, *alone)
        elif self._folds() and self._chat not in self._put_off:
            words = filling_text(use.used, use.limit)
            banner.offer(words, banner.fold_button, banner.drop_button, banner.later_button, warns=False)
        else:
            banner.hide()
        self.shown.emit(not banner.isHidden())

    # --- making room ---

    def fold(self) -> None:
        limit = self.limit
        found = self._to_fold(summary_tokens(limit or 0))
        if found is None or limit is None:
            return
        at, _, _ = self._presenter.model.tree.folded(self._path)
        before, attempt = at.fold if at is not None else None, self._attempt
        digest = digest_of(self._presenter.model.tree.lineage(found[0]))
        wish = Wish(self._chat, *found, before, limit, digest, self._presenter.remote, lambda: self._go_on(attempt))
        self._once_agreed(lambda: self.folding.ask(wish))

    def fold_again(self, message_id: str) -> None:
        limit, turns = self.limit, self._presenter.model.tree.lineage(message_id)
        if limit is not None and turns:
            wish = Wish(self._chat, message_id, turns, None, limit, digest_of(turns), self._presenter.remote)
            self._once_agreed(lambda: self.folding.ask(wish))

    def drop(self) -> None:
        found, attempt = self._to_fold(0), self._attempt
        if found is not None:
            self._edits.fold(found[0], "")
            self._go_on(attempt)

    def _to_fold(self, summary: int) -> tuple[str, list[Message]] | None:
        """The last turn to fold, and all that are: as few as make room, but no question without its answer."""
        limit = self.limit
        _, _, later = self._presenter.model.tree.folded(self._path) if self._path != "" else (None, [], [])
        if limit is None or not later:
            return None
        if later[-1].state is MessageState.STREAMING:
            later = later[:-2]
        sizes = [self._estimate([self._presenter.sent_text(message)]) for message in later]
        draft = self._estimate([self._text])
        system = self._estimate([self._presenter.conversation.system_prompt])
        room = max(0, min(round(limit * KEPT_SHARE), limit - draft) - summary - system)
        number = turns_to_fold(sizes, [message.role == "assistant" for message in later], room)
        return (later[number - 1].id, later[:number]) if number else None

    def _folds(self) -> bool:
        return self._to_fold(0) is not None

    def _on_folded(self, wish: Wish) -> None:
        self._edits.fold(wish.message_id, wish.summary, wish.model, chat=wish.chat, turns=wish.digest)
        if wish.chat == self._chat and wish.then is not None:
            wish.then()

    def _go_on(self, attempt: _Attempt | None) -> None:
        """Does what there was no room for, if there is now; but never sends a text that was changed meanwhile."""
        self._put_off.discard(self._chat)
        if attempt is None or (attempt.edited is None and self._composer.text != attempt.draft):
            self.count()
            return
        self._attempt = attempt
        self._take(self._estimate([*self._presenter.said(attempt.path), self._text]), is_about=True)
        if not self._is_over:
            self._attempt = None
            attempt.do()

    def _on_failed(self, _wish: Wish, why: str) -> None:
        self.told.emit(translate("Chat", "The earlier turns were not folded: {0}").format(why))

    # --- its length ---

    def open(self) -> None:
        use, length = self._composer.meter.use, self._length()
        if use is not None and length is not None:
            self.popover.edit(use, length, self._composer.meter, folds=self._folds())

    def _length(self) -> ContextLength | None:
        limit, model, remote = self.limit, self._client.model, self._presenter.remote
        if limit is None:
            return None
        if remote is not None:
            return ContextLength(limit, owner=called(remote.endpoint))
        if model is None:
            return None
        longest, wanted = self._longest(model, limit), self._settings.context_of(self._model_path(model))
        asked = self._client.config.context_tokens if self._client.config is not None else None
        shown = limit if wanted == asked else min(wanted or longest, longest)  # memory may have held less than asked
        place = "RAM" if model.device == "cpu" else "VRAM"
        return ContextLength(limit, shown, longest, model.kv_bytes_per_token, place)

    def _longest(self, model: ModelInfo, limit: int) -> int:
        entry = self._library.entry(model.path)
        known = entry.context_tokens if entry is not None else self._settings.get("longest_context", {}).get(model.path)
        return max(limit, known if type(known) is int else 0)

    def _set_length(self, tokens: int) -> None:
        model, limit = self._client.model, self.limit
        if model is not None and limit is not None:
            longest = self._longest(model, limit)
            if self._library.entry(model.path) is None:  # or nothing would say it once it is shorter
                self._settings.set(
                    "longest_context", {**self._settings.get("longest_context", {}), model.path: longest}
                )
            self._settings.set_context_of(self._model_path(model), tokens if tokens < longest else None)

    def _model_path(self, model: ModelInfo) -> str:
        return self._client.config.model if self._client.config is not None else model.path


def _said(prompt: Sequence[str]) -> list[str]:
    return [text for text in prompt if text.strip()]


def _context_of(remote: RemoteModel | None) -> int | None:
    if remote is None:
        return None
    found = remote.endpoint.found
    return dict(zip(found.models, found.contexts, strict=False)).get(remote.model) or None
