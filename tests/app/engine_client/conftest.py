"""Engine clients that are closed when the test ends."""

from collections.abc import Iterator
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.services.engine_client import EngineClient, EngineState
from tests.app.engine_client.watching import SCRIPTED, WAIT_MS, Make, Watch


@pytest.fixture
def make(qtbot: QtBot) -> Iterator[Make]:
    clients: list[EngineClient] = []

    def build(command: list[str] | None = None, **options: Any) -> tuple[EngineClient, Watch]:
        client = EngineClient(command=command or SCRIPTED, **options)
        clients.append(client)
        return client, Watch(client)

    yield build
    for client in clients:
        client.close_now()
        client.deleteLater()


@pytest.fixture
def running(make: Make, qtbot: QtBot) -> tuple[EngineClient, Watch]:
    client, watch = make()
    client.start()
    qtbot.waitUntil(lambda: client.state == EngineState.READY, timeout=WAIT_MS)
    return client, watch
