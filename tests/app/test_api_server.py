"""The switch that lets other programs use the model: the real server's process, without an engine's."""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from pytestqt.qtbot import QtBot

from app.services.api_server import ApiServer, ServerState
from app.services.settings import Settings
from app.views.settings.page import OUTCOME, PROGRAM, OtherProgramsCard, ServedRequests
from engine.common.channel import LINK_PREFIX as PREFIX
from engine.common.paths import log_dir
from engine.protocol import Served
from engine.serving.link import BrokerLink
from tests import plain_http
from tests.app.scripted_engine import ScriptedEngine
from tests.scripted_broker import ScriptedBroker


class Engine(ScriptedEngine):
    """Connects to the server as the engine process does."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[BrokerLink] = []

    def serve_others(self, address: str, secret: str) -> None:
        if address:
            self.links.append(BrokerLink(address, secret, ScriptedBroker(ends=True)))
            self.links[-1].model_is(Path("models/small"))


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    kept = dict[str, str]()
    monkeypatch.setattr("app.services.api_server.ask_keyring", lambda name: kept.get(name, ""))
    monkeypatch.setattr("app.services.api_server.tell_keyring", kept.__setitem__)
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings.server_port = free.getsockname()[1]
    engine = Engine()
    found = ApiServer(engine, settings)  # type: ignore[arg-type]
    yield found
    found.close()
    for link in engine.links:
        link.close()


def ask(server: ApiServer, **headers: str) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": "secret words"}]}
    return plain_http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=20)


def on(server: ApiServer) -> bool:
    return server.state is ServerState.ON


def test_other_programs_ask_and_the_window_learns_of_it_without_their_texts(
    server: ApiServer, settings: Settings, qtbot: QtBot
) -> None:
    assert server.state is ServerState.OFF
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server), timeout=20_000)

    def answered() -> bool:  # the engine connects in its own time
        return ask(server, **{"user-agent": "Editor/1"}).status_code == 200

    qtbot.waitUntil(answered, timeout=20_000)
    qtbot.waitUntil(lambda: any(each.outcome == "answered" for each in server.requests))
    served = server.requests[0]
    assert (served.program, served.model, served.path) == ("Editor/1", "small", "/v1/chat/completions")
    assert (served.read_tokens, served.written_tokens, served.status) == (3, 1, 200)
    assert "secret words" not in repr(served)
    other = plain_http.post(f"{server.url}/api/chat", json={"model": "other", "messages": []}, timeout=20)
    assert (other.status_code, "There is no model named 'other' here" in other.text) == (404, True)
    assert [each["id"] for each in plain_http.get(f"{server.url}/v1/models").json()["data"]] == ["small"]
    settings.serves_others = False
    assert server.state is ServerState.OFF
    qtbot.waitUntil(lambda: _is_free(server))
    server.close()
    lines = (log_dir() / "server.log").read_text(encoding="utf-8").splitlines()
    assert "listening at 127.0.0.1" in lines[0]
    assert lines[-1].endswith("ended")


def test_a_key_is_made_asked_for_and_replaced(server: ApiServer, settings: Settings, qtbot: QtBot) -> None:
    settings.serves = "key"
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server), timeout=20_000)
    first = server.key
    assert len(first) > 20
    assert server.key_stays
    settings.save()
    assert first not in settings.path.read_text(encoding="utf-8")
    assert ask(server).status_code == 401
    qtbot.waitUntil(lambda: ask(server, authorization=f"Bearer {first}").status_code == 200, timeout=20_000)
    server.make_key()
    qtbot.waitUntil(lambda: server.key != first and on(server), timeout=20_000)
    assert ask(server, authorization=f"Bearer {first}").status_code == 401
    qtbot.waitUntil(lambda: any(each.status == 401 for each in server.requests))


def test_a_port_in_use_is_said_calmly_and_another_one_helps(
    server: ApiServer, settings: Settings, qtbot: QtBot
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free, settings.server_port = settings.server_port, taken.getsockname()[1]
        settings.serves_others = True
        qtbot.waitUntil(lambda: server.state is ServerState.FAILED, timeout=20_000)
        assert str(taken.getsockname()[1]) in server.problem
        settings.server_port = free
        qtbot.waitUntil(lambda: on(server), timeout=20_000)
        assert not server.problem


def test_a_server_that_dies_is_said_and_comes_back(server: ApiServer, settings: Settings, qtbot: QtBot) -> None:
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server), timeout=20_000)
    server._process.kill()  # type: ignore[union-attr]
    qtbot.waitUntil(lambda: server.state is ServerState.FAILED)
    settings.serves_others = False
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server), timeout=20_000)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_server_that_must_be_killed_leaves_no_folders(
    server: ApiServer, settings: Settings, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot, has_begun: bool
) -> None:
    def links() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))

    before = len(links())
    if not has_begun:
        monkeypatch.setattr(server, "_on_message", lambda _message: None)
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server) if has_begun else len(links()) >= before + 2, timeout=20_000)
    monkeypatch.setattr("app.services.api_server.CLOSE_MS", 0)
    server.close()
    assert len(links()) == before


def test_the_card_shows_what_a_program_needs(server: ApiServer, settings: Settings, qtbot: QtBot) -> None:
    card = OtherProgramsCard(settings, server)
    qtbot.addWidget(card)
    card.show()
    assert not card.details.isVisible()
    qtbot.mouseClick(card.switch, Qt.MouseButton.LeftButton)
    assert settings.serves_others
    assert card.details.isVisible()
    assert not card.key.isVisible()
    card.who.setCurrentIndex(1)
    card.who.activated.emit(1)
    qtbot.waitUntil(lambda: bool(card.key.text()), timeout=20_000)
    assert card.key.echoMode() is card.key.EchoMode.Password
    assert server.key not in card.example.toPlainText()
    card.show_key.click()
    assert card.key.echoMode() is card.key.EchoMode.Normal
    for button, text in (
        (card.copy_key, server.key),
        (card.copy_address, server.url),
        (card.copy_example, card.example.toPlainText()),
    ):
        button.click()
        assert QGuiApplication.clipboard().text() == text
    curl = card.example.toPlainText()
    assert server.url in curl
    assert json.loads(curl.partition("-d '")[2].rstrip("'"))["messages"]
    card.language.setCurrentIndex(1)
    compile(card.example.toPlainText(), "example", "exec")
    server.served.emit(Served(0.0, "Editor/1", "/v1/messages", "small", 12, 3, 0.5, 200, "answered"))
    assert card.table.isVisible()


def test_requests_in_words(qtbot: QtBot) -> None:
    model = ServedRequests()
    outcomes: list[Any] = [("answered", 200), ("left", 200), ("refused", 401), ("refused", 400), ("failed", 500)]
    for outcome, status in outcomes:
        model.add(Served(0.0, "", "/api/chat", "small", 1, 2, 0.1, status, outcome))
    words = [model.index(row, OUTCOME).data() for row in range(model.rowCount())]
    assert words == ["failed", "refused (400)", "wrong key", "client left", "answered"]
    assert model.index(0, PROGRAM).data() == "–"
    for _ in range(300):
        model.add(Served(0.0, "", "/api/chat", "small", 1, 2, 0.1, 200, "answered"))
    assert model.rowCount() == 200


def _is_free(server: ApiServer) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(server.url.rpartition(":")[2]))) != 0


def test_the_address_in_the_network_is_looked_up_once_a_start(
    server: ApiServer, settings: Settings, monkeypatch: pytest.MonkeyPatch, qtbot: QtBot
) -> None:
    looked = list[str]()

    def look() -> str:
        looked.append("")
        return f"10.0.0.{len(looked)}"

    monkeypatch.setattr("app.services.api_server._network_address", look)
    settings.serves = "network"
    assert [server.url.split(":")[1] for _ in range(3)] == ["//10.0.0.1"] * 3
    settings.serves_others = True
    qtbot.waitUntil(lambda: on(server), timeout=20_000)
    assert [server.url.split(":")[1] for _ in range(3)] == ["//10.0.0.2"] * 3
    settings.serves = "pc"
    assert server.url.startswith("http://127.0.0.1:")
