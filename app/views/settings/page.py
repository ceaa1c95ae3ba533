"""The Settings page."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QHBoxLayout, QScrollArea, QVBoxLayout, QWidget

from app.services.api_server import ApiServer
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.services.updates import Updates
from app.theme import ThemeController
from app.views.settings.about import AboutCard
from app.views.settings.appearance import AppearanceCard
from app.views.settings.data import DataCard
from app.views.settings.hub import HubCard
from app.views.settings.kept import KeptCard
from app.views.settings.model import ModelCard
from app.views.settings.monitor import MonitorCard
from app.views.settings.other_programs import OtherProgramsCard
from app.views.settings.servers import ServersCard
from app.views.settings.tray import TrayCard
from app.views.settings.updates import UpdatesCard
from app.widgets.page import TUNE, Page
from app.widgets.page_header import PageHeader

COLUMN_WIDTH_PX = 760


class SettingsPage(Page):
    """Signals: `reload_wanted`, to load the default model now; `catalogue_changed`; `token_forgotten`."""

    reload_wanted = Signal()
    catalogue_changed = Signal()
    token_forgotten = Signal()

    def __init__(
        self,
        settings: Settings,
        theme: ThemeController,
        server: ApiServer,
        endpoints: Endpoints,
        updates: Updates | None = None,
        parent: QWidget | None = None,
    ) -> None:
        """`updates`: None where there are none, as in a checkout."""
        super().__init__(parent)
        self.setFocusPolicy(Qt.FocusPolicy.ClickFocus)
        self.appearance = AppearanceCard(settings, theme, self)
        self.model = ModelCard(settings, self)
        self.kept = KeptCard(self)
        self.tray = TrayCard(settings, self)
        self.others = OtherProgramsCard(settings, server, self)
        self.servers = ServersCard(endpoints, self)
        self.hub = HubCard(self)
        self.monitor = MonitorCard(settings, self)
        self.data = DataCard(self)
        self.updates = UpdatesCard(updates, self) if updates is not None else None
        self.about = AboutCard(self)
        self.hub.changed.connect(self.catalogue_changed)
        self.hub.token_forgotten.connect(self.token_forgotten)
        self.model.reload_wanted.connect(self.reload_wanted)
        self.model.tune_wanted.connect(lambda: self.page_wanted.emit(TUNE))
        cards = QWidget(self)
        cards.setMaximumWidth(COLUMN_WIDTH_PX)
        column = QVBoxLayout(cards)
        column.setContentsMargins(0, 20, 0, 20)
        column.setSpacing(16)
        cards_in_order = (
            self.appearance,
            self.model,
            self.kept,
            self.tray,
            self.others,
            self.servers,
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
        self.kept.close_down()
        self.hub.close_down()
        self.about.close_down()
        if self.updates is not None:
            self.updates.close_down()
