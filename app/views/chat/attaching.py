"""Pictures for the next message: chosen, pasted or dropped, prepared, and shown above the box that one writes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.services.pictures import Pictures, Prepared, Source, is_picture, too_many
from app.views.chat.composer import Composer
from app.views.chat.file_dialogs import ask_pictures
from app.views.chat.phrases import not_attached_text, text_only_text
from app.views.chat.presenter import ChatPresenter
from engine.remote.picture_files import MOST_PICTURES


class Attaching(QObject):
    """Attaches them to the chat on screen.

    Args:
        tell: shows a sentence on what cannot be attached.
    """

    def __init__(
        self, presenter: ChatPresenter, composer: Composer, tell: Callable[[str], object], page: QWidget
    ) -> None:
        super().__init__(page)
        self._presenter, self._composer, self._tell, self._page = presenter, composer, tell, page
        self._pictures = Pictures(self)
        composer.pictures_wanted.connect(self.choose)
        composer.given.connect(self.give)
        composer.picture_removed.connect(self._remove)
        presenter.attached.connect(composer.show_pictures)

    def choose(self) -> None:
        """Asks for files."""
        if self._may():
            ask_pictures(self._page, self.give)

    def give(self, sources: Sequence[Source]) -> None:
        """Attaches the pictures once they are prepared, as far as they can be sent; says that nothing else can be."""
        others = [source.name for source in sources if isinstance(source, Path) and not is_picture(source)]
        pictures = [source for source in sources if is_picture(source)]
        if pictures and not self._may():
            return
        if others:
            self._tell(not_attached_text(others, reads_pictures=self._presenter.reads_pictures))
        if pictures:
            here = self._presenter.conversation.id
            beside = (*self._presenter.model.pictures, *self._presenter.pictures)
            self._pictures.prepare(pictures, beside, lambda prepared: self._on_prepared(here, prepared))

    def close(self) -> None:
        """Waits for what is being prepared."""
        self._pictures.close()

    def _may(self) -> bool:
        """Whether who answers reads pictures; if not it says so."""
        if not self._presenter.reads_pictures:
            self._tell(text_only_text(self._presenter.remote))
        return self._presenter.reads_pictures

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
