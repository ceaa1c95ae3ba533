"""A window's event loop with an engine, to be killed: prints the worker's pid once it is busy.  Run as a program."""

import sys

from PySide6.QtCore import QCoreApplication

from app.services.engine_client import EngineClient
from engine.common.config import SamplingParams
from engine.protocol import ChatMessage

application = QCoreApplication([])
client = EngineClient(command=sys.argv[1:-1])
announced = False


def on_token(_token: object) -> None:
    global announced
    if not announced:
        announced = True
        print(client.worker_pid, flush=True)  # noqa: T201


client.start()
client.generate([ChatMessage("user", sys.argv[-1])], SamplingParams()).token.connect(on_token)
application.exec()
