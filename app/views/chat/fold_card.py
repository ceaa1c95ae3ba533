"""What a model reads instead of the earlier turns of a chat: their summary, or that they are left out."""

from __future__ import annotations

from typing import Literal

from PySide6.QtCore import QEvent, QRect, QSize, Signal
from PySide6.QtWidgets import QFrame, QPushButton, QSizePolicy, QWidget

from app.icons import IconMark
from app.models.conversation import FoldCard as Card
from app.models.conversation import MessageRow
from app.theme import scaled
from app.views.chat.thought import MessageEditor
from app.widgets.flow_layout import Flow
from app.widgets.quantities import count
from app.widgets.scaffold import TOP, WrappedLabel, hbox, push_button, text_label, vbox

CARD_PX = 680

FoldAction = Literal["show", "hide", "unfold", "again"]


class FoldCard(QFrame):
    """Signals: `acted` (a `FoldAction`), `rewritten` (another summary)."""

    acted = Signal(str)
    rewritten = Signal(str)

    def __init__(self, row: MessageRow, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._row = row
        self.editor: MessageEditor | None = None
        self._title = text_label(self, role="heading", wrap=True)
        head = hbox((IconMark("fold", "muted", 18, self), TOP), (self._title, 1))
        self.summary = WrappedLabel("", self)
        self.note = WrappedLabel("", self, role="secondary")
        self.show_button = self._button("", self._toggle)
        self.edit_button = self._button(self.tr("Edit the summary"), self.start_editing)
        self.again_button = self._button(self.tr("Summarise again"), lambda: self.acted.emit("again"))
        self.unfold_button = self._button(self.tr("Send the turns again"), lambda: self.acted.emit("unfold"))
        self.unfold_button.setToolTip(self.tr("The model reads the turns themselves again, as far as they fit."))
        self._actions = Flow(
            self.show_button, self.edit_button, self.again_button, self.unfold_button, parent=self, gap=4
        )
        self._column = vbox(head, self.summary, self.note, self._actions, into=self, margins=(16, 12, 12, 10))
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self._set_width()
        self.set_row(row)

    @property
    def message_id(self) -> str:
        return self._row.message.id

    @property
    def title(self) -> str:
        return self._title.text()

    def set_row(self, row: MessageRow) -> None:
        self._row = row
        card = row.card
        assert card is not None
        summary = card.fold.summary
        self._title.setText(self._heading(card))
        self.setAccessibleName(f"{self._title.text()}. {summary}")
        self.summary.setText(summary)
        self.summary.setVisible(bool(summary) and self.editor is None)
        self.note.setText(self._note(card))
        self.show_button.setText(self.tr("Hide the turns") if card.is_open else self.tr("Show the turns"))
        self.show_button.setVisible(card.turns > 0)
        self.edit_button.setText(self.tr("Edit the summary") if summary else self.tr("Write a summary"))
        self.again_button.setVisible(card.is_outdated)

    def find_text(self, text: str) -> int:  # noqa: ARG002
        """See `Findable`; a summary is not searched, what it stands for is."""
        return 0

    def show_match(self, number: int | None) -> QRect:  # noqa: ARG002
        return self.rect()

    def start_editing(self) -> None:
        card = self._row.card
        if self.editor is not None or card is None:
            return
        editor = self.editor = MessageEditor(card.fold.summary, self.tr("Summary of the earlier turns"), self)
        editor.saved.connect(self._on_saved)
        editor.cancelled.connect(self.stop_editing)
        self.summary.hide()
        self._actions.hide()
        self._column.insertWidget(2, editor)
        editor.box.setFocus()

    def stop_editing(self) -> None:
        if self.editor is not None:
            self.editor.hide()
            self.editor.deleteLater()
            self.editor = None
            self._actions.show()
            self.set_row(self._row)
            self.edit_button.setFocus()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._set_width()

    def _on_saved(self, text: str) -> None:
        self.stop_editing()
        self.rewritten.emit(text)

    def _toggle(self) -> None:
        card = self._row.card
        self.acted.emit("hide" if card is not None and card.is_open else "show")

    def _heading(self, card: Card) -> str:
        if card.fold.summary:
            one, more = self.tr("Summary of one earlier turn"), self.tr("Summary of {0} earlier turns", "", card.turns)
        else:
            one, more = (
                self.tr("One earlier turn is left out"),
                self.tr("{0} earlier turns are left out", "", card.turns),
            )
        return one if card.turns == 1 else more.format(count(card.turns))

    def _note(self, card: Card) -> str:
        if card.is_outdated:
            return self.tr("These turns were changed since the summary was made.")
        if not card.fold.summary:
            return self.tr("The model reads nothing of them. They are kept, and can be sent again.")
        by = card.fold.model or self.tr("you")
        return self.tr("The model reads this instead of the turns, which are kept. Written by {0}.").format(by)

    def _button(self, text: str, do: object) -> QPushButton:
        button = push_button(self, text, kind="quiet")
        button.setProperty("compact", "true")
        button.clicked.connect(lambda: do())  # type: ignore[operator]
        return button

    def _set_width(self) -> None:
        self.setMaximumWidth(scaled(CARD_PX))
