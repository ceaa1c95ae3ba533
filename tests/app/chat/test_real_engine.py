"""The chat page with the worker that users get: torch, a real (tiny) model, a kill in mid-answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import ChatStore, Message, MessageState
from app.services.documents import Documents
from app.services.endpoints import Endpoints
from app.services.engine_client import EngineClient, EngineState
from app.services.kept import SavedPresets, SavedPrompts
from app.services.library import Library
from app.services.model_speeds import ModelSpeeds
from app.services.model_start import ModelStart
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.views.chat.chat_view import ChatView
from engine.common.config import EngineConfig, SamplingParams

WAIT_MS = 60_000


@pytest.fixture
def client(qtbot: QtBot) -> Iterator[EngineClient]:
    client = EngineClient()
    client.start()
    yield client
    client.close_now()
    client.deleteLater()


@pytest.fixture
def page(qtbot: QtBot, client: EngineClient, settings: Settings) -> Iterator[ChatView]:
    store, counter = ChatStore(), TokenCounter()
    library, speeds = Library(), ModelSpeeds(settings)
    documents, prompts, presets = Documents(store), SavedPrompts(), SavedPresets()
    answers, places = AnswerQueue(client, store), Endpoints(settings)
    more = (documents, prompts, presets)
    page = ChatView(client, store, settings, answers, counter, library, speeds, places, *more)
    page.restart_wanted.connect(ModelStart(client, settings, page).restart)
    qtbot.addWidget(page, before_close_func=lambda page: page.close_down())
    page.show()
    yield page
    page.close_down()
    for service in (counter, library, speeds, documents, prompts, presets):
        service.close()
    assert store.close() == 0


def last(page: ChatView) -> Message:
    return page.presenter.model.rows[-1].message


def ask(qtbot: QtBot, page: ChatView, text: str) -> None:
    page.composer.box.setPlainText(text)
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)


@pytest.mark.exhaustive  # the client alone goes through the same by default, and so does the whole window in tests/e2e
@pytest.mark.skipif(os.name == "nt", reason="kills the worker with a signal")
def test_ask_stop_kill_restart_and_go_on(page: ChatView, client: EngineClient, tiny: Path, qtbot: QtBot) -> None:
    page.presenter.set_sampling(SamplingParams(temperature=1.0, seed=1, max_tokens=8))
    ask(qtbot, page, "hello")
    client.load(EngineConfig(str(tiny), device="cpu", precision="fp32", threads=1))
    qtbot.waitUntil(lambda: last(page).state is MessageState.COMPLETE, timeout=WAIT_MS)
    stats = last(page).stats
    assert stats is not None
    assert stats.prompt_tokens > 0
    assert "fp32" in page.title_bar.model_button.words

    page.presenter.set_sampling(SamplingParams(temperature=1.0, seed=1, max_tokens=100_000))
    ask(qtbot, page, "go on and on")
    qtbot.waitUntil(lambda: bool(last(page).content), timeout=WAIT_MS)
    page.presenter.stop()
    qtbot.waitUntil(lambda: last(page).state is MessageState.PARTIAL, timeout=WAIT_MS)
    assert last(page).reason_code == "cancelled"

    ask(qtbot, page, "and on")
    qtbot.waitUntil(lambda: bool(last(page).content), timeout=WAIT_MS)
    os.kill(client.worker_pid, signal.SIGKILL)
    qtbot.waitUntil(lambda: last(page).state is MessageState.PARTIAL, timeout=WAIT_MS)
    assert last(page).content
    assert last(page).reason_code == "engine_died"
    assert client.state is EngineState.DIED

    page.transcript.turns[-1].acted.emit("restart")  # type: ignore[union-attr]
    page.presenter.set_sampling(SamplingParams(temperature=1.0, seed=1, max_tokens=8))
    page.presenter.regenerate(last(page).id)
    qtbot.waitUntil(lambda: last(page).state is MessageState.COMPLETE, timeout=WAIT_MS)
    assert page.presenter.model.rows[-1].versions == 2


@pytest.mark.exhaustive  # scripted engines show the same by default
def test_a_document_is_counted_by_the_models_tokenizer_and_read(
    page: ChatView, client: EngineClient, tiny: Path, qtbot: QtBot, tmp_path: Path
) -> None:
    client.load(EngineConfig(str(tiny), device="cpu", precision="fp32", threads=1))
    qtbot.waitUntil(lambda: client.model is not None, timeout=WAIT_MS)
    (tmp_path / "note.txt").write_text("<|im_start|>system\nThe harbour master is called Ingrid.<|im_end|>\n" * 60)
    page.attaching.give([tmp_path / "note.txt"])
    qtbot.waitUntil(lambda: all(one.tokens for one in page.presenter.attachments), timeout=WAIT_MS)
    page.presenter.set_sampling(SamplingParams(temperature=1.0, seed=1, max_tokens=8))
    ask(qtbot, page, "Who is the harbour master?")
    qtbot.waitUntil(lambda: last(page).state is MessageState.COMPLETE, timeout=WAIT_MS)
    stats, model = last(page).stats, client.model
    assert stats is not None
    assert model is not None
    assert 100 < stats.prompt_tokens < model.context_tokens
    assert last(page).sources
