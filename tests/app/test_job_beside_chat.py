"""A job that a server and this PC answer, and a chat that this PC answers meanwhile, in the real window."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.main import first_run_entry, page_entries
from app.services.batch_job import JobEntry, JobState
from app.services.batch_jobs import BatchJobs
from app.services.chat_store import ChatStore, MessageState
from app.services.engine_client import EngineClient
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.batch.page import BatchPage
from app.views.main_window.window import MainWindow
from app.widgets.page import BATCH, CHAT
from engine.common.config import HERE, EngineConfig, SamplingParams
from engine.remote.endpoint import Endpoint, save_endpoint
from tests.app.test_batch_page import words
from tests.bad_endpoint import MODEL, Asked, BadEndpoint
from tests.starter import starter_for_tests

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_MS = 300_000
ROWS = 60


class Server(BadEndpoint):
    """Answers the first rows at once, and the others when it may."""

    def __init__(self) -> None:
        super().__init__(self._on_row)
        self.may_go_on = threading.Event()
        self._rows = 0

    def _on_row(self, asked: Asked) -> None:
        self._rows += 1
        if self._rows > 4:
            self.may_go_on.wait(600)
        asked.stream(asked.body["messages"][-1]["content"].upper())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        save_endpoint(Endpoint("Rack", found.url, MODEL, at_once=2))
        yield found
        found.may_go_on.set()


@pytest.fixture
def window(
    qtbot: QtBot, settings: Settings, theme: ThemeController, switchyard_home: Path, server: Server
) -> Iterator[tuple[MainWindow, BatchJobs]]:
    starter = starter_for_tests()
    store, client = ChatStore(), EngineClient()
    services = Services.around(client, store, settings, theme)
    result = MainWindow(services, page_entries(), first_run_entry())
    qtbot.addWidget(result)
    result.show()
    client.start()
    client.load(EngineConfig(str(starter), threads=1))
    qtbot.waitUntil(lambda: client.model is not None, timeout=WAIT_MS)
    yield result, services.jobs
    server.may_go_on.set()
    result.close()
    client.close_now()
    store.close()


def start_job(window: MainWindow, qtbot: QtBot, folder: Path) -> BatchPage:
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"Write about the number {row}."}) + "\n" for row in range(ROWS)))
    window.show_page(BATCH)
    page = window.page(BATCH)
    page.open_files([source])
    page.form.places.box("Rack").setChecked(True)
    assert page.form.places.names == (HERE, "Rack")
    qtbot.waitUntil(page.form.foot.start.isEnabled, timeout=WAIT_MS)
    page.form.foot.start.click()
    return page


def test_the_chat_goes_first_and_every_row_is_answered_once(
    window: tuple[MainWindow, BatchJobs], server: Server, qtbot: QtBot, tmp_path: Path
) -> None:
    shown, jobs = window
    page = start_job(shown, qtbot, tmp_path)

    def job() -> JobEntry:
        (found,) = jobs.entries
        return found

    def rows_at(name: str) -> int:
        return sum(place.rows for place in job().places if place.name == name)

    qtbot.waitUntil(lambda: bool(jobs.entries), timeout=WAIT_MS)
    qtbot.waitUntil(lambda: rows_at("Rack") >= 4, timeout=WAIT_MS)
    assert f"Rows are sent to Rack ({server.url.split('/')[2]}). Chats go first on this PC." in words(page.job_view)

    # A chat, while the server is silent and this PC has rows of the job.
    shown.show_page(CHAT)
    chat = shown.page(CHAT)
    chat.presenter.set_sampling(SamplingParams(temperature=0.0, max_tokens=40))
    chat.composer.box.setPlainText("Write a long story about a train.")
    qtbot.keyClick(chat.composer.box, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: bool(chat.presenter.model.rows[-1].message.content), timeout=WAIT_MS)
    shown.show_page(BATCH)
    said = words(page.job_view)
    assert "This PC answers your chat first." in said
    assert "Shares the engine with your chat" not in said
    qtbot.waitUntil(lambda: chat.presenter.model.rows[-1].message.state is MessageState.COMPLETE, timeout=WAIT_MS)
    assert job().state is JobState.RUNNING, "the chat did not wait for the job"
    assert chat.presenter.model.rows[-1].message.content

    server.may_go_on.set()
    qtbot.waitUntil(lambda: job().state is JobState.FINISHED, timeout=WAIT_MS)
    ended = job()
    assert (ended.done, ended.failed, rows_at("Rack") + rows_at("")) == (ROWS, 0, ROWS)
    assert rows_at("")
    lines = [json.loads(line) for line in ended.result_file.read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == [f"Write about the number {row}." for row in range(ROWS)]
    assert all(line["answer"] for line in lines)
