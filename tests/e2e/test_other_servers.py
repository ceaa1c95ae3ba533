"""The real window of who only asks another Switchyard: its engine's process maps no torch, and so holds no model."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.remote.endpoint import endpoint_at, remote_name, save_endpoint
from tests.e2e.screen import Screen
from tests.e2e.waiting import eventually
from tests.e2e.window_process import RealWindow, real_window
from tests.engine.test_serve_verb import served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path) as (url, _process):
        yield f"{url}/v1"


def holds_torch(worker: psutil.Process) -> bool:
    return any("libtorch" in each.path for each in worker.memory_maps())


def ask(window: RealWindow, number: int) -> None:
    window.click("Message")
    window.screen.type("Hello there")
    window.screen.press("Return")
    window.wait_for_answer(number, "complete")  # a tiny model with random weights may say nothing


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_no_model_is_loaded_before_one_is_needed(
    screen: Screen, starter: Path, switchyard_home: Path, server: str
) -> None:
    rack = endpoint_at(server, "Rack")
    save_endpoint(rack)
    chosen = {"default_model": str(starter), "theme": "light", "last_model": remote_name(rack, "")}
    (switchyard_home / "config" / "settings.json").write_text(json.dumps(chosen), encoding="utf-8")
    for number in (1, 2):
        with real_window(screen, switchyard_home, None) as window:
            ask(window, number)
            (worker,) = window.workers()
            assert not holds_torch(worker)
            if number == 2:
                window.click("New chat")
                ask(window, 3)
                eventually(lambda worker=worker: holds_torch(worker), "the model of this PC was loaded")
            assert window.close() == 0
