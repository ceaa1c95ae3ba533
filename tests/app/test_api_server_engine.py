"""Other programs and the window's own chat with one real engine, which is killed in the middle."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from app.services.api_server import ApiServer, ServerState
from app.services.engine_client import EngineClient
from app.services.settings import Settings
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.protocol import ChatMessage
from tests import plain_http
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(os.name != "posix", reason="the engine is killed by a signal")]
HELLO = [{"role": "user", "content": "Hello"}]
WAIT_MS = 60_000


@pytest.fixture
def window(settings: Settings, tmp_path: Path, qtbot: QtBot) -> Iterator[tuple[EngineClient, ApiServer]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        settings.server_port = free.getsockname()[1]
    client = EngineClient()
    server = ApiServer(client, settings)
    client.start()
    client.load(EngineConfig(str(tiny_checkpoint("mixtral", tmp_path / "tiny"))))
    settings.serves_others = True
    qtbot.waitUntil(lambda: client.model is not None and server.state is ServerState.ON, timeout=WAIT_MS)
    yield client, server
    server.close()
    client.close_now()


def test_programs_chats_and_jobs_go_on_at_once(
    window: tuple[EngineClient, ApiServer], qtbot: QtBot, tmp_path: Path
) -> None:
    client, server = window
    ended, order = dict[str, Any](), list[str]()
    for name in ("one", "two"):
        rows = tmp_path / f"{name}.jsonl"
        rows.write_text("".join(json.dumps({"text": f"Row {row}"}) + "\n" for row in range(60)))
        job = BatchJob(str(rows), str(tmp_path / f"{name}.out.jsonl"), sampling=SamplingParams(max_tokens=40))
        run = client.start_batch(job)
        run.answered.connect(lambda event, name=name: order.extend([name] * len(event.rows)))
        run.finished.connect(lambda event, name=name: ended.__setitem__(name, event))
    qtbot.waitUntil(lambda: {"one", "two"} <= set(order), timeout=WAIT_MS)  # neither waits for the other
    assert not ended

    def ask() -> None:
        body = {"messages": HELLO, "max_tokens": 60}
        ended["program"] = plain_http.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    program = threading.Thread(target=ask)
    program.start()
    client.generate([ChatMessage("user", "Hello")], SamplingParams(max_tokens=40)).finished.connect(
        lambda event: ended.__setitem__("chat", event)
    )
    qtbot.waitUntil(lambda: len(ended) == 4, timeout=WAIT_MS)
    program.join()
    assert ended["program"].status_code == 200
    assert ended["chat"].generated_tokens > 0
    for name in ("one", "two"):
        assert (ended[name].finished, ended[name].done, ended[name].failed) == (True, 60, 0)
        assert len((tmp_path / f"{name}.out.jsonl").read_text().splitlines()) == 60


def test_programs_and_chats_share_it_and_outlive_it(window: tuple[EngineClient, ApiServer], qtbot: QtBot) -> None:
    client, server = window
    answers: list[int] = []
    chats: list[Any] = []

    def ask() -> None:
        body = {"messages": HELLO, "max_tokens": 60}
        answers.append(plain_http.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    client.generate([ChatMessage("user", "Hello")], SamplingParams(max_tokens=20)).finished.connect(chats.append)
    qtbot.waitUntil(lambda: len(answers) == 5 and bool(chats), timeout=WAIT_MS)
    assert answers == [200] * 5
    assert chats[0].generated_tokens > 0

    begun, lines = threading.Event(), list[str]()

    def stream() -> None:
        form = {"name": "long", "schema": {"type": "string", "minLength": 2000}}  # it does not end by itself
        asked = {"messages": HELLO, "max_tokens": 220, "stream": True}
        body = {**asked, "response_format": {"type": "json_schema", "json_schema": form}}
        with plain_http.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if not begun.is_set() and line:
                    begun.set()
                    os.kill(client.worker_pid, signal.SIGKILL)

    streaming = threading.Thread(target=stream)
    streaming.start()
    qtbot.waitUntil(begun.is_set, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not streaming.is_alive(), timeout=WAIT_MS)
    assert any('"error"' in line for line in lines), lines[-4:]
    client.restart()
    qtbot.waitUntil(lambda: client.model is not None, timeout=WAIT_MS)
    again = threading.Thread(target=ask)
    again.start()
    qtbot.waitUntil(lambda: len(answers) == 6, timeout=WAIT_MS)
    assert answers[-1] == 200
    for thread in (*threads, again):
        thread.join()
    outcomes = [request.outcome for request in server.requests]
    qtbot.waitUntil(lambda: len(server.requests) == 7)
    assert "failed" in outcomes
