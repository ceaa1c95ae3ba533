"""The dialog for a model whose makers ask for something first: what to accept and where, and an access token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QWidget

from app.widgets.scaffold import FormDialog, line_edit, muted_label, push_button, set_message, text_label, warning_label

if TYPE_CHECKING:
    from app.services.downloads import Downloads
    from engine.checkpoint.downloads.queue import Download

translate = QCoreApplication.translate


class TokenDialog(FormDialog):
    """Asks for a hub's access token."""

    def __init__(
        self, name: str, page: str, host: str, sentence: str, save: Callable[[str], object], parent: QWidget
    ) -> None:
        super().__init__("", translate("TokenDialog", "Save and download"), parent, width_px=480)
        self._save = save
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Access to {0}").format(name))
        refused = warning_label(self)
        set_message(refused, sentence)
        first = self.tr("1. Open the page of {0}, sign in, and accept what is asked there.").format(name)
        self.open_page = push_button(
            self, self.tr("Open {0}").format(page), lambda: QDesktopServices.openUrl(QUrl(page))
        )
        second = self.tr("2. Create an access token (reading is enough) in your settings there, and paste it here.")
        self.field = line_edit(self, self.tr("Access token"), secret=True, hints=True)
        for widget in (
            text_label(self, self.tr("Its makers ask you to accept their terms first"), role="heading", wrap=True),
            refused,
            muted_label(self, first, role=""),
            self.open_page,
            muted_label(self, second, role=""),
            self.field,
        ):
            self.add_across(widget)
        kept = self.tr(
            "It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone."
        )
        self.said.setText(kept.format(host))
        self.save = self.keep
        self.save.setEnabled(False)
        self.field.textChanged.connect(lambda text: self.save.setEnabled(bool(text.strip())))
        self.field.setFocus()

    def kept(self) -> None:
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
