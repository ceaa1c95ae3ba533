"""The engine's process behind a server: `python -m engine.serving.engine_process`, told what to do on stdin.

It ends when the line to the server is lost.  The window's server has the window's engine process besides, and starts
this one for other models.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.common.config import EngineConfig
from engine.common.errors import CancelCheck, EngineError, ErrorCode
from engine.common.paths import python_module
from engine.process.lifetime import end_process, quiet_libraries, set_up_process
from engine.protocol import ServeModels, decode, encode
from engine.serving.link import BrokerLink, EngineLink

ENDING_S = 10.0


class EngineProcess(EngineLink):
    """A link to an engine that is started when somebody asks and it does not run.

    Args:
        on_end: told when it ended although nobody stopped it.
        chat: see `RequestBroker`.

    Attributes:
        on_gone: told when it has ended, however it did.
        order: how models are run from its next start on.
    """

    def __init__(self, config: EngineConfig, idle_s: float | None, on_end: Callable[[], None], chat: str = "") -> None:
        super().__init__()
        self.order = ServeModels(self.address, self.secret, config, idle_s, chat)
        self._on_end = on_end
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: threading.Thread | None = None
        self._runs = self._is_stopped = self._is_stopping = False
        self.on_gone: Callable[[], None] = lambda: None
        self.wake = self._start_engine

    @property
    def pid(self) -> int:
        """Of the process that runs or ran last; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    def stop_if_idle(self) -> None:
        """Ends it, unless it is answering; whoever asks next starts it again."""
        with self._starting:
            if not self._runs or self._is_stopping:
                return
            self._is_stopping = True
        if not self._disconnected():
            with self._starting:
                self._is_stopping = False

    def _start_engine(self) -> None:
        with self._starting:
            if self._is_stopped or self._runs:
                return
            command, variables = python_module("engine.serving.engine_process")
            try:
                self._process = process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, **variables}
                )
                assert process.stdin is not None
                process.stdin.write(encode(self.order))
                process.stdin.close()
            except OSError as error:
                raise EngineError(ErrorCode.ENGINE_DIED, f"The engine cannot be started: {error.strerror}.") from None
            self._watching = threading.Thread(target=self._watch, args=(process,), name="engine-process", daemon=True)
            self._watching.start()
            self._runs = True

    def expect_end(self) -> None:
        """From now on its end is no surprise, and it is not started again."""
        with self._starting:
            self._is_stopped = True

    def close(self) -> None:
        """Ends all answers, and waits for the engine's end, which losing the link brings about."""
        self.expect_end()
        super().close()
        if self._process is not None and self._watching is not None:
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._watching.join()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._starting:
            self._runs = False  # first: who asks after those that are refused here starts it again
            was_idle, self._is_stopping = self._is_stopping, False
        self.on_gone()
        if was_idle and self.state.under_way:  # who asked meanwhile
            try:
                self._start_engine()
            except EngineError as error:
                self.refuse_all(error)
        elif not self._is_stopped and not was_idle:
            # What waited for an engine that never connected is refused too.
            self.refuse_all(EngineError(ErrorCode.ENGINE_DIED, "The engine stopped: try again in a moment."))
            self._on_end()


def main() -> None:
    order = decode(sys.stdin.buffer.readline())
    assert isinstance(order, ServeModels)
    quiet_libraries()
    set_up_process(also_stderr=False)
    from engine.untrusted_text.process import UNTRUSTED_TEXT

    UNTRUSTED_TEXT.start()  # ready by the time torch is imported
    from engine.runtime.engine import Engine
    from engine.serving.broker import ModelBroker

    engine, over = Engine(), threading.Event()

    def load(model: Path, cancelled: CancelCheck) -> None:
        link.model_is(None, model)
        try:
            info = engine.load(
                replace(order.config, model=str(model)),
                on_progress=lambda _done, _total: None,
                cancelled=lambda: cancelled() or over.is_set(),
            )
        except EngineError as error:
            link.remark(error.message)  # who asks is told too; but perhaps nobody does
            raise
        link.remark(info.device_note, "")
        link.remark(info.template_note, info.path)

    engine.on_moved = lambda info: link.remark(info.news)
    broker = ModelBroker(engine, load, order.idle_s, lambda model: link.model_is(model), order.chat)
    try:
        link = BrokerLink(order.address, order.secret, broker, over.set)
    except EngineError:
        return  # the server has gone meanwhile
    broker.start()
    over.wait()
    broker.close()
    end_process(0)


if __name__ == "__main__":
    main()
