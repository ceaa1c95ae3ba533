"""What answers requests in place of an engine, as the test says, and models as if they were in the library."""

from collections.abc import Callable
from pathlib import Path

from engine.protocol import Ask, Began, Finished, Token
from engine.serving.link import Event, State, Ticket
from engine.serving.service import LibraryModels


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


def made_up_models() -> LibraryModels:
    """Three models, as if they were in the library."""
    models = LibraryModels(Path("mixtral"), "mixtral")
    models.listed = lambda: [_Entry(name) for name in ("mixtral", "qwen3_moe", "broken")]  # type: ignore[method-assign,misc]
    return models


class _Entry:
    """A model of the list."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, Path(name)
        self.family, self.parameters, self.bytes_on_disk = name, 10**6, 10**6
        self.precision_words = self.dtype = "float32"
        self.context_tokens, self.last_used, self.embeds, self.sees = 256, 0.0, False, name == "qwen3_moe"
        self.calls_tools = self.thinks = False
