"""The HTTP server's process behind the window's switch: `python -m engine.serving.front`.

It is told on stdin where to listen, and says on stdout what happens.  It ends with stdin.  The engine is the window's;
only the model that is loaded there can be asked for, so that no program takes it away from its user.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from engine.checkpoint.library import LibraryEntry, describe, list_models
from engine.common.errors import EngineError, ErrorCode
from engine.process.lifetime import log_to_file
from engine.serving.front_messages import FRONT_LINES, Listen, Listening, NotListening
from engine.serving.link import EngineLink

_PATIENCE_S = 20.0
"""The engine comes once it has done what it is doing."""


_log = logging.getLogger(__name__)


def no_engine() -> None:
    """Raises EngineError `ENGINE_DIED`: the window starts engines, and nobody here can have it do so."""
    raise EngineError(ErrorCode.ENGINE_DIED, "Switchyard's engine is busy or not running: look at its window.")


class WindowModels:
    """The model that is loaded in the window; see `Models`."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._entry: LibraryEntry | None = None

    def listed(self) -> list[LibraryEntry]:
        """That one, if there is one."""
        path = self._link.state.model
        if path is None:
            return []
        if self._entry is None or self._entry.path != path:
            ours = (entry for entry in list_models() if entry.path == path)
            self._entry = next(ours, None) or describe(path, path.name)
        return [self._entry]

    def find(self, name: str) -> tuple[str, Path]:
        """See `Models`."""
        if not self._link.wait_for_engine(_PATIENCE_S):
            no_engine()
        loaded = next(iter(self.listed()), None)
        if loaded is None:
            raise EngineError(
                ErrorCode.MODEL_NOT_FOUND, "No model is loaded in Switchyard: choose one in its window first."
            )
        if name in ("", "default", loaded.name, loaded.path.name):
            return loaded.name, loaded.path
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model {name[:80]!r} is not loaded in Switchyard: load it in its window, or ask for {loaded.name!r}.",
        )


def main() -> None:
    """Entry of `python -m engine.serving.front`."""
    commands, events = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # whatever prints does not disturb the events
    writing = threading.Lock()
    logging.captureWarnings(True)
    log_to_file("server.log", also_stderr=False)

    def say(message: object) -> None:
        with writing:
            os.write(events, FRONT_LINES.encode(message))

    order: Listen = FRONT_LINES.decode(commands.readline())
    try:
        _serve(order, commands, say)
    except Exception:
        _log.exception("the server failed")
        raise


def _serve(order: Listen, commands: BinaryIO, say: Callable[[object], None]) -> None:
    from engine.serving.server import Address, Server
    from engine.serving.service import Service

    link = EngineLink()
    link.wake = no_engine
    server = Server(Service(link, WindowModels(link)), Address(order.host, order.port, order.key), say)
    try:
        port = server.start()
    except EngineError as error:
        _log.warning("%s", error.message)
        say(NotListening(error.message))
        link.close()
        return
    _log.info("listening at %s, port %d", order.host, port)
    link.start()
    say(Listening(port, link.address, link.secret))
    while commands.read(4096):
        pass
    server.stop()
    link.close()
    _log.info("ended")


if __name__ == "__main__":
    main()
