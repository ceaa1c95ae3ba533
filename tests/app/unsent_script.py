"""A chat page with a text and a picture that are not sent, to be killed: prints a line once both are on disk.

Run as a program.
"""

from PySide6.QtCore import QTimer
from PySide6.QtGui import QColor, QImage
from PySide6.QtWidgets import QApplication

from app.services.answer_queue import AnswerQueue
from app.services.chat_store import ChatStore
from app.services.documents import Documents
from app.services.endpoints import Endpoints
from app.services.kept import SavedPresets, SavedPrompts
from app.services.library import Library, ModelSpeeds
from app.services.settings import Settings
from app.services.token_counter import TokenCounter
from app.views.chat.chat_view import ChatView
from engine.remote.endpoint import endpoint_at, save_endpoint
from tests.app.scripted_engine import ScriptedEngine

application = QApplication([])
save_endpoint(endpoint_at("http://127.0.0.1:8080/v1", "Here", model="m"))
engine, store, settings = ScriptedEngine(), ChatStore(), Settings()
page = ChatView(
    engine,  # type: ignore[arg-type]
    store,
    settings,
    AnswerQueue(engine, store),  # type: ignore[arg-type]
    TokenCounter(),
    Library(),
    ModelSpeeds(settings),
    Endpoints(settings),
    Documents(store),
    SavedPrompts(),
    SavedPresets(),
    lambda: None,  # type: ignore[arg-type, return-value]
)
page.presenter.choose_model("endpoint:Here/m")
picture = QImage(30, 20, QImage.Format.Format_RGB32)
picture.fill(QColor("teal"))
page.attaching.give([picture])
page.composer.box.setPlainText("What is")


def look() -> None:
    if page.presenter.pictures and page.presenter.conversation.draft and not store.unsaved:
        looking.stop()
        print("kept", flush=True)  # noqa: T201


looking = QTimer(interval=10)
looking.timeout.connect(look)
looking.start()
application.exec()
