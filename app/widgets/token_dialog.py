"""The dialog for a model whose makers ask for something first: what to accept and where, and an access token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QWidget

from app.theme import scaled
from app.widgets.scaffold import line_edit, muted_label, push_button, set_message, text_label, vbox, warning_label

if TYPE_CHECKING:
    from app.services.downloads import Downloads
    from engine.checkpoint.downloads.queue import Download

WIDTH_PX = 480


class TokenDialog(QDialog):
    """Asks for a hub's access token.

    Args:
        name: the model.
        page: address of its page, where its terms are accepted.
        host: the hub the token is for; it is sent nowhere else.
        sentence: what the hub said; empty before it was asked.
        save: keeps the token.
    """

    def __init__(
        self, name: str, page: str, host: str, sentence: str, save: Callable[[str], object], parent: QWidget
    ) -> None:
        super().__init__(parent)
        self._save, self._page = save, page
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Access to {0}").format(name))
        heading = text_label(self, self.tr("Its makers ask you to accept their terms first"), role="heading", wrap=True)
        said = warning_label(self)
        set_message(said, sentence)
        first = muted_label(
            self, self.tr("1. Open the page of {0}, sign in, and accept what is asked there.").format(name), role=""
        )
        self.open_page = push_button(
            self, self.tr("Open {0}").format(page), lambda: QDesktopServices.openUrl(QUrl(self._page))
        )
        second = muted_label(
            self, self.tr("2. Create an access token (reading is enough) in your settings there, and paste it here."),
            role="",
        )  # fmt: skip
        self.field = line_edit(self, self.tr("Access token"), secret=True, hints=True)
        kept = muted_label(
            self,
            self.tr(
                "It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone."
            ).format(host),
        )
        self.buttons = QDialogButtonBox(self)
        self.save = self.buttons.addButton(self.tr("Save and download"), QDialogButtonBox.ButtonRole.AcceptRole)
        self.save.setProperty("kind", "primary")
        self.buttons.addButton(self.tr("Cancel"), QDialogButtonBox.ButtonRole.RejectRole)
        self.save.setEnabled(False)
        vbox(
            heading,
            said,
            first,
            self.open_page,
            second,
            self.field,
            kept,
            self.buttons,
            into=self,
            margins=(20, 18, 20, 18),
            gap=10,
        )
        self._fit()
        self.field.textChanged.connect(lambda text: self.save.setEnabled(bool(text.strip())))
        self.buttons.accepted.connect(self._on_accepted)
        self.buttons.rejected.connect(self.reject)
        self.field.setFocus()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self.layout() is not None:
            self._fit()

    def _fit(self) -> None:
        """As high as its sentences need at its width."""
        width = scaled(WIDTH_PX)
        self.resize(width, self.heightForWidth(width))

    def _on_accepted(self) -> None:
        token = self.field.text().strip()
        self.field.clear()
        self._save(token)
        self.accept()


def ask_token_of(download: Download, downloads: Downloads, parent: QWidget) -> None:
    """Tells how to get at a download that the hub refused; with a token it goes on."""
    from engine.checkpoint.hub.repository import HUGGINGFACE, place_of

    hub, _, name = download.reference.rpartition(":")[0].rpartition(":")
    page = place_of(hub or HUGGINGFACE, name).link
    host = QUrl(page).host()

    def save(token: str) -> None:
        downloads.save_token(host, token, lambda _stays: downloads.resume(download.key))

    TokenDialog(name, page, host, download.problem, save, parent).open()
