"""Files, folders and pictures for the next message: chosen, pasted or dropped, read, and shown above the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.services.chat_store import Attachment
from app.services.documents import Documents
from app.services.engine_client import EngineClient
from app.services.library import Library
from app.services.pictures import Pictures, Prepared, Source, is_picture, size_of, tokens_of, too_many
from app.services.token_counter import TokenCounter
from app.views.chat.composer import Composer
from app.views.chat.phrases import picture_text, text_only_text, translate
from app.views.chat.presenter import ChatPresenter
from app.widgets.asking import ask_paths
from engine.common.chat import Picture
from engine.common.pictures import MOST_PICTURES, SUFFIXES
from engine.remote.endpoint import called

MOST_DOCUMENTS = 50


def caption(picture: Picture, model_path: str) -> str:
    size = size_of(picture)
    tokens = tokens_of((picture,), model_path) if model_path else 0
    return picture_text(size.width(), size.height(), tokens or None) if size.isValid() else ""


class Attaching(QObject):
    """Attaches them to the chat on screen."""

    def __init__(
        self,
        presenter: ChatPresenter,
        composer: Composer,
        documents: Documents,
        tell: Callable[[str], object],
        client: EngineClient,
        library: Library,
        page: QWidget,
    ) -> None:
        super().__init__(page)
        self._client, self._library = client, library
        presenter.sees_here = self.sees_here
        self._presenter, self._composer, self._tell, self._page = presenter, composer, tell, page
        self._pictures, self._documents = Pictures(self), documents
        composer.files_wanted.connect(self.choose)
        composer.folder_wanted.connect(
            lambda: ask_paths(page, translate("Chat", "Attach a folder"), self.give, folder=True)
        )
        composer.given.connect(self.give)
        composer.picture_removed.connect(self._remove)
        composer.attachment_removed.connect(self._remove_document)
        documents.advanced.connect(self._on_advanced)
        presenter.attached.connect(self.show)

    def sees_here(self) -> bool:
        """Whether the model on this PC reads pictures: the loaded one, or that which is being loaded; while there is
        none, any that could be."""
        if self._client.model is not None:
            return self._client.model.sees
        coming = self._client.config.model if self._client.config is not None else ""
        entry = self._library.entry(coming) if coming else None
        return entry.sees if entry is not None else bool(self.seeing())

    def seeing(self) -> list[str]:
        return [entry.name for entry in self._library.entries if entry.sees and entry.can_chat]

    def _why_blind(self) -> str:
        model = self._client.model
        return text_only_text(self._presenter.remote, model.name if model is not None else "", self.seeing())

    def count_with(self, counter: TokenCounter) -> None:
        self._counter = counter
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
        remote = self._presenter.remote
        where = "" if remote is None else remote.endpoint.name or called(remote.endpoint)
        model = self._client.model if not self._presenter.is_elsewhere else None
        pictures = self._presenter.pictures
        captions = [caption(each, model.path if model is not None and model.sees else "") for each in pictures]
        self._composer.show_attached(pictures, self._presenter.attachments, where, captions)
        in_turns = (one for row in self._presenter.model.rows for one in row.message.attachments)
        self._documents.resume((*self._presenter.attachments, *in_turns))

    def choose(self) -> None:
        pictures = translate("Chat", "Pictures ({0})").format(" ".join(f"*{suffix}" for suffix in SUFFIXES))
        kinds = f"{translate('Chat', 'All files (*)')};;{pictures}"
        ask_paths(self._page, translate("Chat", "Attach files"), self.give, kinds=kinds)

    def give(self, sources: Sequence[Source]) -> None:
        paths = [source for source in sources if isinstance(source, Path) and not is_picture(source)]
        pictures = [source for source in sources if is_picture(source)]
        if paths:
            self._attach(paths)
        if pictures and not self._presenter.reads_pictures:
            self._tell(self._why_blind())
        elif pictures:
            here = self._presenter.conversation.id
            beside = (*self._presenter.model.pictures, *self._presenter.pictures)
            self._pictures.prepare(pictures, beside, lambda prepared: self._on_prepared(here, prepared))

    @property
    def is_busy(self) -> bool:
        return self._pictures.is_busy

    def close(self) -> None:
        self._pictures.close()

    def _attach(self, paths: Sequence[Path]) -> None:
        there = self._presenter.attachments
        known = {one.path for one in there}
        fresh = [path for path in dict.fromkeys(paths) if str(path.absolute()) not in known]
        if len(there) + len(fresh) > MOST_DOCUMENTS:
            words = self.tr("A message takes up to {0} documents: attach the folder that they are in.")
            self._tell(words.format(MOST_DOCUMENTS))
            fresh = fresh[: max(MOST_DOCUMENTS - len(there), 0)]
        found = self._documents.attach(fresh, is_scratch=self._presenter.is_scratch)
        self._presenter.attach_documents((*there, *found))
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
