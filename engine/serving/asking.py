"""What clients ask for, and what they are told: between the HTTP server and the engine, wherever these two run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.common.errors import EngineError, ErrorCode
from engine.protocol import Ask, Began, Failed, Finished, Progress, Token

MOST_WAITING = 1000


AnswerEvent = Began | Token | Finished
Event = AnswerEvent | Progress | Failed


class Ticket:
    """A request that was handed in.

    Args:
        on_cancel: called once when nobody waits for the answer any more, unless it has ended.
    """

    def __init__(
        self, ask: Ask, on_event: Callable[[Event], None], on_cancel: Callable[[], None] | None = None
    ) -> None:
        self.ask, self._on_event, self._on_cancel = ask, on_event, on_cancel
        self._is_cancelled = threading.Event()
        self._is_over = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if not self._is_cancelled.is_set():
            self._is_cancelled.set()
            if self._on_cancel is not None and not self._is_over:
                self._on_cancel()

    def is_cancelled(self) -> bool:
        """Whether nobody does."""
        return self._is_cancelled.is_set()

    def tell(self, event: Event) -> None:
        """Reports to the client, unless it has been told how it ended."""
        if self._is_over:
            return
        self._is_over = isinstance(event, Finished | Failed)
        self._on_event(event)


@dataclass(frozen=True, slots=True)
class State:
    """What is going on now: the loaded model's path, requests being answered, and requests waiting."""

    model: Path | None
    under_way: int
    waiting: int


class Answerer(Protocol):
    """Takes requests and reports to who asked: a broker in this process, or the line to one in another."""

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Hands in a request.  `on_event` is called on another thread, last with `Finished` or `Failed`, exactly once.

        Raises:
            EngineError: `BUSY`, if too many wait.
        """
        ...

    def prepare(self, model: Path) -> None:
        """Has a model loaded before anybody asks for it; a failure is reported to who asks first."""
        ...

    def release(self, model: Path, after_s: float = 0) -> None:
        """Frees the model, if it is this one, once nobody has asked for it for so long; never, if that is negative."""
        ...

    @property
    def state(self) -> State: ...


def too_many() -> EngineError:
    """Why a request is not taken."""
    return EngineError(
        ErrorCode.BUSY, f"The server takes no request now: {MOST_WAITING:,} requests are waiting; try again later."
    )


def closing() -> Failed:
    """What who still waits is told at the end."""
    return Failed("", ErrorCode.BUSY, "The server is closing: try again later.")
