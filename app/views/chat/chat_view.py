"""The Chat page: the list of chats, the conversation, and the composer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QObject, QTimer, QUrl, Signal
from PySide6.QtGui import (
    QDesktopServices,
    QDragEnterEvent,
    QDropEvent,
    QFocusEvent,
    QKeySequence,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import QMessageBox, QStackedWidget, QWidget

from app.models.conversation_list import ConversationListModel, Group
from app.services.answer_queue import AnswerQueue
from app.services.background import LatestTask
from app.services.chat_store import Attachment, ChatStore, Conversation, SearchHit, Source
from app.services.documents import Documents
from app.services.endpoints import Endpoints
from app.services.engine_client import EngineClient, EngineState
from app.services.kept import SavedPresets, SavedPrompts
from app.services.library import Library, ModelSpeeds
from app.services.pictures import Thumbnails, sources_in
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.theme import scaled
from app.views.chat.attaching import Attaching
from app.views.chat.attachment_row import PassageDialog
from app.views.chat.composer import Composer
from app.views.chat.context_room import ContextRoom
from app.views.chat.conversation_panel import ConversationPanel, Folders
from app.views.chat.empty_chat import BatchHint, EmptyChat
from app.views.chat.message_edits import MessageEdits
from app.views.chat.model_picker import ModelPicker
from app.views.chat.phrases import (
    found_words,
    gone_text,
    leaves_text,
    not_taken_text,
    translate,
    unseen_here_text,
    unseen_text,
)
from app.views.chat.presenter import ChatPresenter
from app.views.chat.prompt_popover import MessageTools
from app.views.chat.title_bar import FindBar, FindInChat, TitleBar
from app.views.chat.transcript import COLUMN_PX, Transcript
from app.widgets.answer_text import import_parser, open_link
from app.widgets.asking import ask
from app.widgets.banner import Banner, Toast
from app.widgets.fields import dropped_model
from app.widgets.page import BATCH, FIRST_RUN, MODELS, Page, add_shortcut, note_keys
from app.widgets.quantities import percent
from app.widgets.scaffold import CENTRE, hbox, set_message, text_label, vbox
from engine.common.config import SamplingParams
from engine.common.model_info import ModelInfo
from engine.common.settings import STARTER
from engine.remote.endpoint import RemoteModel, called

if TYPE_CHECKING:
    from app.services.tools import Tools
    from app.views.chat.chat_transfer import ChatTransfer
    from app.views.chat.side_by_side import SideBySide


class UnsavedTextGuard(QObject):
    def __init__(self, store: ChatStore, parent: QWidget) -> None:
        super().__init__(parent)
        self._store = store
        self._window: QWidget | None = None
        self._trouble = ""
        store.trouble.connect(self._on_trouble)

    def watch(self, window: QWidget) -> None:
        if window is not self._window:
            if self._window is not None:
                self._window.removeEventFilter(self)
            self._window = window
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if watched is self._window and event.type() == QEvent.Type.Close and self._trouble and self._store.unsaved:
            if not self.ask():
                event.ignore()
                return True
            self._trouble = ""  # ask only once
        return False

    def ask(self) -> bool:
        box = QMessageBox(self._window)
        box.setIcon(QMessageBox.Icon.Warning)
        box.setText(self.tr("The latest messages are not saved."))
        box.setInformativeText(self._trouble + " " + self.tr("If you close the window now, they are lost."))
        stay = box.addButton(self.tr("Keep the window open"), QMessageBox.ButtonRole.RejectRole)
        leave = box.addButton(self.tr("Close and lose them"), QMessageBox.ButtonRole.DestructiveRole)
        box.setDefaultButton(stay)
        box.setEscapeButton(stay)
        box.exec()
        return box.clickedButton() is leave

    def _on_trouble(self, sentence: str) -> None:
        self._trouble = sentence


PANEL_FROM_PX = 672
"""Page width, at the standard font size, from which the list of chats fits beside the chat."""
NOTE_FROM_PX = 260
"""Height of the page, at the standard size of text, from which it says what the starter is."""
ANSWER_TOKENS = 1200
"""Of the context, left to an answer where documents could take all of it."""
_BEGINNING = 3
"""The last piece of a document that is shown of its beginning, before what stands after it."""
_LEAST_PX = 48
"""Of the conversation, which becomes lower before what people write with does."""
_IMPORT_AFTER_MS = 150
"""Not while the window is opening."""


class ChatView(Page):
    """Gets its services from outside; all its state is in the store or on its way there.

    Signals: `restart_wanted`: restart the engine; `reload_wanted`: load the model again, as it is set now.
    """

    restart_wanted = Signal()
    reload_wanted = Signal()

    def __init__(
        self,
        client: EngineClient,
        store: ChatStore,
        settings: Settings,
        answers: AnswerQueue,
        counter: TokenCounter,
        library: Library,
        speeds: ModelSpeeds,
        endpoints: Endpoints,
        documents: Documents,
        prompts: SavedPrompts,
        presets: SavedPresets,
        tools: Callable[[], Tools],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._settings, self._presets = client, settings, presets
        self._store = store
        self._library = library
        self._endpoints = endpoints
        list_model = ConversationListModel(_group_title, translate("Chat", "New chat"), is_scratch=store.leaves_out)
        list_model.setParent(self)
        self.presenter = ChatPresenter(client, store, settings, answers, endpoints, documents, tools, list_model, self)
        self.documents = documents
        self.title_bar = TitleBar(client, library, self)
        self.picker = ModelPicker(client, settings, library, speeds, endpoints, self)
        self.panel = ConversationPanel(list_model, self)
        self._thumbnails = Thumbnails(self)
        self.transcript = Transcript(self.presenter.model, self._thumbnails, self)
        self.empty = EmptyChat(self)
        self.composer = Composer(self._thumbnails, documents.share, self, presets)
        self.batch_hint = BatchHint(client, self)
        self.batch_hint.opened.connect(lambda: self.page_wanted.emit(BATCH))
        self.trouble_banner = Banner("warning", self)
        self.notice_banner = Banner("info", self)
        self.notice_banner.add_action(self.tr("Dismiss"), self._dismiss, kind="quiet")
        self._told: dict[str, str] = {}
        """By chat: a notice about it alone, shown as long as the chat is on screen."""
        self.folders = Folders(self, self.presenter, store, list_model)
        self.find_bar = FindBar(self)
        self.finding = FindInChat(self.find_bar, self.presenter.model, self.transcript)
        self.scratch_banner = Banner("info", self)
        self.scratch_banner.add_action(self.tr("Keep this chat"), self.presenter.keep_scratch)
        self.scratch_banner.add_action(self.tr("Close for good"), self._close_scratch, kind="quiet")
        self.edits = MessageEdits(self.presenter, store, self)
        self.room = ContextRoom(
            self,
            self.presenter,
            self.composer,
            self.edits,
            client,
            counter,
            settings,
            library,
            self._once_agreed,
            self._send_now,
        )
        self.presenter.document_room = self.room.document_room
        self.tools = MessageTools(self.presenter, self.composer, prompts, self._say, self.compare, self)
        self.tools.batch_wanted.connect(self.batch_wanted)
        presets.trouble.connect(self._say)
        self._pages = QStackedWidget(self)
        self.toast = Toast(self)
        self.files_banner = Banner("info", self)
        self.setAcceptDrops(True)
        self._shows_chats = False
        self._close_guard = UnsavedTextGuard(store, self)
        self._lay_out()
        self._connect_page()
        self._connect_services()
        self._add_shortcuts()
        self._set_widths()
        self.presenter.begin()
        # Import the parser's modules now, or the first answer would visibly stall.
        self._importing = LatestTask(self, after_ms=_IMPORT_AFTER_MS)
        self._importing.ask(import_parser)

    # --- building ---

    def _lay_out(self) -> None:
        self._pages.addWidget(self.empty)
        self._pages.addWidget(self.transcript)
        self._pages.setMinimumHeight(_LEAST_PX)
        self._box_row = box_row = hbox(self.composer, margins=(24, 0, 24, 0), gap=-1)
        self.model_note = text_label(
            self,
            self.tr("The starter is a small demo model: it gets facts wrong and may repeat itself."),
            role="caption",
            wrap=True,
            align=CENTRE,
        )
        self.sent_note = text_label(self, role="secondary", wrap=True, align=CENTRE)
        self._beside = QWidget(self)
        self._strip_row = hbox(margins=(24, 0, 24, 0), gap=-1)
        vbox(
            self.trouble_banner,
            self.notice_banner,
            self.files_banner,
            self.scratch_banner,
            self.find_bar,
            (self._pages, 1),
            hbox(self.toast, gap=-1),
            self._strip_row,
            hbox(self.batch_hint, margins=(24, 0, 24, 0), gap=-1),
            self.room.banner,
            box_row,
            vbox(self.sent_note, self.model_note, margins=(24, 6, 24, 10), gap=-1),
            into=self._beside,
            gap=0,
        )
        vbox(self.title_bar, (hbox(self.panel, (self._beside, 1), gap=0), 1), into=self, gap=0)

    def _connect_page(self) -> None:
        do, panel = self.presenter, self.panel
        self.title_bar.new_chat.connect(self.new_chat)
        self.title_bar.rename.connect(self.rename)
        self.title_bar.chats_wanted.connect(self._show_chats)
        self.title_bar.models_wanted.connect(self.choose_model)
        self.title_bar.cancel_wanted.connect(self.picker.cancel_wanted)
        self.picker.more_wanted.connect(lambda: self.page_wanted.emit(MODELS))
        self.picker.chosen.connect(self._choose_model)
        self.picker.chosen.connect(lambda _model: self.composer.setFocus())
        self._endpoints.changed.connect(self._show_place)
        panel.opened.connect(self._open)
        panel.searched.connect(self._search)
        panel.scratch_wanted.connect(self.new_scratch)
        panel.folder_wanted.connect(self.folders.make)
        panel.folder_renamed.connect(self.folders.rename)
        panel.folder_toggled.connect(self.folders.toggle)
        panel.folder_deleted.connect(self.folders.delete)
        panel.moved.connect(self.folders.move)
        self.folders.made.connect(panel.rename_folder)
        self.folders.done.connect(self._tell_undo)
        panel.renamed.connect(do.rename)
        panel.pin_wanted.connect(do.set_pinned)
        panel.delete_wanted.connect(do.delete)
        panel.export_wanted.connect(lambda ids: self.transfer.ask_export(ids))
        panel.import_wanted.connect(lambda: self.transfer.ask_import())
        panel.print_wanted.connect(lambda chat_id: self.transfer.print_chat(chat_id))
        self.transcript.acted.connect(self._act)
        self.transcript.resent.connect(self._resend)
        self.transcript.edited.connect(self.edits.edit)
        self.transcript.rewritten.connect(self.edits.rewrite)
        self.transcript.fold_acted.connect(self._act_on_fold)
        self.transcript.version_stepped.connect(do.step_version)
        self.transcript.link_activated.connect(open_link)
        self.transcript.source_opened.connect(self._open_source)
        self.transcript.decided.connect(do.decide)
        self.composer.tools_wanted.connect(do.set_tools)
        self.transcript.attachment_opened.connect(self._open_attachment)
        self.empty.example_chosen.connect(self._send_example)
        self.empty.model_wanted.connect(self._choose_first)
        self.composer.sent.connect(self._send)
        self.composer.stopped.connect(do.stop)
        self.composer.edited.connect(self._on_edited)
        self.attaching = Attaching(do, self.composer, self.documents, self._tell, self._client, self._library, self)
        self.attaching.count_with(self.room.counter)
        do.attached.connect(self.room.count)
        do.told.connect(self._tell)
        do.attached.connect(self._show_place)
        self.composer.system_prompt_changed.connect(do.set_system_prompt)
        self.composer.sampling_changed.connect(do.set_sampling)
        self.composer.sampling_popover.set_default(self._settings.default_sampling)
        self.composer.sampling_popover.default_chosen.connect(self._set_default_sampling)
        self.transcript.rows_wanted.connect(self.tools.to_batch)
        do.shown.connect(self._on_shown)
        do.changed.connect(self._on_changed)
        do.deleted.connect(self._on_deleted)
        self.edits.done.connect(self._tell_undo)
        self.edits.refused.connect(self.toast.show_text)
        self.room.reload_wanted.connect(self.reload_wanted)
        self.room.told.connect(self.notice_banner.show_text)
        self.room.to_new_chat.connect(self._ask_in_new_chat)
        self.room.shown.connect(lambda on: self._box_row.setContentsMargins(24, 8 if on else 0, 24, 0))
        do.queue.phase_changed.connect(self.transcript.set_phase)
        do.model.modelReset.connect(self._show_turns)
        do.model.dataChanged.connect(self._on_turn_changed)
        do.model.rowsInserted.connect(self._on_turns)
        do.model.rowsRemoved.connect(self._on_turns)

    def _connect_services(self) -> None:
        client, store = self._client, self._store
        client.state_changed.connect(self._on_engine)
        client.model_loaded.connect(self._on_model)
        client.loading_changed.connect(self._show_hint)
        store.found.connect(self._on_found)
        store.trouble.connect(self._on_trouble)
        store.notice.connect(self.notice_banner.show_text)
        store.failed.connect(self.notice_banner.show_text)
        self._on_engine(client.state)
        self.composer.set_model(client.model)

    def _add_shortcuts(self) -> None:
        standard = QKeySequence.StandardKey
        for keys, words, do in (
            (QKeySequence(standard.New), self.tr("New chat"), self.new_chat),
            (QKeySequence(standard.Find), self.tr("Find in this chat"), self.find_in_chat),
            (QKeySequence("F3"), self.tr("Next match"), lambda: self._step_match(1)),
            (QKeySequence("Shift+F3"), self.tr("Previous match"), lambda: self._step_match(-1)),
            (QKeySequence("Ctrl+Shift+N"), self.tr("New scratch chat, which is never stored"), self.new_scratch),
            (QKeySequence("Ctrl+K"), self.tr("Search chats"), self.search),
            (QKeySequence("Ctrl+M"), self.tr("Choose the model"), self.choose_model),
            (QKeySequence("F2"), self.tr("Rename chat"), self.rename),
            (QKeySequence("Esc"), self.tr("Stop the answer"), self._escape),
            (QKeySequence(standard.Undo), self.tr("Undo the last deletion or change of a chat"), self._undo),
            (QKeySequence("Ctrl+PgUp"), self.tr("Previous chat"), lambda: self.presenter.step(-1)),
            (QKeySequence("Ctrl+PgDown"), self.tr("Next chat"), lambda: self.presenter.step(1)),
            (QKeySequence("Ctrl+Shift+A"), self.tr("Attach files"), self.attaching.choose),
            (QKeySequence(standard.Print), self.tr("Print the chat"), self._print),
            (QKeySequence("Ctrl+Shift+D"), self.tr("Ask two, side by side"), self.tools.compare),
            (QKeySequence("Ctrl+L"), self.tr("Write a message"), self.composer.setFocus),
        ):
            add_shortcut(self, keys, words, do)
        note_keys(
            self.composer,
            ((self.tr("Enter"), self.tr("Send")), (self.tr("Shift+Enter"), self.tr("Start a new line"))),
        )

    def add_strip(self, make: Callable[[QWidget], QWidget]) -> None:
        """A narrow strip above the composer; created when the engine first has work."""
        self._make_strip = make

    def _show_strip(self) -> None:
        make, self._make_strip = self._make_strip, None
        if make is not None:
            strip = make(self)
            strip.setMaximumWidth(self.composer.maximumWidth())
            self._strip_row.setContentsMargins(24, 0, 24, 8)
            self._strip_row.addWidget(strip)
            self._strip = strip
            self._show_place()

    _make_strip: Callable[[QWidget], QWidget] | None = None
    _strip: QWidget | None = None

    # --- actions of the page ---

    def search(self) -> None:
        self._show_chats(True)
        self.panel.focus_search()

    def new_chat(self) -> None:
        self._show_chats(False)
        self.panel.search.clear()
        self.presenter.new_chat()
        self.composer.setFocus()

    def new_scratch(self) -> None:
        self._show_chats(False)
        self.panel.search.clear()
        self.presenter.new_scratch()
        self.composer.setFocus()

    def _close_scratch(self) -> None:
        self.presenter.delete(self.presenter.conversation.id)
        self.composer.setFocus()

    def find_in_chat(self) -> None:
        self._show_chats(False)
        self.finding.open()

    def _step_match(self, offset: int) -> None:
        if self.finding.is_open:
            self.finding.step(offset)
        else:
            self.find_in_chat()

    def rename(self) -> None:
        self.presenter.keep()
        self._show_chats(True)
        self.panel.rename(self.presenter.conversation.id)

    def choose_model(self) -> None:
        self.picker.open_for(self.title_bar.model_button)

    def _choose_model(self, model: str) -> None:
        if self._told.get(self.presenter.conversation.id):
            self._dismiss()  # it may read what the other could not
        self.presenter.choose_model(model)

    def _choose_first(self) -> None:
        if self._library.was_listed and not self._library.entries:
            self.page_wanted.emit(FIRST_RUN)
        else:
            self.choose_model()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if sources_in(event.mimeData()) and dropped_model(event.mimeData()) is None:
            event.acceptProposedAction()
        else:
            event.ignore()  # a model is for the window

    def dropEvent(self, event: QDropEvent) -> None:
        event.acceptProposedAction()
        self.attaching.give(sources_in(event.mimeData()))

    @property
    def is_in_use(self) -> bool:
        is_edited = any(turn.editor is not None for turn in self.transcript.turns)
        transfers = "transfer" in vars(self) and self.transfer.files.is_busy
        return is_edited or transfers or self.presenter.queue.is_holding or self.attaching.is_busy

    def take_over(self, before: Page) -> None:
        if isinstance(before, ChatView):
            self.presenter.take_over(before.presenter)
            self._show_chats(before._shows_chats)
            if before.panel.search.text():
                self.panel.search.setText(before.panel.search.text())
            if not before.transcript.is_at_end:
                self.transcript.build_all()
                place = partial(
                    self.transcript.verticalScrollBar().setValue, before.transcript.verticalScrollBar().value()
                )
                QTimer.singleShot(0, self, place)

    def close_down(self) -> None:
        """Save everything that is only in memory; called before the window closes."""
        self.presenter.flush()
        self.room.close()
        self.attaching.close()
        if "transfer" in vars(self):
            self.transfer.close()
        self._thumbnails.close()
        self._importing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._close_guard.watch(self.window())
        self.composer.setFocus()

    def focusInEvent(self, event: QFocusEvent) -> None:
        # Not a focus proxy: Tab would go to the composer in the page's place, and past all that is above it.
        super().focusInEvent(event)
        self.composer.setFocus(event.reason())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_widths()

    def _show_chats(self, shown: bool) -> None:
        """Where there is no room for both, the list of chats replaces the chat."""
        self._shows_chats = shown
        self._fit()

    def _fit(self) -> None:
        narrow = self.width() < scaled(PANEL_FROM_PX)
        over = narrow and self._shows_chats
        self.panel.fill(over)
        self.panel.setVisible(not narrow or over)
        self._beside.setVisible(not over)
        self.composer.box.fit()
        self._show_hint()
        self.title_bar.offer_chats(narrow, shown=over)

    def _send_example(self, text: str) -> None:
        self._send(text)
        self.composer.setFocus()

    def _resend(self, message_id: str, text: str) -> None:
        after = self.presenter.model.tree[message_id].parent_id or ""
        self.room.once_it_fits(lambda: self.presenter.resend(message_id, text), after=after, more=text, edited=text)
        self.composer.setFocus()  # the box that had the focus is gone

    def _send(self, text: str) -> None:
        self.room.once_it_fits(lambda: self._send_now(text), more=text)

    def _send_now(self, text: str) -> None:
        if self.presenter.send(text):
            self.composer.set_text("")
            self.transcript.jump_to_end()

    def _once_agreed(self, do: Callable[[], object], to: RemoteModel | None = None) -> None:
        """Does it at once, or, where text would leave this PC for the first time to there, when people agree.

        Args:
            to: who is asked, if that is not who answers in this chat.
        """
        remote = to or self.presenter.remote
        if remote is None or self._endpoints.is_agreed(remote.endpoint):
            do()
            return
        endpoint = remote.endpoint
        details = self.tr(
            "The whole chat goes there, now and with each further message: your messages, their pictures and what "
            "is read of their documents, the answers and the system prompt. What happens with it is up to who runs "
            "that server."
        )
        if endpoint.is_plain:
            details += " " + self.tr("The way there is not encrypted: others in the network can read it.")

        def agree() -> None:
            self._endpoints.agree(endpoint)
            do()

        question = self.tr("Send this chat to {0}?").format(called(endpoint))
        self.question = ask(self.window(), question, details, [(self.tr("Send it there"), "do", agree)])

    question: QMessageBox | None = None

    def _open(self, conversation_id: str, message_id: str) -> None:
        self._show_chats(False)
        is_here = self.presenter.conversation.id == conversation_id
        self._wanted_message, self._wanted_conversation = message_id, conversation_id
        self.presenter.open(conversation_id, message_id or None)
        if message_id and is_here:
            self._wanted_message = ""
            self._show_hit(message_id)

    def _show_hit(self, message_id: str) -> None:
        words = found_words(self.presenter.list_model.snippet_of(message_id))
        self.transcript.show_message(message_id)
        if words:
            self.finding.open(words, message_id)

    _wanted_message = ""
    _wanted_conversation = ""

    def _act(self, message_id: str, action: str) -> None:
        others = {"restart": self.restart_wanted.emit, "fold": self.room.fold, "drop": self.room.drop}
        if action == "delete":
            self.edits.delete(message_id)
        elif action in others:
            others[action]()
        else:
            self._act_on(message_id, action)

    def _act_on_fold(self, message_id: str, action: str) -> None:
        if action == "unfold":
            self.edits.unfold(message_id)
        elif action == "again":
            self.room.fold_again(message_id)
        else:
            self.presenter.model.show_folded(action == "show")

    def _act_on(self, message_id: str, action: str) -> None:
        do = self.presenter
        act = {"regenerate": do.regenerate, "continue": do.continue_answer, "branch": do.branch}[action]

        def act_and_show() -> None:
            act(message_id)
            self.transcript.jump_to_end()

        if action == "branch":  # which asks nobody
            act_and_show()
        else:
            asked = message_id if action == "continue" else self.presenter.model.tree[message_id].parent_id or ""
            self.room.once_it_fits(act_and_show, after=asked, more="")

    def _escape(self) -> None:
        if self._shows_chats and not self._beside.isVisible():
            self._show_chats(False)
            self.composer.setFocus()
        elif self.finding.is_open:
            self.finding.close()
            self.composer.setFocus()
        elif not self.presenter.stop():
            self.composer.setFocus()

    def _undo(self) -> None:
        if self.presenter.undo():
            self.toast.hide()

    def _search(self, text: str) -> None:
        if text:
            self._store.search(text)
        else:
            self.panel.set_nothing_found(False)
            self.presenter.list_model.show_hits(None)

    @cached_property
    def transfer(self) -> ChatTransfer:
        from app.views.chat.chat_transfer import ChatTransfer  # imported late: the window opens sooner

        return ChatTransfer(self.presenter, self._store, self.files_banner, self.toast, self)

    def compare(self, text: str) -> None:
        from app.views.chat.side_by_side import SideBySide  # imported late: few open it

        dialog = SideBySide(
            self.presenter,
            self._client,
            self._library,
            self._endpoints,
            self._presets,
            lambda remote, do: self._once_agreed(do, remote),
            self,
        )
        dialog.load_wanted.connect(self.picker.load_wanted)
        dialog.restart_wanted.connect(self.restart_wanted)
        dialog.comparison.answered.connect(lambda _number, _message: self.composer.set_text(self.presenter.draft))
        dialog.open_for(text)
        self.side_by_side = dialog

    def take_chat(self, chat: Conversation) -> None:
        self.presenter.list_model.put(chat)

    def open_chat(self, chat_id: str) -> None:
        self._open(chat_id, "")

    side_by_side: SideBySide | None = None

    def _set_default_sampling(self, sampling: SamplingParams | None) -> None:
        self._settings.default_sampling = sampling
        self.composer.sampling_popover.set_default(sampling)

    def _print(self) -> None:
        if self.presenter.is_scratch:
            self.toast.show_text(self.tr("A scratch chat is never stored: to print it, keep it first."))
        elif self.presenter.model.rowCount():
            self.presenter.flush()
            self.transfer.print_chat(self.presenter.conversation.id)

    def _open_source(self, source: Source) -> None:
        PassageDialog(source, self.documents.surroundings, self).open()

    def _open_attachment(self, one: Attachment) -> None:
        if one.kind == "folder" and one.path:
            QDesktopServices.openUrl(QUrl.fromLocalFile(one.path))
        elif one.characters:
            self._open_source(Source(0, one.id, one.name, last=_BEGINNING))

    # --- reacting to signals ---

    def _say(self, sentence: str) -> None:
        """A notice that is about no chat."""
        self.notice_banner.show_text(sentence)

    def _tell(self, sentence: str) -> None:
        """A notice about the chat on screen."""
        self._told[self.presenter.conversation.id] = sentence
        self._show_told()

    def _show_told(self) -> None:
        sentence = self._told.get(self.presenter.conversation.id, "")
        if sentence:
            self.notice_banner.show_text(sentence)
        elif self.notice_banner.text in self._told.values():  # of another chat
            self.notice_banner.hide()

    def _dismiss(self) -> None:
        self._told.pop(self.presenter.conversation.id, None)
        self.notice_banner.hide()

    def _on_shown(self, conversation: Conversation) -> None:
        self.room.forget()  # until this chat is counted
        self._show_told()
        if self.presenter.is_scratch:
            words = self.tr("Scratch chat: nothing of it is stored, and it is gone once it is closed.")
            self.scratch_banner.show_text(words)
        else:
            self.scratch_banner.hide()
        if self._wanted_conversation != conversation.id:
            self.finding.close()
        self._on_changed(conversation)
        self.composer.show_conversation(conversation, with_draft=True)
        self.attaching.show()
        self.panel.set_current(conversation.id)
        for turn in self.transcript.turns:
            self.transcript.set_phase(turn.message_id, self.presenter.queue.phase(turn.message_id))
        self.room.count()
        if self._wanted_message:
            message_id, self._wanted_message = self._wanted_message, ""
            self._show_hit(message_id)

    def _on_changed(self, conversation: Conversation) -> None:
        untitled = translate("Chat", "Scratch chat") if self.presenter.is_scratch else translate("Chat", "New chat")
        self.title_bar.set_title(conversation.title or untitled)
        self.composer.show_conversation(conversation, with_draft=False)
        self._show_place()
        self.room.count()

    def _show_place(self) -> None:
        remote = self.presenter.remote
        model = self.presenter.conversation.model
        gone = gone_text(model) if self.presenter.is_elsewhere and remote is None else ""
        self.title_bar.set_remote(remote, gone)
        self.picker.set_chosen(model)
        self.attaching.show()
        self.composer.set_model(None if self.presenter.is_elsewhere else self._client.model)
        if self._strip is not None:
            self._strip.setVisible(not self.presenter.is_elsewhere)  # it is about this PC
        words = self._sent_words(remote) if remote is not None else gone
        if not gone and not self.presenter.reads_pictures:
            there = self.presenter.model.pictures or self.presenter.pictures
            unseen = unseen_text() if remote is not None else unseen_here_text(self.attaching.seeing())
            words = f"{words} {unseen}".strip() if there else words
        set_message(self.sent_note, words)
        self._show_hint()

    def _sent_words(self, remote: RemoteModel) -> str:
        sampling = self.presenter.conversation.sampling
        if sampling is None:
            return leaves_text(remote.endpoint)
        from engine.remote.chat_form import not_taken  # imported late: few chats need it

        return f"{leaves_text(remote.endpoint)} {not_taken_text(not_taken(sampling, remote.endpoint.found))}".strip()

    def _tell_undo(self, words: str) -> None:
        self.toast.show_text(words, self.tr("Undo  Ctrl+Z"), self._undo)

    def _ask_in_new_chat(self, text: str) -> None:
        self.new_chat()
        self.composer.box.setPlainText(text)

    def _on_deleted(self, conversation: Conversation) -> None:
        if self._store.leaves_out(conversation.id):
            self.toast.show_text(self.tr("The scratch chat is gone."))
            return
        title = conversation.title or translate("Chat", "New chat")
        short = title if len(title) <= 40 else title[:39] + "…"
        self.toast.show_text(self.tr("“{0}” was deleted.").format(short), self.tr("Undo  Ctrl+Z"), self._undo)

    def _show_turns(self) -> None:
        self._pages.setCurrentWidget(self.transcript if self.presenter.model.rowCount() else self.empty)
        self.composer.set_answering(self.presenter.answering_id is not None)

    def _on_turns(self) -> None:
        self._show_turns()
        self._show_place()  # which says what becomes of pictures
        self.room.count()

    def _on_turn_changed(self) -> None:
        """Often, while an answer is written: what a long chat takes time for is for `_on_turns`."""
        self.composer.set_answering(self.presenter.answering_id is not None)
        self.room.count()

    def _on_edited(self, text: str) -> None:
        self.presenter.set_draft(text)
        self.room.count()

    def _on_found(self, text: str, hits: tuple[SearchHit, ...]) -> None:
        if text == self.panel.search.text().strip():
            self.presenter.list_model.show_hits(hits)
            self.panel.set_nothing_found(not hits)

    def _on_trouble(self, sentence: str) -> None:
        if sentence:
            self.trouble_banner.show_text(sentence)
        else:
            self.trouble_banner.hide()

    def _on_engine(self, state: EngineState) -> None:
        if state is EngineState.BUSY:
            self._show_strip()
        self.transcript.set_engine_down(state is EngineState.DIED)
        self._show_hint()
        self.room.count()

    def _on_model(self, model: ModelInfo) -> None:
        if model.template_note:
            self.notice_banner.show_text(model.template_note)
        self._show_hint()
        self.room.count()
        if not self.presenter.is_elsewhere:
            self.composer.set_model(model)
            self._show_place()  # which says what it reads

    def _show_hint(self) -> None:
        state, model = self._client.state, self._client.model
        if self.presenter.is_elsewhere:
            self.empty.set_hint(self.sent_note.text(), offer_models=self.presenter.remote is None)
            self.model_note.hide()
            return
        if state in (EngineState.LOADING, EngineState.STARTING):
            part = "" if self._client.loading is None else f" {percent(self._client.loading)}"
            hint = self.tr("The model is loading{0}. You can write now; the answer follows.").format(part)
        elif model is None:
            hint = self.tr("No model is loaded. You can write now; the answer follows once one is loaded.")
        else:
            hint = self.tr("{0} runs on this machine; nothing you write leaves it.").format(model.name)
        self.empty.set_hint(hint, offer_models=model is None and state is EngineState.READY)
        is_starter = model is not None and model.name.casefold() == STARTER
        self.model_note.setVisible(is_starter and self.height() >= scaled(NOTE_FROM_PX))

    def _set_widths(self) -> None:
        width = scaled(COLUMN_PX)
        self.composer.setMaximumWidth(width)
        self.batch_hint.setMaximumWidth(width)
        self.toast.set_widest(width)
        self._fit()


def _group_title(group: Group) -> str:
    return {
        Group.SCRATCH: translate("Chat", "Scratch, not stored"),
        Group.FOLDER: translate("Chat", "Folders"),
        Group.PINNED: translate("Chat", "Pinned"),
        Group.TODAY: translate("Chat", "Today"),
        Group.YESTERDAY: translate("Chat", "Yesterday"),
        Group.WEEK: translate("Chat", "Previous 7 days"),
        Group.OLDER: translate("Chat", "Older"),
        Group.FOUND: translate("Chat", "Found"),
    }[group]
