"""The Settings page."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QCoreApplication, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QShowEvent
from PySide6.QtWidgets import (
    QFileDialog,
    QMessageBox,
    QSystemTrayIcon,
    QWidget,
)

from app.services.api_server import ApiServer
from app.services.background import timer
from app.services.data_folder import (
    FolderChange,
    cancel_change,
    holds_our_data,
    plan_change,
    planned_change,
)
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.services.tools import Tools
from app.services.updates import Updates
from app.theme import ThemeController
from app.views.settings.card import SettingsCard
from app.views.settings.few_rows import AboutCard, ComputingCard, KeptCard, ModelCard, UpdatesCard
from app.views.settings.hub import HubCard
from app.views.settings.other_programs import OtherProgramsCard
from app.views.settings.server_dialog import ServersCard
from app.views.settings.tools import ToolsCard
from app.widgets.fields import ComboBox
from app.widgets.page import TUNE, Page
from app.widgets.scaffold import (
    PageBody,
    PageHeader,
    line_edit,
    muted_label,
    push_button,
)
from app.widgets.setting_controls import COMBO_WIDTH_PX, setting_words
from engine.common.config import COMPUTING_CARD, EXPERTS_CARD, MODEL_CARD
from engine.common.errors import EngineError
from engine.common.files import private_folder
from engine.common.paths import data_dir
from engine.common.settings import (
    APPEARANCE_CARD,
    MONITOR_CARD,
    SERVER_CARD,
    TRAY_CARD,
    UPDATES_CARD,
    kept_settings,
)

translate = QCoreApplication.translate

SEARCH_WIDTH_PX = 240
COLUMN_WIDTH_PX = 800


class DataCard(SettingsCard):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("DataCard", "Data"), parent)
        self._open = push_button(self, self.tr("Open folder"), self._open_folder)
        self._change = push_button(self, self.tr("Change…"), self._choose)
        self._where = self.add_row(self.tr("Data folder"), str(data_dir()), self._open, self._change)
        self._plan = muted_label(self)
        self._undo = push_button(self, self.tr("Undo"), self._undo_change)
        self.add_wide(self._plan)
        self.add_wide(self._undo)
        self._show_plan()

    def plan(self, target: Path, *, copy: bool) -> None:
        try:
            plan_change(FolderChange(target, copy))
        except EngineError as error:
            self._plan.setText(error.message)
            self._plan.show()
            return
        self._show_plan()

    def _choose(self) -> None:
        chosen = QFileDialog.getExistingDirectory(self, self.tr("Folder for chats and models"), str(data_dir()))
        if not chosen:
            return
        target = Path(chosen)
        if holds_our_data(target) or target.resolve() == data_dir().resolve():
            self.plan(target, copy=False)
            return
        if any(target.iterdir()):
            target = target / "Switchyard"
        box = QMessageBox(self)
        box.setWindowTitle(self.tr("Data folder"))
        box.setText(self.tr("Copy your chats and models to {0}?").format(target))
        box.setInformativeText(
            self.tr("They are copied at the next start. The current folder stays until you delete it.")
        )
        copy = box.addButton(self.tr("Copy them"), QMessageBox.ButtonRole.AcceptRole)
        empty = box.addButton(self.tr("Start empty"), QMessageBox.ButtonRole.DestructiveRole)
        box.addButton(QMessageBox.StandardButton.Cancel)
        box.setDefaultButton(copy)
        box.exec()
        if box.clickedButton() in (copy, empty):
            self.plan(target, copy=box.clickedButton() is copy)

    def _undo_change(self) -> None:
        cancel_change()
        self._show_plan()

    def _show_plan(self) -> None:
        planned = planned_change()
        self._plan.setVisible(planned is not None)
        self._undo.setVisible(planned is not None)
        if planned is not None:
            sentence = (
                self.tr("At the next start your chats and models are copied to {0}, which is then used.")
                if planned.copy
                else self.tr("The data in {0} is used from the next start.")
            )
            self._plan.setText(sentence.format(planned.target))

    def _open_folder(self) -> None:
        private_folder(data_dir())
        QDesktopServices.openUrl(QUrl.fromLocalFile(str(data_dir())))


class SettingsPage(Page):
    """Signals: `reload_wanted`, to load the default model now; `timing_wanted`, to time it besides;
    `catalogue_changed`; `token_forgotten`."""

    reload_wanted = Signal()
    timing_wanted = Signal()
    catalogue_changed = Signal()
    token_forgotten = Signal()

    def __init__(
        self,
        settings: Settings,
        theme: ThemeController,
        server: ApiServer,
        endpoints: Endpoints,
        tools: Tools,
        updates: Updates | None = None,
        parent: QWidget | None = None,
    ) -> None:
        """`updates`: None where there are none, as in a checkout."""
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self._settings, self._theme = settings, theme
        self.cards: dict[str, SettingsCard] = {}
        self._add_rows(APPEARANCE_CARD)
        self.cards[MODEL_CARD] = self.model = ModelCard(settings, self)
        self.cards[COMPUTING_CARD] = self.computing = ComputingCard(settings, self)
        self._add_rows(EXPERTS_CARD)
        self.cards["kept"] = self.kept = KeptCard(self)
        self._add_rows(TRAY_CARD)
        self.cards[SERVER_CARD] = self.others = OtherProgramsCard(settings, server, self)
        self.cards["servers"] = self.servers = ServersCard(endpoints, self)
        self.cards["tools"] = self.tools = ToolsCard(tools, self)
        self.cards["hub"] = self.hub = HubCard(self)
        self._add_rows(MONITOR_CARD)
        for name in dict.fromkeys(each.card for each in kept_settings().values() if each.name):
            if name not in self.cards and name != UPDATES_CARD:
                self._add_rows(name)
        self.cards["data"] = self.data = DataCard(self)
        self.updates = UpdatesCard(updates, self) if updates is not None else None
        if self.updates is not None:
            self.cards[UPDATES_CARD] = self.updates
        self.cards["about"] = self.about = AboutCard(self)
        self.hub.changed.connect(self.catalogue_changed)
        self.hub.token_forgotten.connect(self.token_forgotten)
        self.computing.reload_wanted.connect(self.reload_wanted)
        self.computing.timing_wanted.connect(self.timing_wanted)
        self.model.tune_wanted.connect(lambda: self.page_wanted.emit(TUNE))
        settings.changed.connect(self._on_setting)
        if not QSystemTrayIcon.isSystemTrayAvailable():
            self.cards[TRAY_CARD].add_wide(muted_label(self, self.tr("This desktop has no tray for icons.")))
        self._show_tray()
        self._nothing = muted_label(self, self.tr("No setting has these words."))
        self._nothing.hide()
        body = PageBody(self, *self.cards.values(), self._nothing, widest_px=COLUMN_WIDTH_PX)
        self.search = line_edit(self, self.tr("Find a setting"), clears=True, hints=True)
        self.search.setMaximumWidth(SEARCH_WIDTH_PX)
        self.search.textChanged.connect(self.show_found)
        header = PageHeader(self.tr("Settings"), self)
        header.set_middle(self.search, least_px=SEARCH_WIDTH_PX, stretch=1)
        self.lay_out(header, body=body)
        self._choices = [box for box in self.findChildren(ComboBox) if box.minimumWidth() == COMBO_WIDTH_PX]
        self._soon = timer(self, self._align, once=True)
        for box in self._choices:
            box.model().rowsInserted.connect(lambda *_: self._soon.start())

    def _align(self) -> None:
        """Makes all lists as wide as the widest."""
        widest = max(COMBO_WIDTH_PX, *(box.sizeHint().width() for box in self._choices))
        for box in self._choices:
            box.setMinimumWidth(widest)

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._align()

    def show_found(self, wanted: str) -> None:
        shown = [(card, card.show_found(wanted)) for card in self.cards.values()]
        for card, has_it in shown:
            card.setVisible(has_it)
        self._nothing.setVisible(not any(has_it for _card, has_it in shown))

    def _add_rows(self, name: str) -> None:
        self.cards[name] = card = SettingsCard(setting_words(name), self, folded=name == EXPERTS_CARD)
        card.add_settings(name, self._settings)

    def _on_setting(self, key: str) -> None:
        if key == "theme":
            self._theme.set_choice(self._settings.theme)
        elif key == "font_px":
            self._theme.set_font_px(self._settings.font_px)
        elif key == "tray":
            self._show_tray()

    def _show_tray(self) -> None:
        controls, is_there = self.cards[TRAY_CARD].controls, QSystemTrayIcon.isSystemTrayAvailable()
        controls["tray"].setEnabled(is_there or self._settings.tray)
        controls["stays_in_tray"].setEnabled(self._settings.tray)

    def close_down(self) -> None:
        self.model.close_down()
        self.computing.close_down()
        self.kept.close_down()
        self.hub.close_down()
        self.about.close_down()
        if self.updates is not None:
            self.updates.close_down()
