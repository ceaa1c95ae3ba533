"""Pictures from the message box, and from another program, to a model that sees in an engine process of its own."""

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtGui import QImage
from pytestqt.qtbot import QtBot

from app.services.api_server import ApiServer, ServerState
from app.services.engine_client import EngineClient
from app.services.settings import Settings
from app.views.chat.chat_view import ChatView
from engine.common.config import EngineConfig
from tests import plain_http
from tests.engine.seeing_models import seeing_checkpoint
from tests.made_pictures import coloured, file_of

WAIT_MS = 90_000


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def engine(seeing: Path, qtbot: QtBot) -> Iterator[EngineClient]:
    client = EngineClient()
    client.start()
    client.load(EngineConfig(str(seeing), device="cpu"))
    qtbot.waitUntil(lambda: client.model is not None, timeout=WAIT_MS)
    yield client
    client.close_now()


def test_a_picture_is_answered_about_in_a_chat_and_for_another_program(
    open_page: Callable[[], ChatView], engine: EngineClient, settings: Settings, qtbot: QtBot
) -> None:
    page = open_page()
    assert engine.model.sees
    picture = QImage.fromData(file_of(coloured(1, 64, 48), "PNG"))
    with qtbot.waitSignal(page.presenter.attached):
        page.attaching.give([picture])
    cost = page.room._pictures()
    assert cost > 0
    page.composer.box.setPlainText("What is this?")
    page.composer.send_button.click()

    def answer() -> Any:
        return page.presenter.model.rows[-1].message

    qtbot.waitUntil(lambda: answer().role == "assistant" and answer().stats is not None, timeout=WAIT_MS)
    assert not answer().reason
    assert answer().stats.prompt_tokens > cost
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings.server_port = free.getsockname()[1]
    server = ApiServer(engine, settings)
    settings.serves_others = True
    try:
        qtbot.waitUntil(lambda: server.state is ServerState.ON, timeout=WAIT_MS)
        url = f"data:image/png;base64,{base64.b64encode(file_of(coloured(1, 64, 48), 'PNG')).decode()}"
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        used: list[int] = []

        def ask() -> None:
            for content in (parts, parts[1:]):
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
                said = plain_http.post(f"{server.url}/v1/chat/completions", json=body, timeout=90)
                assert said.status_code == 200, said.text
                used.append(said.json()["usage"]["prompt_tokens"])

        program = threading.Thread(target=ask)
        program.start()
        qtbot.waitUntil(lambda: not program.is_alive(), timeout=WAIT_MS)
        program.join()
        assert used[0] - used[1] == cost
    finally:
        server.close()
