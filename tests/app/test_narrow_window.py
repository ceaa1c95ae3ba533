"""The window made as small as it goes, from any size: nothing in a conversation is cut off at its side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel, QWidget
from pytestqt.qtbot import QtBot

from app.main import first_run_entry, page_entries
from app.services.chat_store import AnswerStats, ChatStore, Conversation, Message, new_id
from app.services.engine_client import EngineClient
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.chat.chat_view import ChatView
from app.views.main_window import SIZE, SMALLEST, MainWindow
from app.widgets.page import CHAT

QUESTION = "What is the capital of France? And then show me a function in Python that adds two numbers, with a test."
ANSWER = f"**Paris.** {QUESTION}\n\n```python\ndef add(a, b):\n    return a + b\n```\n\n{QUESTION}"


@pytest.fixture
def window(qapp: QApplication, settings: Settings, theme: ThemeController) -> Iterator[MainWindow]:
    """With a conversation of two turns."""
    conversation = Conversation(new_id(), QUESTION, created_at=1.0, updated_at=1.0)
    user = Message(new_id(), conversation.id, None, "user", QUESTION, created_at=1.0)
    stats = AnswerStats("length", prompt_tokens=20, generated_tokens=72, ttft_s=9.3, tokens_per_s=12.5)
    answer = Message(new_id(), conversation.id, user.id, "assistant", ANSWER, created_at=2.0, stats=stats)
    client, store = EngineClient(), ChatStore()
    store.create(conversation, [user, answer])
    store.flush()
    settings.set("last_chat", conversation.id)
    result = MainWindow(Services.around(client, store, settings, theme), page_entries(), first_run_entry())
    yield result
    result.close()
    store.close()
    result.deleteLater()
    client.deleteLater()
    store.deleteLater()


def _cut_off(page: QWidget, area: QWidget) -> list[str]:
    """Labels and buttons that reach beyond the right edge of `area`, or are narrower than their text."""
    found = []
    for widget in page.findChildren(QWidget):
        if not isinstance(widget, QLabel | QAbstractButton) or not widget.isVisible():
            continue
        right = widget.mapTo(area, widget.rect().topRight()).x()
        if right > area.width():
            found.append(f"{type(widget).__name__} {widget.accessibleName() or widget.text()!r} ends at {right}")
    return found


@pytest.mark.parametrize("font_px", [14, 18])
def test_a_conversation_fits_the_smallest_window(
    window: MainWindow, theme: ThemeController, qtbot: QtBot, font_px: int
) -> None:
    theme.set_font_px(font_px)
    chat = window.page(CHAT)
    assert isinstance(chat, ChatView)
    window.resize(SIZE)
    window.show()
    qtbot.waitUntil(lambda: len(chat.transcript.turns) == 2)
    window.resize(SMALLEST)
    viewport = chat.transcript.viewport()
    qtbot.waitUntil(lambda: _cut_off(chat.transcript, viewport) == [])
    qtbot.waitUntil(lambda: chat.transcript.widget().width() <= viewport.width())
    assert chat.transcript.horizontalScrollBarPolicy() == Qt.ScrollBarPolicy.ScrollBarAlwaysOff
