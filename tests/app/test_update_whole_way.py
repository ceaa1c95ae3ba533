"""An update on its way from makers to people: published by their own tools, found, fetched, tested, used, undone."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytestqt.qtbot import QtBot

import app.services.updates as service
from app.services.downloads import Downloads
from app.services.settings import Settings
from app.services.updates import Updates, UpdateStage
from app.views.settings.few_rows import UpdatesCard
from engine.common import installed
from engine.parts import updates as parts
from tests.broken import NEW, OLD, UV, WINDOW_TEST, Fresh
from tests.bundles import PLATFORM, make_lock, make_own_wheels
from tests.hub_server import HubServer

INSTALLERS = Path(__file__).resolve().parents[2] / "installers"
sys.path.insert(0, str(INSTALLERS))
try:
    from packages import update as makers
finally:
    sys.path.remove(str(INSTALLERS))

pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed")
ALL_MS = 60_000


class Makers:
    """Who publishes: a key of their own, a folder that a server shows to all."""

    def __init__(self, folder: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.hub = folder / "published", hub
        self.folder.mkdir()
        self.key = folder / "switchyard-updates.pem"
        self.public = makers.new_key(self.key)
        self.address = f"{hub.endpoint}/makers/updates/resolve/{hub.add('makers/updates', {}).commit}"
        monkeypatch.setattr(makers, "read_project", lambda: SimpleNamespace(version=NEW))
        monkeypatch.setattr(makers, "python_of", lambda _: installed.this_python())
        monkeypatch.setattr(parts, "updates_settings", lambda: {"address": self.address, "keys": [self.public]})

    def publish(self, root: Path, key: Path) -> None:
        """`release.py window list`, and the upload."""
        of_what = SimpleNamespace(version=NEW)
        makers.write_window(
            SimpleNamespace(root=root, project=of_what, platform=SimpleNamespace(name=PLATFORM)),  # type: ignore[arg-type]
            self.folder,
        )
        makers.write_list(self.folder, self.address, key, "Faster.")
        self.hub.add("makers/updates", {path.name: path for path in self.folder.iterdir()})


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> Fresh:
    monkeypatch.setenv("SWITCHYARD_TORCH", "cpu")
    monkeypatch.setattr(service, "_BUSY_MS", 20)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    world = Fresh(tmp_path, monkeypatch, hub)
    assert world.start() == ""
    return world


@pytest.fixture
def root(world: Fresh) -> Path:
    """What the makers' new version consists of."""
    root = world.folder / "made by its makers"
    make_own_wheels(root, NEW)
    make_lock(root, world.wheels, world.address)
    (root / "window" / "app").mkdir(parents=True)
    (root / "window" / "app" / "__init__.py").write_text("")
    (root / "window" / "app" / "self_test.py").write_text(WINDOW_TEST)
    return root


@pytest.fixture
def work() -> list[str]:
    """What the engine does just now."""
    return []


@pytest.fixture
def updates(settings: Settings, world: Fresh, work: list[str]) -> Iterator[Updates]:
    downloads = Downloads(settings)
    result = Updates(settings, downloads, lambda: bool(work))
    yield result
    for one in (result, downloads):
        one.close()
        one.deleteLater()


def test_it_is_found_fetched_tested_used_and_undone(
    updates: Updates,
    world: Fresh,
    root: Path,
    work: list[str],
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    qtbot: QtBot,
) -> None:
    them = Makers(tmp_path, hub, monkeypatch)
    card = UpdatesCard(updates)
    qtbot.addWidget(card)
    card.show()

    stranger = tmp_path / "stranger.pem"
    makers.new_key(stranger)
    them.publish(root, stranger)
    card.look.click()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.FAILED, timeout=ALL_MS)
    assert "not signed by Switchyard's makers: nothing has changed" in card.trouble.text()

    them.publish(root, them.key)
    card.look.click()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.OFFERED, timeout=ALL_MS)
    assert f"{NEW} is available" in card.words.text()
    assert "Faster." in card.words.text()
    assert not hub.asked("switchyard-window-*"), "it was fetched before people agreed"

    work.append("a job")
    card.get.click()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.WAITING, timeout=ALL_MS)
    assert hub.asked("switchyard-window-*")
    assert not (world.parts / f"window-{NEW}").exists(), "it was installed in the middle of a job"
    assert world.works() == OLD
    work.clear()
    qtbot.waitUntil(lambda: updates.stage is UpdateStage.READY, timeout=ALL_MS)
    assert installed.window_folder() == world.parts / f"window-{NEW}"
    assert installed.version() == OLD, "what runs goes on as it is"
    assert world.works() == NEW
    assert "Restart Switchyard" in card.words.text()

    assert card.back.isEnabled()
    assert OLD in card.back_words.text()
    card.back.click()
    qtbot.waitUntil(lambda: installed.next_version() == OLD, timeout=ALL_MS)
    assert world.works() == OLD
    card.close_down()
