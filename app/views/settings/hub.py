"""Where models are looked for: the hub's address, and the catalogue of recommendations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QDir, Qt, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFileDialog, QLineEdit, QPushButton, QWidget

from app.services.background import LatestTask
from app.services.hub_address import HUB_ADDRESS_KEY, address_of_environment, address_problem, use_hub_address
from app.services.settings import Settings
from app.views.settings.card import SettingsCard
from app.widgets.card import set_message, warning_label
from engine.common.errors import EngineError

if TYPE_CHECKING:
    from engine.checkpoint.catalogue import Catalogue

FIELD_WIDTH_PX = 240


class HubCard(SettingsCard):
    """Signals: `changed`, when the catalogue is another."""

    changed = Signal()

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Finding models"))
        self._settings = settings
        self._reading = LatestTask(self)
        self.load = QPushButton(self.tr("Load from file…"), self)
        self.load.clicked.connect(self._choose)
        self.catalogue = self.add_row(self.tr("Catalogue of recommendations"), " ", self.load)
        self.address = QLineEdit(settings.get(HUB_ADDRESS_KEY, ""), self)
        self.address.setFixedWidth(FIELD_WIDTH_PX)
        self.address.setPlaceholderText("https://huggingface.co")
        self.address.editingFinished.connect(self._set_address)
        words = self.tr("A mirror that is asked instead of Hugging Face; empty for none.")
        if theirs := address_of_environment():
            self.address.setEnabled(False)
            words = self.tr("HF_ENDPOINT in the environment names {0}, which is used.").format(theirs)
        self.add_row(self.tr("Mirror of the hub"), words, self.address)
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        set_message(self.trouble, "")

    def use_catalogue(self, path: Path) -> None:
        """Keeps a newer catalogue, or says why it cannot be used."""
        set_message(self.trouble, "")
        self.load.setEnabled(False)
        self._reading.ask(lambda: _keep(path), self._on_kept, self._on_failed)

    def close_down(self) -> None:
        """Waits for a catalogue that is being read."""
        self._reading.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if not self._reading.is_busy:
            self._reading.ask(_read, self._show_catalogue, self._on_failed)

    def _choose(self) -> None:
        dialog = QFileDialog(self, self.tr("A newer catalogue"), QDir.homePath(), self.tr("Catalogues (*.json)"))
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.fileSelected.connect(lambda path: self.use_catalogue(Path(path)))
        dialog.open()

    def _show_catalogue(self, catalogue: Catalogue) -> None:
        words = self.tr("{0} models, as of {1}.").format(len(catalogue.entries), catalogue.date)
        self.catalogue.setText(words)
        self.load.setAccessibleDescription(words)

    def _on_kept(self, catalogue: Catalogue) -> None:
        self.load.setEnabled(True)
        self._show_catalogue(catalogue)
        self.changed.emit()

    def _on_failed(self, error: Exception) -> None:
        self.load.setEnabled(True)
        if not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message)

    def _set_address(self) -> None:
        address = self.address.text().strip().rstrip("/")
        problem = address_problem(address) if address else ""
        set_message(self.trouble, problem)
        if not problem:
            self._settings.set(HUB_ADDRESS_KEY, address)
            use_hub_address(self._settings)


def _read() -> Catalogue:
    from engine.checkpoint.catalogue import read_catalogue  # imported late: it is slow to load

    return read_catalogue()


def _keep(path: Path) -> Catalogue:
    from engine.checkpoint.catalogue import use_catalogue

    return use_catalogue(path)
