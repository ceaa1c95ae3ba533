"""What else can be done with a message: saved prompts, two answers side by side, and every row of a file."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, QPoint, Signal
from PySide6.QtWidgets import QMenu, QWidget

from app.icons import IconButton, icon
from app.services.kept import SavedPrompts
from app.views.chat.composer import Composer
from app.views.chat.presenter import ChatPresenter
from app.views.chat.prompt_popover import PromptPopover
from app.widgets.page import BatchDraft


class MessageTools(QObject):
    """The buttons beside the message, and what they open."""

    batch_wanted = Signal(object)

    def __init__(
        self,
        presenter: ChatPresenter,
        composer: Composer,
        prompts: SavedPrompts,
        tell: Callable[[str], object],
        compare: Callable[[str], object],
        page: QWidget,
    ) -> None:
        super().__init__(page)
        self._presenter, self._composer, self._prompts, self._compare = presenter, composer, prompts, compare
        self.popover = PromptPopover(prompts, page)
        self.popover.chosen.connect(self._insert)
        self.popover.typed.connect(self._insert)
        prompts.trouble.connect(tell)
        self.prompts_button = IconButton("prompts", self.tr("Saved prompts  /"), self.open_prompts, composer)
        self.more_button = IconButton("more", self.tr("More for this message"), self._open_more, composer)
        for button in (self.prompts_button, self.more_button):
            composer.add_tool(button)
        composer.box.slashed.connect(self._on_slash)
        prompts.changed.connect(self._on_prompts)
        self._on_prompts()

    def open_prompts(self) -> None:
        self.popover.open_list(self.prompts_button, self._composer.text)

    def compare(self) -> None:
        self._compare(self._composer.text)

    def to_batch(self, text: str) -> None:
        """Hands a text to Batch, with the chat's system prompt and sampling."""
        chat = self._presenter.conversation
        self.batch_wanted.emit(BatchDraft(text, chat.system_prompt, chat.sampling))

    def last_question(self) -> str:
        asked = (row.message.content for row in reversed(self._presenter.model.rows) if row.message.role == "user")
        return self._composer.text if self._composer.text.strip() else next(asked, "")

    def menu(self) -> QMenu:
        menu, text = QMenu(self._composer), self._composer.text
        menu.addAction(icon("prompts"), self.tr("Saved prompts…\t/"), self.open_prompts)
        save = menu.addAction(self.tr("Save this message as a prompt…"))
        save.triggered.connect(lambda: self.popover.open_editor(self.prompts_button, text))
        save.setEnabled(bool(text.strip()))
        menu.addSeparator()
        menu.addAction(icon("columns"), self.tr("Ask two, side by side…\tCtrl+Shift+D"), self.compare)
        rows = menu.addAction(icon("rows"), self.tr("Ask this of every row of a file…"))
        rows.triggered.connect(lambda: self.to_batch(self.last_question()))
        rows.setEnabled(bool(self.last_question().strip()))
        return menu

    def _open_more(self) -> None:
        menu = self.menu()
        menu.aboutToHide.connect(menu.deleteLater)
        at = self.more_button.mapToGlobal(QPoint(0, 0))
        menu.popup(at - QPoint(0, menu.sizeHint().height() + 4))

    def _on_slash(self) -> None:
        self.popover.open_list(self.prompts_button, "", by_slash=True)

    def _on_prompts(self) -> None:
        self._composer.box.opens_prompts = bool(self._prompts.entries)

    def _insert(self, text: str) -> None:
        self._composer.box.insertPlainText(text)
        self._composer.setFocus()
