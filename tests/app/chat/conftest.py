"""The chat page: a real store, a scripted engine."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from pytestqt.qtbot import QtBot

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import ChatStore
from app.services.documents import Documents
from app.services.endpoints import Endpoints
from app.services.kept import SavedPresets, SavedPrompts
from app.services.library import Library, ModelSpeeds
from app.services.model_start import ModelStart
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.services.tools import Tools
from app.views.chat.chat_view import ChatView
from engine.common.config import BatchJob
from tests.app.scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def store(qtbot: QtBot) -> Iterator[ChatStore]:
    with closing(ChatStore()) as store:
        yield store


@pytest.fixture
def queued() -> list[tuple[BatchJob, int]]:
    """Batch jobs that tools started, with the numbers of their rows."""
    return []


@pytest.fixture
def open_page(
    qtbot: QtBot, engine: ScriptedEngine, store: ChatStore, queued: list[tuple[BatchJob, int]]
) -> Callable[[], ChatView]:
    def build() -> ChatView:
        settings, library = Settings(), Library()
        speeds = ModelSpeeds(settings)
        answers, counter = AnswerQueue(engine, store), TokenCounter()  # type: ignore[arg-type]
        documents, prompts, presets = Documents(store), SavedPrompts(), SavedPresets()
        tools = Tools(settings, lambda: documents, lambda job, rows: queued.append((job, rows)))
        page = ChatView(
            engine,  # type: ignore[arg-type]
            store,
            settings,
            answers,
            counter,
            library,
            speeds,
            Endpoints(settings),
            documents,
            prompts,
            presets,
            lambda: tools,
        )
        page.restart_wanted.connect(ModelStart(engine, settings, page).restart)  # type: ignore[arg-type]
        kept = (tools.close, documents.close, prompts.close, presets.close)
        closing = (page.close_down, counter.close, library.close, speeds.close, *kept)
        qtbot.addWidget(page, before_close_func=lambda _page: [one() for one in closing])
        page.resize(1072, 800)
        with qtbot.waitSignal(store.listed):
            page.show()
        return page

    return build


@pytest.fixture
def page(open_page: Callable[[], ChatView]) -> ChatView:
    return open_page()
