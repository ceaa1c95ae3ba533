"""The settings file: never half written, never lost, never in the way."""

import json
import os
import threading
from pathlib import Path

import pytest
from PySide6.QtWidgets import QLabel, QPushButton
from pytestqt.qtbot import QtBot

from app.services import settings as module
from app.services.api_server import ApiServer
from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.services.tools import Tools
from app.theme import ThemeController
from app.views.settings.page import SettingsPage
from engine import cli
from engine.common import settings as schema
from engine.common.config import EngineConfig
from engine.common.paths import config_dir
from engine.common.schema import Choice, Setting
from engine.common.settings import VERSION
from engine.verbs import options
from engine.verbs.doctor import Status, settings_findings
from tests.app.scripted_engine import ScriptedEngine


def test_standard_settings_without_a_file(settings: Settings) -> None:
    assert (settings.theme, settings.font_px, settings.default_model) == ("system", 14, "starter")
    assert settings.engine("m") == EngineConfig("m")
    assert settings.window_geometry == ""
    assert settings.notice == ""


def test_a_change_is_told_and_written_and_read_again(settings: Settings, qtbot: QtBot) -> None:
    with qtbot.waitSignal(settings.changed) as told:
        settings.theme = "dark"
    assert told.args == ["theme"]
    settings.font_px = 17
    settings.set("threads", 4)
    qtbot.waitUntil(settings.path.exists)
    again = Settings()
    assert (again.theme, again.font_px, again.engine("m").threads) == ("dark", 17, 4)


def test_the_same_value_again_is_no_change(settings: Settings, qtbot: QtBot) -> None:
    settings.theme = "dark"
    with qtbot.assertNotEmitted(settings.changed):
        settings.theme = "dark"


def test_keys_of_another_version_are_kept(settings: Settings) -> None:
    settings.path.parent.mkdir(parents=True)
    settings.path.write_text('{"from_the_future": [1, 2], "theme": "dark"}')
    ours = Settings()
    ours.font_px = 15
    ours.save()
    assert json.loads(settings.path.read_text()) == {
        "from_the_future": [1, 2],
        "theme": "dark",
        "font_px": 15,
        "version": VERSION,
    }


@pytest.mark.parametrize("values", [{"theme": 3}, {"font_px": "big"}, {"font_px": True}, {"default_model": None}])
def test_a_value_of_the_wrong_type_counts_as_absent(settings: Settings, values: dict[str, object]) -> None:
    settings.path.parent.mkdir(parents=True)
    settings.path.write_text(json.dumps(values))
    ours = Settings()
    assert (ours.theme, ours.font_px, ours.default_model) == ("system", 14, "starter")
    assert next(iter(values)) in ours.notice


@pytest.mark.parametrize("value", [-1, 3, "many", [], {}, 1.5])
def test_nonsense_by_hand_is_told_in_a_sentence_and_the_rest_is_kept(value: object, settings: Settings) -> None:
    odd = ("vram_bytes", "ram_bytes", "precision", "cache_policy", "speculation", "serve_to")
    settings.path.parent.mkdir(parents=True)
    settings.path.write_text(json.dumps(dict.fromkeys(odd, value) | {"threads": 5, "jobs_at_once": 7}))
    ours = Settings()
    assert ours.engine("m") == EngineConfig("m", threads=5)
    assert (ours.jobs_at_once, ours.serves) == (7, "pc")
    assert all(key in ours.notice for key in odd)
    assert "threads" not in ours.notice
    (said,) = settings_findings()
    assert said.status is Status.ADVICE
    assert all(key in said.detail for key in odd)


def test_a_file_of_an_older_version_goes_on(settings: Settings) -> None:
    settings.path.parent.mkdir(parents=True)
    old = {"threads": 0, "vram_bytes": 0, "ram_bytes": 2**33, "speculation": False, "theme": "light"}
    settings.path.write_text(json.dumps(old))
    ours = Settings()
    assert ours.notice == ""
    assert ours.engine("m") == EngineConfig("m", ram_bytes=2**33, speculation="off")
    ours.set("speculation", "auto")
    ours.save()
    assert json.loads(settings.path.read_text())["version"] == VERSION
    assert Settings().engine("m") == EngineConfig("m", ram_bytes=2**33)


class Toy:
    """A setting of a test: one entry."""

    toy = Setting[str](
        "round",
        Choice(("round", "square"), {"round": "Round", "square": "Square"}),
        name="Shape of the toy",
        help="Square ones do not roll.",
        card="Toys",
        applies="load",
        option="--toy",
        group="toys",
    )


def test_a_setting_is_one_entry(
    settings: Settings,
    theme: ThemeController,
    qtbot: QtBot,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is an option of every verb that runs a model, in the file, on the page, in the doctor and in the documents."""
    monkeypatch.setattr(schema, "SCHEMAS", (*schema.SCHEMAS, Toy))
    monkeypatch.setattr(options, "SCHEMAS", schema.SCHEMAS)
    for verb in ("chat", "serve", "tune"):
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        assert "--toy {round,square}" in capsys.readouterr().out
    server = ApiServer(ScriptedEngine(), settings)  # type: ignore[arg-type]
    tools = Tools(settings, lambda: pytest.fail("no documents here"), lambda _job, _rows: None)
    page = SettingsPage(settings, theme, server, Endpoints(settings), tools)
    qtbot.addWidget(page)
    page.show()
    card = page.cards["Toys"]
    assert {"Shape of the toy", "Square ones do not roll. Needs a reload."} <= {
        label.text() for label in card.findChildren(QLabel)
    }
    page.search.setText("toy roll")
    assert [name for name, each in page.cards.items() if each.isVisible()] == ["Toys"]
    (square,) = [button for button in card.findChildren(QPushButton) if button.text() == "Square"]
    square.click()
    assert page.computing.apply.isEnabled()
    settings.save()
    assert json.loads(settings.path.read_text())["toy"] == "square"
    assert Settings().value(Toy.toy) == "square"
    (said,) = settings_findings()
    assert said.detail == "toy square"
    assert "| Shape of the toy | `toy` | `--toy` | `round`, `square` (round) | when a model is loaded |" in (
        schema.with_tables("")
    )
    settings.path.write_text('{"toy": "green"}')
    assert "toy" in Settings().notice
    page.close_down()
    server.close()


def test_the_documents_have_the_settings_there_are() -> None:
    document = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert document == schema.with_tables(document), "run `python -m engine.common.settings`"


def test_a_font_size_out_of_bounds_is_held_within(settings: Settings) -> None:
    settings.font_px = 500
    assert settings.font_px == 24


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe\x00", b""])
def test_a_broken_file_is_kept_aside_and_told(settings: Settings, content: bytes) -> None:
    settings.path.parent.mkdir(parents=True)
    settings.path.write_bytes(content)
    ours = Settings()
    assert ours.theme == "system"
    assert "kept as" in ours.notice
    (aside,) = config_dir().glob("settings.json.broken-*")
    assert aside.read_bytes() == content
    assert not settings.path.exists()


def test_a_disk_that_refuses_is_told_and_the_old_file_stays(
    settings: Settings, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.theme = "dark"
    settings.save()
    before = settings.path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    settings.theme = "light"
    with qtbot.waitSignal(settings.save_failed) as told:
        settings.save()
    assert "No space left on device" in told.args[0]
    assert settings.path.read_bytes() == before
    assert list(config_dir().iterdir()) == [settings.path]  # no temporary file is left
    monkeypatch.undo()
    settings.save()
    assert json.loads(settings.path.read_text())["theme"] == "light"


def test_a_disk_that_takes_long_stops_nobody_and_the_last_choice_is_written(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    disk, begun, write = threading.Event(), threading.Event(), module.write_private

    def slow(path: Path, text: str) -> None:
        begun.set()
        disk.wait(60)
        write(path, text)

    monkeypatch.setattr(module, "write_private", slow)
    settings.theme = "dark"
    qtbot.waitUntil(begun.is_set)  # and the window goes on
    settings.theme = "light"
    disk.set()
    settings.save()
    assert json.loads(settings.path.read_text())["theme"] == "light"


@pytest.mark.usefixtures("qapp")
def test_an_own_path(tmp_path: Path) -> None:
    ours = Settings(tmp_path / "elsewhere.json")
    ours.set("anything", {"a": 1})
    ours.save()
    assert ours.path.exists()
    assert ours.get("anything", "") == ""  # of another type than asked for
