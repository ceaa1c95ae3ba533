"""Servers elsewhere that may answer chats and jobs: which there are, and what each was seen to be."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, QTimer
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QScrollArea, QWidget

from app.services.endpoints import Endpoints
from app.views.settings.card import Row, SettingsCard
from app.views.settings.server_dialog import ServerDialog, found_text, money_text
from app.widgets.asking import ask
from app.widgets.scaffold import muted_label, push_button, set_message, vbox, warning_label
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, called

if TYPE_CHECKING:
    from engine.remote.nearby import Nearby

translate = QCoreApplication.translate


class ServersCard(SettingsCard):
    def __init__(self, endpoints: Endpoints, parent: QWidget | None = None) -> None:
        super().__init__(translate("ServersCard", "Remote servers"), parent)
        self._endpoints = endpoints
        self.add = push_button(self, self.tr("Add…"), lambda: self.edit(None), name=self.tr("Add a server"))
        words = self.tr(
            "vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you "
            "choose it."
        )
        self.look = push_button(self, self.tr("Look on this network"), self._look_around)
        self.add_row(self.tr("Models that run elsewhere"), words, self.look, self.add)
        self._seen = muted_label(self)
        self.add_wide(self._seen)
        self._seen.hide()
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        self.rows = QWidget(self)
        self._lines = vbox(into=self.rows, gap=12)
        self.add_wide(self.rows)
        self.dialog: ServerDialog | None = None
        endpoints.changed.connect(self._show)
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._endpoints.look_again()

    def edit(self, endpoint: Endpoint | None, near: Nearby | None = None) -> None:
        self.dialog = ServerDialog(self._endpoints, endpoint, self.window())
        if near is not None:
            self.dialog.address.setText(near.url)
            self.dialog.name.setText(near.name)
        if endpoint is None:
            self.dialog.accepted.connect(self._show_new)
        self.dialog.open()

    def _show_new(self) -> None:
        """Scrolls to the servers, as the new one may be below the page's end."""
        area: QWidget | None = self
        while area is not None and not isinstance(area, QScrollArea):
            area = area.parentWidget()
        if area is not None:
            QTimer.singleShot(0, self.rows, partial(area.ensureWidgetVisible, self.rows))

    def _look_around(self) -> None:
        self.look.setEnabled(False)
        self._tell(self.tr("Looking…"))
        self._endpoints.look_around(self.show_near, self._on_not_looked)

    def show_near(self, found: tuple[Nearby, ...]) -> None:
        self.look.setEnabled(True)
        known = {endpoint.url for endpoint in self._endpoints.entries}
        self._near = tuple(each for each in found if each.url not in known)
        if not found:
            self._tell(
                self.tr(
                    "No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https "
                    "--announce NAME” in this network."
                )
            )
        elif not self._near:
            self._tell(self.tr("All that answered are in the list."))
        else:
            self._tell("")
        self._show()

    def _tell(self, words: str) -> None:
        set_message(self._seen, words)

    def _on_not_looked(self, error: Exception) -> None:
        self.look.setEnabled(True)
        self._tell("")
        self._on_failed(error)

    _near: tuple[Nearby, ...] = ()

    def _show(self) -> None:
        set_message(self.trouble, self._endpoints.problem)
        while (item := self._lines.takeAt(0)) is not None:
            if (row := item.widget()) is not None:
                row.hide()
                row.deleteLater()
        for endpoint in self._endpoints.entries:
            self._lines.addWidget(self._row(endpoint))
        known = {endpoint.url for endpoint in self._endpoints.entries}
        near = [each for each in self._near if each.url not in known]
        for each in near:
            self._lines.addWidget(self._near_row(each))
        self.rows.setVisible(bool(self._endpoints.entries or near))

    def _near_row(self, near: Nearby) -> QWidget:
        add = push_button(
            self.rows, self.tr("Add…"), lambda: self.edit(None, near), name=self.tr("Add {0}").format(near.name)
        )
        return Row(near.name, self.tr("Found on this network · {0}").format(near.url), (add,), self.rows)

    def _row(self, endpoint: Endpoint) -> QWidget:
        words = "\n".join(filter(None, (found_text(endpoint.found), money_text(endpoint))))
        edit = push_button(
            self.rows, self.tr("Edit…"), lambda: self.edit(endpoint), name=self.tr("Edit {0}").format(endpoint.name)
        )
        remove = push_button(
            self.rows,
            self.tr("Remove"),
            lambda: self._ask_to_remove(endpoint),
            name=self.tr("Remove {0}").format(endpoint.name),
        )
        return Row(called(endpoint), words, (edit, remove), self.rows)

    def _ask_to_remove(self, endpoint: Endpoint) -> None:
        details = self.tr(
            "Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself."
        )
        remove = (self.tr("Remove"), "destroy", lambda: self._endpoints.remove(endpoint, self._on_failed))
        ask(self.window(), self.tr("Remove {0}?").format(endpoint.name), details, [remove])  # type: ignore[list-item]

    def _on_failed(self, error: Exception) -> None:
        if not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message)
