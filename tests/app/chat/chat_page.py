"""What tests of the chat page do with it, as a person would."""

from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.views.chat.answer_message import AnswerMessage
from app.views.chat.chat_view import ChatView
from tests.app.scripted_engine import ScriptedEngine


def type_and_send(qtbot: QtBot, page: ChatView, text: str) -> None:
    page.composer.box.setPlainText(text)
    qtbot.keyClick(page.composer.box, Qt.Key.Key_Return)


def answered(qtbot: QtBot, page: ChatView, engine: ScriptedEngine, question: str, answer: str) -> None:
    type_and_send(qtbot, page, question)
    engine.reply(answer)


def shown(page: ChatView) -> list[tuple[str, str]]:
    return [(row.message.role, row.message.content) for row in page.presenter.model.rows]


def last_answer(page: ChatView) -> AnswerMessage:
    turn = page.transcript.turns[-1]
    assert isinstance(turn, AnswerMessage)
    return turn


def titles(page: ChatView) -> list[str]:
    return [entry.conversation.title for entry in page.panel._model.entries if entry.conversation is not None]
