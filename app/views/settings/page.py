"""The Settings page."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QFileDialog,
    QFrame,
    QHBoxLayout,
    QLabel,
    QMessageBox,
    QPushButton,
    QScrollArea,
    QSystemTrayIcon,
    QVBoxLayout,
    QWidget,
)

from app.languages import LANGUAGES, SYSTEM
from app.services.api_server import ApiServer
from app.services.data_folder import (
    FolderChange,
    cancel_change,
    holds_our_data,
    plan_change,
    planned_change,
)
from app.services.endpoints import Endpoints
from app.services.settings import Settings, ThemeChoice
from app.services.telemetry_hub import RECORD_SETTING
from app.services.tools.service import Tools
from app.services.updates import Updates
from app.theme import ThemeController, use_tabular_figures
from app.views.settings.about import AboutCard
from app.views.settings.card import COMBO_WIDTH_PX, SettingsCard
from app.views.settings.computing import ComputingCard
from app.views.settings.hub import HubCard
from app.views.settings.kept import KeptCard
from app.views.settings.model import ModelCard
from app.views.settings.other_programs import OtherProgramsCard
from app.views.settings.servers import ServersCard
from app.views.settings.tools import ToolsCard
from app.views.settings.updates import UpdatesCard
from app.widgets.card import muted_label
from app.widgets.fields import ComboBox, Slider
from app.widgets.page import TUNE, Page
from app.widgets.page_header import PageHeader
from engine.common.errors import EngineError
from engine.common.files import private_folder
from engine.common.paths import data_dir

COLUMN_WIDTH_PX = 760


SMALLEST_PX, LARGEST_PX = 12, 20
SLIDER_WIDTH_PX = 180


class TrayCard(SettingsCard):
    """Changes hold at once."""

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Quick question"))
        is_there = QSystemTrayIcon.isSystemTrayAvailable()
        self.icon = QCheckBox(self)
        self.icon.setChecked(settings.tray)
        self.icon.setEnabled(is_there or settings.tray)
        words = self.tr("A click on it asks a question from anywhere, in a small window above the others.")
        if not is_there:
            words = self.tr("This desktop has no tray for icons.")
        self.add_row(self.tr("Icon in the tray"), words, self.icon)
        self.stays = QCheckBox(self)
        self.stays.setChecked(settings.stays_in_tray)
        self.add_row(
            self.tr("Keep running when the window is closed"),
            self.tr(
                "The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q."
            ),
            self.stays,
        )

        def set_tray(on: bool) -> None:
            settings.tray = on
            self.stays.setEnabled(on)

        def set_stays(on: bool) -> None:
            settings.stays_in_tray = on

        self.icon.toggled.connect(set_tray)
        self.stays.toggled.connect(set_stays)
        self.stays.setEnabled(self.icon.isChecked())


class MonitorCard(SettingsCard):
    """Whether sessions are recorded."""

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Monitor"))
        self.record = QCheckBox(self)
        self.record.setChecked(settings.get(RECORD_SETTING, default=True))
        self.record.toggled.connect(lambda on: settings.set(RECORD_SETTING, on))
        self.add_row(
            self.tr("Record sessions"),
            self.tr(
                "Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this "
                "machine and take up to 512 MB; the oldest are deleted."
            ),
            self.record,
        )


class DataCard(SettingsCard):
    """A change is scheduled here and carried out at the next start."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Data"))
        self._open = QPushButton(self.tr("Open folder"), self)
        self._open.clicked.connect(self._open_folder)
        self._change = QPushButton(self.tr("Change…"), self)
        self._change.clicked.connect(self._choose)
        self._where = self.add_row(self.tr("Data folder"), str(data_dir()), self._open, self._change)
        self._plan = muted_label(self)
        self._undo = QPushButton(self.tr("Undo"), self)
        self._undo.clicked.connect(self._undo_change)
        self.add_wide(self._plan)
        self.add_wide(self._undo)
        self._show_plan()

    def plan(self, target: Path, *, copy: bool) -> None:
        """Schedules the change and shows it, or shows why it is not possible."""
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


class AppearanceCard(SettingsCard):
    """Changes take effect immediately."""

    def __init__(self, settings: Settings, theme: ThemeController, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.set_heading(self.tr("Appearance"))
        self._settings = settings
        self._theme = theme
        self.add_row(self.tr("Theme"), self.tr("System follows the desktop's setting."), self._themes())
        self.language = ComboBox(self)
        self.language.setFixedWidth(COMBO_WIDTH_PX)
        self.language.addItem(self.tr("System"), SYSTEM)
        for language, name in LANGUAGES.items():
            self.language.addItem(name, language)
        self.language.setCurrentIndex(self.language.findData(settings.language))
        self.language.activated.connect(self._choose_language)
        self.add_row(self.tr("Language"), self.tr("System is the language of this PC, or English."), self.language)
        self._size = Slider(self)
        self._size.setRange(SMALLEST_PX, LARGEST_PX)
        self._size.setPageStep(1)
        self._size.setFixedWidth(SLIDER_WIDTH_PX)
        self._size.setValue(settings.font_px)
        self._figure = QLabel(self)
        self._figure.setProperty("role", "secondary")
        use_tabular_figures(self._figure)
        self._show_figure(self._size.value())
        self._size.valueChanged.connect(self._show_figure)
        self._size.valueChanged.connect(self._maybe_apply)
        self._size.sliderReleased.connect(self._apply_size)
        self.add_row(self.tr("Text size"), "", self._size, self._figure)

    def _themes(self) -> QWidget:
        choices: tuple[tuple[ThemeChoice, str], ...] = (
            ("system", self.tr("System")),
            ("light", self.tr("Light")),
            ("dark", self.tr("Dark")),
        )
        holder = QWidget(self)
        row = QHBoxLayout(holder)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(6)
        self.theme_buttons = QButtonGroup(holder)
        for index, (choice, label) in enumerate(choices):
            button = QPushButton(label, holder)
            button.setCheckable(True)
            button.setProperty("kind", "segment")
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
            button.setAccessibleName(self.tr("Theme: {0}").format(label))
            button.setChecked(self._settings.theme == choice)
            button.toggled.connect(lambda on, c=choice: self._choose_theme(c) if on else None)
            self.theme_buttons.addButton(button, index)
            row.addWidget(button)
        return holder

    def _choose_language(self) -> None:
        self._settings.language = self.language.currentData()

    def _choose_theme(self, choice: ThemeChoice) -> None:
        self._settings.theme = choice
        self._theme.set_choice(choice)

    def _show_figure(self, size: int) -> None:
        self._figure.setText(self.tr("{0} px").format(size))

    def _maybe_apply(self) -> None:
        # While the handle is dragged, a new text size would resize the slider under the pointer.
        if not self._size.isSliderDown():
            self._apply_size()

    def _apply_size(self) -> None:
        self._settings.font_px = self._size.value()
        self._theme.set_font_px(self._size.value())


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
        self.appearance = AppearanceCard(settings, theme, self)
        self.model = ModelCard(settings, self)
        self.computing = ComputingCard(settings, self)
        self.kept = KeptCard(self)
        self.tray = TrayCard(settings, self)
        self.others = OtherProgramsCard(settings, server, self)
        self.servers = ServersCard(endpoints, self)
        self.tools = ToolsCard(tools, self)
        self.hub = HubCard(self)
        self.monitor = MonitorCard(settings, self)
        self.data = DataCard(self)
        self.updates = UpdatesCard(updates, self) if updates is not None else None
        self.about = AboutCard(self)
        self.hub.changed.connect(self.catalogue_changed)
        self.hub.token_forgotten.connect(self.token_forgotten)
        self.computing.reload_wanted.connect(self.reload_wanted)
        self.computing.timing_wanted.connect(self.timing_wanted)
        self.model.changed.connect(lambda: self.computing.apply.setEnabled(True))
        self.model.tune_wanted.connect(lambda: self.page_wanted.emit(TUNE))
        cards = QWidget(self)
        cards.setMaximumWidth(COLUMN_WIDTH_PX)
        column = QVBoxLayout(cards)
        column.setContentsMargins(0, 20, 0, 20)
        column.setSpacing(16)
        cards_in_order = (
            self.appearance,
            self.model,
            self.computing,
            self.kept,
            self.tray,
            self.others,
            self.servers,
            self.tools,
            self.hub,
            self.monitor,
            self.data,
            *([self.updates] if self.updates is not None else []),
            self.about,
        )
        for card in cards_in_order:
            column.addWidget(card)
        column.addStretch(1)
        holder = QWidget(self)
        row = QHBoxLayout(holder)
        row.setContentsMargins(20, 0, 20, 0)
        row.addWidget(cards, 1)
        row.addStretch(0)
        scroll = QScrollArea(self)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        scroll.setWidget(holder)
        page = QVBoxLayout(self)
        page.setContentsMargins(0, 0, 0, 0)
        page.setSpacing(0)
        page.addWidget(PageHeader(self.tr("Settings"), self))
        page.addWidget(scroll, 1)

    def close_down(self) -> None:
        """Waits for background work."""
        self.model.close_down()
        self.computing.close_down()
        self.kept.close_down()
        self.hub.close_down()
        self.about.close_down()
        if self.updates is not None:
            self.updates.close_down()
