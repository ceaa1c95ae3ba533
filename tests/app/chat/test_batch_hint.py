"""A batch job beside the chat: chats come first, and the page says so calmly."""

from collections.abc import Callable

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.views.chat.chat_view import ChatView
from app.widgets.page import BATCH
from engine.common.config import BatchJob
from engine.common.errors import ErrorCode
from tests.app.chat.chat_page import type_and_send
from tests.app.scripted_batches import ScriptedBatches


@pytest.fixture
def engine() -> ScriptedBatches:
    return ScriptedBatches()


def test_a_job_is_told_and_shares(open_page: Callable[[], ChatView], engine: ScriptedBatches, qtbot: QtBot) -> None:
    page = open_page()
    hint = page.batch_hint
    assert not hint.isVisible()
    engine.start_batch(BatchJob("in.csv", "out.csv"))
    engine.tell(30, 120)
    assert hint.isVisible()
    assert "running" in hint.text
    assert "25%" in hint.text
    type_and_send(qtbot, page, "Hello?")
    assert "shares the engine with your chat" in hint.text
    assert "25%" in hint.text
    engine.write("Hello!")
    engine.finish()
    assert "is running" in hint.text
    with qtbot.waitSignal(page.page_wanted) as wanted:
        qtbot.mouseClick(hint.button, Qt.MouseButton.LeftButton)
    assert wanted.args == [BATCH]
    engine.end(120)
    assert not hint.isVisible()


def test_a_job_that_fails_is_no_longer_told(open_page: Callable[[], ChatView], engine: ScriptedBatches) -> None:
    page = open_page()
    engine.start_batch(BatchJob("in.csv", "out.csv"))
    engine.tell(0)
    assert page.batch_hint.text.startswith("A batch job is running. ")
    engine.fail_job(ErrorCode.INVALID_REQUEST, "The input was changed.")
    assert not page.batch_hint.isVisible()


def test_a_job_that_stays_paused_after_the_engine_died_says_so_until_it_goes_on(
    open_page: Callable[[], ChatView], engine: ScriptedBatches, qtbot: QtBot
) -> None:
    hint = open_page().batch_hint
    for see in (lambda: engine.tell(5), lambda: qtbot.mouseClick(hint.button, Qt.MouseButton.LeftButton)):
        engine.start_batch(BatchJob("in.csv", "out.csv"))
        engine.tell(4)
        engine.fail_job(ErrorCode.ENGINE_DIED, "The engine was killed.")
        engine.restart()
        assert hint.isVisible()
        assert "engine stopped" in hint.text
        see()
        assert "engine stopped" not in hint.text or not hint.isVisible()
