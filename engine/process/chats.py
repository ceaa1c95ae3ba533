"""Chats in the engine process: several at once, beside a job if there is one, each with its own events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from engine.common.falls import FALLS
from engine.process.failures import log_failure
from engine.process.requests import RequestQueue, failed
from engine.protocol import Called, Event, Finished, Generate, Phase, Progress, SampleBatch, StartBatch, Token
from engine.telemetry.recorder import RequestLog

if TYPE_CHECKING:
    from engine.runtime.decode.generation import Outcome
    from engine.runtime.engine import Engine

PROGRESS_S = 0.05
"""Least time between two reports of progress: a model has thousands of tensors."""


class ChatService:
    """Has chats and other programs' requests answered as they arrive, on the engine's thread.

    Args:
        begins: told which request's work begins.
        wrote: told after each token, and with 0 after an answer's end, how many came.
        others: lets other programs' requests join those that the engine is answering; called often.
    """

    def __init__(
        self,
        requests: RequestQueue,
        send: Callable[[Event], object],
        engine: Engine,
        begins: Callable[[str], None],
        wrote: Callable[[int], None],
        others: Callable[[], None] = lambda: None,
    ) -> None:
        self._requests, self._send, self._engine = requests, send, engine
        self._begins, self._wrote, self._others = begins, wrote, others
        self._progress_s = 0.0
        self._open: set[str] = set()

    def begin(self, asked: Generate) -> None:
        from engine.runtime.decode.generation import BatchRequest  # as torch: not before it is needed

        name, told = asked.request_id, -1
        log = RequestLog()

        def on_progress(done: int, total: int) -> None:
            nonlocal told
            if told < 0:
                told = 0
                log.reads(total - done)
            self.progress(name, "prefill", done, total)

        def on_end(outcome: Outcome) -> None:
            log.ends()
            self._open.discard(name)
            if not isinstance(outcome, BaseException) and outcome.calls:
                self._send(Called(name, outcome.calls))
            self._end(name, outcome)

        def tell(tokens: int, text: str, reasoning: str = "") -> None:
            nonlocal told
            self._send(Token(name, text, tokens, reasoning))
            log.has_written(tokens)
            self._wrote(tokens - max(told, 0))
            told = tokens

        self._open.add(name)
        try:
            self._engine.begin(
                BatchRequest(
                    0,
                    asked.messages,
                    sampling=asked.sampling,
                    tools=asked.tools,
                    chat=asked.chat,
                    splits=True,
                    on_progress=on_progress,
                    on_text=lambda text, tokens: tell(tokens, text),
                    on_reasoning=lambda text, tokens: tell(tokens, "", text),
                    on_reused=log.reuses,
                    cancelled=lambda: self._requests.is_cancelled(name),
                ),
                on_end,
                lambda: self._begins(name),
            )
        except Exception as error:
            on_end(error)

    @property
    def are_under_way(self) -> bool:
        """Whether any chat has not ended yet; other programs' requests may go on longer."""
        return bool(self._open)

    def answer(self, until: Callable[[], bool] | None = None) -> None:
        """Answers who asks, and goes on with jobs, until nothing is left or `until()`, which by default is that the
        window wants something else: a job goes on beside chats, and all else waits for them, but for no other program.
        """
        if self._engine.is_busy:
            is_over = until or self._is_wanted_elsewhere
            with _ended():
                self._engine.scheduler.serve(lambda: self._arrive() or is_over())

    def are_due(self) -> bool:
        """Whether who asks is to have a turn before a job goes on."""
        self._arrive()
        return self._engine.is_answering and self._engine.scheduler.is_due()

    def take_turns(self) -> None:
        """Answers who asks for as long as the job has computed since."""
        if self._engine.is_answering:
            with _ended():
                self._engine.scheduler.share(self._arrive)

    def _is_wanted_elsewhere(self) -> bool:
        if self._open:
            return self._requests.waits(StartBatch, SampleBatch)
        return self._requests.waits() or self._requests.is_closed

    def _arrive(self) -> bool:
        while (request := self._requests.take_if(Generate)) is not None:
            assert isinstance(request, Generate)
            self.begin(request)
        self._others()
        return False

    def progress(self, name: str, phase: Phase, done: int, total: int) -> None:
        """Tells of it no more often than it can be shown, and of its end."""
        now = monotonic()
        if done >= total or now - self._progress_s >= PROGRESS_S:
            self._progress_s = now
            self._send(Progress(name, phase, done, total))

    def _end(self, name: str, outcome: Outcome) -> None:
        if isinstance(outcome, BaseException):
            self._requests.end(failed(name, outcome, "answering"))
        else:
            self._requests.end(Finished.of(outcome, name, gave_way=FALLS.note))
        self._wrote(0)


@contextmanager
def _ended() -> Iterator[None]:
    """What breaks here has ended the chats, each of which was told so; the next one, or a job, may go on."""
    try:
        yield
    except BaseException as error:
        log_failure(error, "answering")
