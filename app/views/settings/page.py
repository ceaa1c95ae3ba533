"""The Settings page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QDateTime, QLocale, QObject, Qt, QUrl, Signal
from PySide6.QtGui import QDesktopServices, QGuiApplication, QShowEvent
from PySide6.QtWidgets import (
    QFileDialog,
    QLineEdit,
    QMessageBox,
    QPlainTextEdit,
    QPushButton,
    QSystemTrayIcon,
    QWidget,
)

from app.models.headed_table import HeadedTable
from app.services.api_server import ApiServer, ServerState
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
from app.theme import ThemeController, use_tabular_figures
from app.views.settings.card import SettingsCard
from app.views.settings.few_rows import AboutCard, ComputingCard, KeptCard, ModelCard, UpdatesCard
from app.views.settings.hub import HubCard
from app.views.settings.server_dialog import ServersCard
from app.views.settings.tools import ToolsCard
from app.widgets.fields import ComboBox, SpinBox
from app.widgets.flow_layout import FlowLayout
from app.widgets.page import TUNE, Page
from app.widgets.scaffold import (
    PageBody,
    PageHeader,
    line_edit,
    muted_label,
    push_button,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from app.widgets.setting_controls import COMBO_WIDTH_PX, setting_words
from app.widgets.text_table import TextTable
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
from engine.protocol import Served

TIME, PROGRAM, MODEL, READ, WRITTEN, SECONDS, OUTCOME = range(7)
MOST_ROWS = 200


class ServedRequests(HeadedTable):
    """The latest first."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__((), (READ, WRITTEN, SECONDS), parent, cell=self._words, describe=self._spoken)
        self._headings = (
            self.tr("Time"),
            self.tr("Program"),
            self.tr("Model"),
            self.tr("Read"),
            self.tr("Written"),
            self.tr("Seconds"),
            self.tr("Outcome"),
        )

    def add(self, request: Served) -> None:
        self.insert_row(0, request)
        if len(self._rows) > MOST_ROWS:
            self.drop_rows(MOST_ROWS, len(self._rows) - 1)

    def _words(self, request: Served, column: int) -> str:
        locale = QLocale()
        if column == TIME:
            when = QDateTime.fromMSecsSinceEpoch(round(request.began_s * 1000))
            return locale.toString(when.time(), "HH:mm:ss")
        if column in (READ, WRITTEN):
            tokens = request.read_tokens if column == READ else request.written_tokens
            return locale.toString(tokens) if request.model else "–"
        if column == SECONDS:
            return locale.toString(request.seconds, "f", 1)
        if column == OUTCOME:
            return self._outcome(request)
        return (request.program if column == PROGRAM else request.model) or "–"

    def _outcome(self, request: Served) -> str:
        if request.outcome == "answered":
            return self.tr("answered")
        if request.outcome == "left":
            return self.tr("client left")
        if request.outcome == "refused":
            return (
                self.tr("wrong key") if request.status == _NO_KEY else self.tr("refused ({0})").format(request.status)
            )
        return self.tr("failed")

    def _spoken(self, request: Served) -> str:
        words = self.tr("{0}, {1}: {2}; {3} tokens read, {4} written, {5} s").format(
            self._words(request, TIME),
            self._words(request, PROGRAM),
            self._outcome(request),
            self._words(request, READ),
            self._words(request, WRITTEN),
            self._words(request, SECONDS),
        )
        return f"{words}\n{request.path}"


_NO_KEY = 401


KEY_WIDTH_PX = 240
ROWS_SHOWN = 6
_WIDTHS = {TIME: 8, PROGRAM: 16, READ: 6, WRITTEN: 7, SECONDS: 8, OUTCOME: 12}
_HIDDEN = "…"
"""In place of the key, until it is shown."""
_CURL = """curl {url}/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -H "Authorization: Bearer {key}" \\
  -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'"""
_PYTHON = """from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="default",
    messages=[{{"role": "user", "content": "Hello"}}],
)
print(answer.choices[0].message.content)"""
_EXAMPLES = {"curl": _CURL, "Python (openai)": _PYTHON}


class OtherProgramsCard(SettingsCard):
    def __init__(self, settings: Settings, server: ApiServer, parent: QWidget | None = None) -> None:
        super().__init__(setting_words(SERVER_CARD), parent)
        self._settings, self._server = settings, server
        self._words = self.add_setting(Settings.serves_others, settings)
        self.switch = self.controls["serve_others"]
        self._words.show()
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        self._who_words = self.add_setting(Settings.serves, settings)
        self.who = self.controls["serve_to"]
        self._who_words.show()
        self.add_setting(Settings.server_port, settings)
        self.port = self.controls["serve_port"]
        assert isinstance(self.port, SpinBox)
        self.port.setGroupSeparatorShown(False)
        self.details = SettingsCard(parent=self)
        self.details.setAccessibleName(self.tr("How programs reach it"))
        self.add_wide(self.details)
        self.copy_address = self._copies(self.tr("Copy address"), lambda: server.url)
        self._address = self.details.add_row(self.tr("Address"), " ", self.copy_address)
        self.key = QLineEdit(self.details)
        self.key.setReadOnly(True)
        self.key.setFixedWidth(KEY_WIDTH_PX)
        self.key.setEchoMode(QLineEdit.EchoMode.Password)
        self.show_key = push_button(self.details, self.tr("Show"), name=self.tr("Show the key"), checkable=True)
        self.show_key.toggled.connect(self._show_key)
        self.copy_key = self._copies(self.tr("Copy"), lambda: server.key)
        self.copy_key.setAccessibleName(self.tr("Copy the key"))
        self.new_key = push_button(self.details, self.tr("New key"))
        self.new_key.clicked.connect(server.make_key)
        self._key_row = QWidget(self.details)
        self._key_words = muted_label(self._key_row)
        self._lay_out_key()
        self.details.add_wide(self._key_row)
        self.free = push_button(self.details, self.tr("Free"))
        self.free.clicked.connect(server.free_others)
        self._beside_words = self.details.add_row(self.tr("Models asked for by name"), " ", self.free)
        self.details.add_setting(Settings.others_idle_minutes, settings)
        self.details.add_setting(Settings.gives_way, settings)
        self.language = ComboBox(self.details)
        for name, text in _EXAMPLES.items():
            self.language.addItem(name, text)
        self.language.currentIndexChanged.connect(self._show)
        self.copy_example = self._copies(self.tr("Copy example"), lambda: self._example(server.key))
        words = self.tr("OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.")
        self.details.add_row(self.tr("Example"), words, self.language, self.copy_example)
        self.example = QPlainTextEdit(self.details)
        self.example.setReadOnly(True)
        self.example.setTabChangesFocus(True)
        self.example.setAccessibleName(self.tr("Example"))
        self.example.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.details.add_wide(self.example)
        self.model = ServedRequests(self)
        self.model.show_rows(server.requests)
        self._requests_words = self.details.add_row(self.tr("Requests"), " ")
        self.table = TextTable(self.model, self.tr("Requests"), self.details)
        use_tabular_figures(self.table)
        self.table.share_width(_WIDTHS)
        self.table.show_rows(ROWS_SHOWN)
        self.details.add_wide(self.table)
        server.changed.connect(self._show)
        server.served.connect(self._on_served)
        self._show()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._server.look_for_key()

    def _lay_out_key(self) -> None:
        name = text_label(self._key_row, self.tr("Key"), buddy=self.key)
        self.key.setAccessibleName(self.tr("Key"))
        controls = FlowLayout(spacing=8)
        for control in (self.key, self.show_key, self.copy_key, self.new_key):
            controls.addWidget(control)
        vbox(name, self._key_words, 6, controls, into=self._key_row, gap=2)

    def _copies(self, name: str, text: Callable[[], str]) -> QPushButton:
        return push_button(self.details, name, lambda: QGuiApplication.clipboard().setText(text()))

    def _show_key(self, shown: bool) -> None:
        self.key.setEchoMode(QLineEdit.EchoMode.Normal if shown else QLineEdit.EchoMode.Password)
        self._show()

    def _example(self, key: str) -> str:
        return str(self.language.currentData()).format(url=self._server.url, key=key or "none")

    def _on_served(self, request: object) -> None:
        self.model.add(request)  # type: ignore[arg-type]
        self._show_requests()

    def _show(self) -> None:
        server, to = self._server, self._settings.serves
        state = server.state
        words = {
            ServerState.OFF: self.tr("Off. Nothing listens, and no editor, agent or other app can ask."),
            ServerState.STARTING: self.tr("Starting…"),
            ServerState.ON: self.tr("On, for all models on this PC. Chats in this window come first."),
            ServerState.FAILED: self.tr("Off, because of a problem."),
        }[state]
        self._words.setText(words)
        self.switch.setAccessibleDescription(words)
        self.details.setVisible(self._settings.serves_others)
        set_message(self.trouble, server.problem)
        who = {
            "pc": self.tr("No other PC can reach it. Any program here can."),
            "key": self.tr("No other PC can reach it. Programs here need the key."),
            "network": self.tr("What is asked and answered crosses your network unencrypted: use it only at home."),
        }[to]
        self._who_words.setText(who)
        self.who.setAccessibleDescription(who)
        beside = server.beside
        self._beside_words.setText(
            self.tr("{0} is being loaded.").format(beside.model)
            if beside.is_loading
            else self.tr("{0} is loaded.").format(beside.model)
            if beside.model
            else self.tr("Any model on this PC: it is loaded beside yours, one at a time.")
        )
        self.free.setVisible(bool(beside.model))
        self.free.setEnabled(not beside.is_loading)
        self._address.setText(server.url)
        self.copy_address.setAccessibleDescription(server.url)
        self._key_row.setVisible(to != "pc")
        self.key.setText(server.key)
        self._key_words.setText(
            self.tr("In the system's keyring.")
            if server.key_stays
            else self.tr("For this run only: this system has no keyring.")
            if server.key
            else ""
        )
        text = self._example(server.key if self.show_key.isChecked() or not server.key else _HIDDEN)
        if text != self.example.toPlainText():
            self.example.setPlainText(text)
        lines = text.count("\n") + 1
        self.example.setFixedHeight(lines * self.example.fontMetrics().lineSpacing() + 24)
        self._show_requests()

    def _show_requests(self) -> None:
        has_any = self.model.rowCount() > 0
        self.table.setVisible(has_any)
        words = self.tr("Since the window opened; what was asked and answered is not kept.")
        self._requests_words.setText(words if has_any else self.tr("None yet."))


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
