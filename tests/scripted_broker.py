"""What answers requests in place of an engine: as the test says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.protocol import Ask, Began, Finished, Token
from engine.serving.link import Event, State, Ticket


class ScriptedBroker:
    """Begins each answer with what it says, each piece one token; ends it if told to."""

    def __init__(self, *, ends: bool, says: str | tuple[str, ...] = "Hello") -> None:
        self._ends, self._says = ends, (says,) if isinstance(says, str) else says
        self.tickets: list[Ticket] = []
        self.released: list[tuple[Path, float]] = []

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        ticket = Ticket(ask, on_event)
        self.tickets.append(ticket)
        ticket.tell(Began("", 3, thinks=False))
        for number, piece in enumerate(self._says, 1):
            ticket.tell(Token("", piece, number))
        if self._ends:
            ticket.tell(Finished("", "stop", 3, 0, len(self._says)))
        return ticket

    def release(self, model: Path, after_s: float = 0) -> None:
        self.released.append((model, after_s))

    @property
    def state(self) -> State:
        return State(None, 0, 0)
