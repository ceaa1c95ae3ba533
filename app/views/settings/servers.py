"""Servers elsewhere that may answer chats and jobs: which there are, and what each was seen to be."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QLabel, QPushButton, QVBoxLayout, QWidget

from app.services.endpoints import Endpoints
from app.views.settings.card import SettingsCard
from app.views.settings.server_dialog import ServerDialog
from app.views.settings.server_words import found_text, money_text
from app.widgets.asking import ask
from app.widgets.card import muted_label, set_message, warning_label
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, called


class ServersCard(SettingsCard):
    """A row for each server, and the way to another."""

    def __init__(self, endpoints: Endpoints, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Other servers"))
        self._endpoints = endpoints
        self.add = QPushButton(self.tr("Add…"), self)
        self.add.setAccessibleName(self.tr("Add a server"))
        self.add.clicked.connect(lambda: self.edit(None))
        words = self.tr(
            "vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you "
            "choose it."
        )
        self.add_row(self.tr("Models that run elsewhere"), words, self.add)
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        self.rows = QWidget(self)
        self._lines = QVBoxLayout(self.rows)
        self._lines.setContentsMargins(0, 0, 0, 0)
        self._lines.setSpacing(12)
        self.add_wide(self.rows)
        self.dialog: ServerDialog | None = None
        endpoints.changed.connect(self._show)
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._endpoints.look_again()

    def edit(self, endpoint: Endpoint | None) -> None:
        """Opens the dialog for one, or for a new one."""
        self.dialog = ServerDialog(self._endpoints, endpoint, self.window())
        self.dialog.open()

    def _show(self) -> None:
        set_message(self.trouble, self._endpoints.problem)
        while (item := self._lines.takeAt(0)) is not None:
            if (row := item.widget()) is not None:
                row.hide()
                row.deleteLater()
        for endpoint in self._endpoints.entries:
            self._lines.addWidget(self._row(endpoint))
        self.rows.setVisible(bool(self._endpoints.entries))

    def _row(self, endpoint: Endpoint) -> QWidget:
        row = QWidget(self.rows)
        name = QLabel(called(endpoint), row)
        name.setTextFormat(Qt.TextFormat.PlainText)
        name.setWordWrap(True)
        words = muted_label(row, "\n".join(filter(None, (found_text(endpoint.found), money_text(endpoint)))))
        words.setTextFormat(Qt.TextFormat.PlainText)
        edit = QPushButton(self.tr("Edit…"), row)
        edit.setAccessibleName(self.tr("Edit {0}").format(endpoint.name))
        edit.clicked.connect(lambda: self.edit(endpoint))
        remove = QPushButton(self.tr("Remove"), row)
        remove.setAccessibleName(self.tr("Remove {0}").format(endpoint.name))
        remove.clicked.connect(lambda: self._ask_to_remove(endpoint))
        left = QVBoxLayout()
        left.setSpacing(2)
        left.addWidget(name)
        left.addWidget(words)
        line = QHBoxLayout(row)
        line.setContentsMargins(0, 0, 0, 0)
        line.setSpacing(8)
        line.addLayout(left, 1)
        line.addSpacing(16)
        for button in (edit, remove):
            button.setAccessibleDescription(words.text())
            line.addWidget(button, 0, Qt.AlignmentFlag.AlignVCenter)
        return row

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
