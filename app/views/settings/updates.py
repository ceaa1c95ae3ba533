"""Newer versions of an installed package, and the way back."""

from __future__ import annotations

from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QPushButton, QWidget

from app.services.background import TaskQueue
from app.services.updates import Updates, UpdateStage
from app.views.settings.address_field import AddressField
from app.views.settings.card import SettingsCard
from app.widgets.download_words import download_words
from app.widgets.quantities import file_size
from app.widgets.scaffold import push_button, set_message, warning_label
from app.widgets.setting_controls import setting_words
from engine.checkpoint.mirror import updates_address, use_updates_address
from engine.common.errors import EngineError
from engine.common.installed import version
from engine.common.settings import UPDATES_CARD


class UpdatesCard(SettingsCard):
    """Only for packages that can be updated."""

    def __init__(self, updates: Updates, parent: QWidget | None = None) -> None:
        super().__init__(setting_words(UPDATES_CARD), parent)
        self._updates = updates
        self.add_settings(UPDATES_CARD, updates.settings)
        self.look = self._button(self.tr("Check now"), updates.look)
        self.get = self._button(self.tr("Download"), updates.fetch)
        self.cancel = self._button(self.tr("Cancel"), updates.cancel)
        self.words = self.add_row(self.tr("Switchyard {0}").format(version()), " ", self.get, self.look, self.cancel)
        self.back = self._button(self.tr("Go back"), updates.go_back)
        self.back_words = self.add_row(self.tr("Previous version"), " ", self.back)
        self._doing = TaskQueue(self)
        self.server = AddressField(updates_address, use_updates_address, self._doing, self._tell, self)
        self.server.setPlaceholderText(self.tr("the official one"))
        words = self.tr(
            "Where newer versions come from. Only versions signed by Switchyard's developers are installed."
        )
        self.add_row(self.tr("Update server"), words, self.server)
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        updates.changed.connect(self._show_state)
        self._show_state()

    def close_down(self) -> None:
        """Waits for what is being done."""
        self._doing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._show_state()

    def _button(self, text: str, do: object) -> QPushButton:
        button = push_button(self, text)
        button.clicked.connect(lambda: do())  # type: ignore[operator]  # without Qt's "checked"
        return button

    def _tell(self, error: Exception | None) -> None:
        if error is not None and not isinstance(error, EngineError):
            raise error
        set_message(self.trouble, error.message if error is not None else "")

    def _show_state(self) -> None:
        updates, stage = self._updates, self._updates.stage
        self.words.setText(self._said())
        self.words.show()
        set_message(self.trouble, updates.problem if stage is UpdateStage.FAILED else "")
        self.get.setVisible(
            stage is UpdateStage.OFFERED or (stage is UpdateStage.FAILED and updates.update is not None)
        )
        self.look.setVisible(stage in (UpdateStage.IDLE, UpdateStage.NEWEST, UpdateStage.FAILED))
        self.cancel.setVisible(stage in (UpdateStage.FETCHING, UpdateStage.WAITING, UpdateStage.INSTALLING))
        before = updates.previous
        self.back.setEnabled(bool(before) and stage not in (UpdateStage.WAITING, UpdateStage.INSTALLING))
        kept = self.tr("{0} is kept. Going back takes effect at the next start.").format(before)
        self.back_words.setText(kept if before else self.tr("There is none."))

    def _said(self) -> str:
        updates, found = self._updates, self._updates.update
        new = found.version if found is not None else ""
        if updates.stage is UpdateStage.OFFERED and found is not None:
            offer = self.tr("{0} is available ({1}).").format(new, file_size(found.bytes))
            return f"{offer} {found.notes}".strip()
        if updates.stage is UpdateStage.FETCHING and updates.download is not None:
            return download_words(updates.download)
        return {
            UpdateStage.IDLE: self.tr("Not checked yet."),
            UpdateStage.LOOKING: self.tr("Checking…"),
            UpdateStage.NEWEST: self.tr("This is the newest version."),
            UpdateStage.FETCHING: self.tr("Downloading {0}…").format(new),
            UpdateStage.WAITING: self.tr("{0} will be installed when answers and jobs are done.").format(new),
            UpdateStage.INSTALLING: self.tr("Installing and testing {0}…").format(new),
            UpdateStage.READY: self.tr("Restart Switchyard to use the other version."),
        }.get(updates.stage, self.tr("Nothing has changed."))
