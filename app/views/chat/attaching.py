"""Files, folders and pictures for the next message: chosen, pasted or dropped, read, and shown above the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.services.chat_store import Attachment
from app.services.documents import Documents
from app.services.engine_client import EngineClient
from app.services.pictures import Pictures, Prepared, Source, is_picture, too_many
from app.services.token_counter import TokenCounter
from app.views.chat.composer import Composer
from app.views.chat.file_dialogs import ask_attachments
from app.views.chat.phrases import no_documents_text, text_only_text
from app.views.chat.presenter import ChatPresenter
from engine.common.pictures import MOST_PICTURES
from engine.remote.endpoint import called

MOST_DOCUMENTS = 50


class Attaching(QObject):
    """Attaches them to the chat on screen.

    Args:
        tell: shows a sentence on what cannot be attached.
    """

    def __init__(
        self,
        presenter: ChatPresenter,
        composer: Composer,
        documents: Documents,
        tell: Callable[[str], object],
        page: QWidget,
    ) -> None:
        super().__init__(page)
        self._presenter, self._composer, self._tell, self._page = presenter, composer, tell, page
        self._pictures, self._documents = Pictures(self), documents
        composer.files_wanted.connect(self.choose)
        composer.folder_wanted.connect(lambda: ask_attachments(page, self.give, folder=True))
        composer.given.connect(self.give)
        composer.picture_removed.connect(self._remove)
        composer.attachment_removed.connect(self._remove_document)
        documents.advanced.connect(self._on_advanced)
        presenter.attached.connect(self.show)

    def count_with(self, counter: TokenCounter, client: EngineClient) -> None:
        """Counts a sample of each document by the model's own tokenizer, as far as one is loaded."""

        self._counter, self._client = counter, client
        self._documents.changed.connect(self._count)

    def _count(self, one: Attachment) -> None:
        if one.tokens or not one.characters or self._client.model is None:
            return
        path, counter = self._client.model.path, self._counter

        def measure(texts: tuple[str, ...]) -> None:
            characters = sum(map(len, texts))
            if characters:
                counter.measure(path, texts, lambda tokens: self._documents.set_tokens(one.id, tokens / characters))

        self._documents.sample(one, measure)

    def _on_advanced(self, document_id: str) -> None:
        self._composer.attachments.update_one(document_id)

    def show(self) -> None:
        """Shows what goes with the next message, and goes on with what is in this chat."""
        remote = self._presenter.remote
        where = "" if remote is None else remote.endpoint.name or called(remote.endpoint)
        self._composer.show_attached(self._presenter.pictures, self._presenter.attachments, where)
        in_turns = (one for row in self._presenter.model.rows for one in row.message.attachments)
        self._documents.resume((*self._presenter.attachments, *in_turns))

    def choose(self) -> None:
        """Asks for files."""
        ask_attachments(self._page, self.give)

    def give(self, sources: Sequence[Source]) -> None:
        """Attaches what can be; says what else there was."""
        paths = [source for source in sources if isinstance(source, Path) and not is_picture(source)]
        pictures = [source for source in sources if is_picture(source)]
        if paths and self._presenter.is_scratch:
            self._tell(no_documents_text())
        elif paths:
            self._attach(paths)
        if pictures and not self._presenter.reads_pictures:
            self._tell(text_only_text(self._presenter.remote))
        elif pictures:
            here = self._presenter.conversation.id
            beside = (*self._presenter.model.pictures, *self._presenter.pictures)
            self._pictures.prepare(pictures, beside, lambda prepared: self._on_prepared(here, prepared))

    @property
    def is_busy(self) -> bool:
        return self._pictures.is_busy

    def close(self) -> None:
        """Waits for what is being prepared."""
        self._pictures.close()

    def _attach(self, paths: Sequence[Path]) -> None:
        there = self._presenter.attachments
        known = {one.path for one in there}
        fresh = [path for path in dict.fromkeys(paths) if str(path.absolute()) not in known]
        if len(there) + len(fresh) > MOST_DOCUMENTS:
            words = self.tr("A message takes up to {0} documents: attach the folder that they are in.")
            self._tell(words.format(MOST_DOCUMENTS))
            fresh = fresh[: max(MOST_DOCUMENTS - len(there), 0)]
        self._presenter.attach_documents((*there, *self._documents.attach(fresh)))
        self._composer.setFocus()

    def _on_prepared(self, conversation_id: str, prepared: Prepared) -> None:
        if conversation_id != self._presenter.conversation.id:
            return  # another chat is on screen by now
        problems = list(prepared.problems)
        pictures = (*self._presenter.pictures, *prepared.pictures)
        if len(pictures) > MOST_PICTURES:
            problems.append(too_many())
        if prepared.pictures:
            self._presenter.attach(pictures[:MOST_PICTURES])
        if problems:
            self._tell(" ".join(problems))
        self._composer.setFocus()

    def _remove(self, number: int) -> None:
        pictures = list(self._presenter.pictures)
        del pictures[number]
        self._presenter.attach(pictures)
        self._composer.setFocus()  # the button that had it is gone

    def _remove_document(self, attachment_id: str) -> None:
        self._presenter.attach_documents([one for one in self._presenter.attachments if one.id != attachment_id])
        self._documents.forget([attachment_id])
        self._composer.setFocus()
