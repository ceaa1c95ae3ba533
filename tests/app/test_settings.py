"""The settings file: never half written, never lost, never in the way."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.services import settings as module
from app.services.settings import Settings
from engine.common.paths import config_dir


def test_standard_settings_without_a_file(settings: Settings) -> None:
    assert (settings.theme, settings.font_px, settings.default_model) == ("system", 14, "starter")
    assert settings.threads is None
    assert settings.window_geometry == ""
    assert settings.notice == ""


def test_a_change_is_told_and_written_and_read_again(settings: Settings, qtbot: QtBot) -> None:
    with qtbot.waitSignal(settings.changed) as told:
        settings.theme = "dark"
    assert told.args == ["theme"]
    settings.font_px = 17
    settings.threads = 4
    qtbot.waitUntil(settings.path.exists)
    again = Settings()
    assert (again.theme, again.font_px, again.threads) == ("dark", 17, 4)


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
    assert json.loads(settings.path.read_text()) == {"from_the_future": [1, 2], "theme": "dark", "font_px": 15}


@pytest.mark.parametrize("values", [{"theme": 3}, {"font_px": "big"}, {"font_px": True}, {"default_model": None}])
def test_a_value_of_the_wrong_type_counts_as_absent(settings: Settings, values: dict[str, object]) -> None:
    settings.path.parent.mkdir(parents=True)
    settings.path.write_text(json.dumps(values))
    ours = Settings()
    assert (ours.theme, ours.font_px, ours.default_model) == ("system", 14, "starter")


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
    assert module.STARTER == "starter"
