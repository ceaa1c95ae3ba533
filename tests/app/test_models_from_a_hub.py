"""The Models page with its real services, a real process that downloads, and a hub on this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.services.downloads import Downloads
from app.services.hub import Hub
from app.services.library import Library, ModelSpeeds
from app.services.settings import Settings
from app.views.models.page import ModelsPage
from engine.checkpoint.downloads.queue import DownloadState
from engine.common.paths import models_dir
from tests.app.scripted_engine import ScriptedEngine
from tests.hub_server import HubServer

PATIENCE_MS = 60_000
NAME = "org/tiny-mixtral"
Open = Callable[[], "Opened"]


class Opened:
    """A page and what it hangs on, as a window would open them."""

    def __init__(self, settings: Settings) -> None:
        self.is_closed = False
        self.engine = ScriptedEngine()
        self.library, self.downloads, self.hub = Library(), Downloads(settings), Hub()
        self.speeds = ModelSpeeds(settings)
        self.page = ModelsPage(
            self.engine,  # type: ignore[arg-type]
            settings,
            self.library,
            self.downloads,
            self.hub,
            self.speeds,
        )
        self.page.resize(1072, 760)
        self.downloads.begin()
        self.page.show()

    def close(self) -> None:
        """As the window does; once."""
        if self.is_closed:
            return
        self.is_closed = True
        self.page.close_down()
        self.page.close()
        for service in (self.downloads, self.library, self.hub, self.speeds):
            service.close()
        for one in (self.page, self.downloads, self.library, self.hub, self.speeds, self.engine):
            one.deleteLater()


@pytest.fixture
def hub(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as all other tests have it
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        server.add(NAME, {file.name: file for file in tiny.iterdir()})
        yield server


@pytest.fixture
def opened(hub: HubServer, settings: Settings) -> Iterator[Open]:
    all_opened: list[Opened] = []

    def open_one() -> Opened:
        all_opened.append(Opened(settings))
        return all_opened[-1]

    yield open_one
    for one in all_opened:
        one.close()


def test_a_model_is_found_judged_downloaded_over_two_windows_and_listed(
    hub: HubServer, opened: Open, qtbot: QtBot
) -> None:
    first = opened()
    page, search = first.page, first.page.search
    search.field.setText("tiny")
    qtbot.keyClick(search.field, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: search.fit.table.row is not None, timeout=PATIENCE_MS)
    row = search.fit.table.row
    assert row.speed is not None
    assert row.candidate.repository.id == NAME
    first.downloads.set_limit(row.bytes // 20)
    search.fit.download.click()
    qtbot.waitUntil(lambda: any(one.done_bytes for one in first.downloads.entries), timeout=PATIENCE_MS)
    assert first.downloads.entries[0].state is DownloadState.RUNNING
    assert page.downloads.isVisible()
    first.close()

    second = opened()
    qtbot.waitUntil(lambda: bool(second.downloads.entries), timeout=PATIENCE_MS)
    assert second.downloads.entries[0].done_bytes > 0  # nothing was lost
    with qtbot.waitSignal(second.downloads.finished, timeout=PATIENCE_MS) as finished:
        second.downloads.set_limit(0)
    folder = finished.args[0].folder
    assert folder.parent == models_dir()
    qtbot.waitUntil(lambda: second.library.entry(str(folder)) is not None, timeout=PATIENCE_MS)
    qtbot.waitUntil(lambda: second.page.here.entry is not None, timeout=PATIENCE_MS)
    assert second.page.here.entry == second.library.entry(str(folder))
    assert not second.page.here.problem.isVisible()
    qtbot.waitUntil(lambda: second.page.downloads.isHidden(), timeout=PATIENCE_MS)


def test_a_repository_that_does_not_exist_is_a_sentence(hub: HubServer, opened: Open, qtbot: QtBot) -> None:
    one = opened()
    one.page.search.field.setText("org/nothing")
    one.page.search.button.click()
    qtbot.waitUntil(lambda: one.page.search.fit.trouble.isVisible(), timeout=PATIENCE_MS)
    assert one.page.search.fit.table.isHidden()
