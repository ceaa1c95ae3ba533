"""What clients ask for, and what they are told: between the HTTP server and the engine, wherever these two run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, FinishReason, PromptEnd, Tool, ToolChoice
from engine.common.errors import EngineError, ErrorCode

MOST_WAITING = 1000


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that a client wants.

    Attributes:
        model: its path.
        messages, tools: a conversation, and how its prompt is to `end`; or `text` or `ids`, tokens, as they stand.
        choice: which of the tools may, or must, be called.
        special: with what the tokenizer adds at the ends of a text.
        sampling: fields of `SamplingParams` that differ from what the model's makers suggest.
        top_chances: how many likely tokens to name for each token; `None` logs nothing.
        ignores_end: the answer goes on to its limit, past where the model would end it.
        wants: the answer, or only the prompt's length, or only the prompt itself; nothing is generated then.
        keep_s: how long the model is kept afterwards, see `Answerer.release`; None leaves that as it is.
    """

    model: Path
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    end: PromptEnd = "answer"
    text: str | None = None
    ids: tuple[int, ...] = ()
    special: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    top_chances: int | None = None
    ignores_end: bool = False
    wants: Literal["answer", "length", "prompt"] = "answer"
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token and how likely it was; `raw` are its bytes, which may be a part of a character only."""

    text: str
    logprob: float
    raw: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt for who wants to see it: its text, and the ids and the bytes of its tokens."""

    text: str
    ids: tuple[int, ...]
    raw: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Began:
    """The prompt is known; `thinks` if it ends by opening the model's reasoning, who is of the `family`.

    With `is_call` all but the reasoning is one call as JSON, in no family's form.
    """

    prompt_tokens: int
    thinks: bool
    family: str = ""
    prompt: Prompt | None = None
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class PromptRead:
    """So many tokens of a long prompt have been read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class NamedChances:
    """`Chances` with the tokens' texts."""

    token: NamedToken
    likeliest: tuple[NamedToken, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """More text of the answer; it may be empty."""

    text: str
    generated_tokens: int
    chances: tuple[NamedChances, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete.

    `reused_tokens` of the prompt did not have to be read; `stopped_by` is the stop string that ended it, if one did.
    """

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    stopped_by: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no answer, or no more of it."""

    error: EngineError


Progress = Began | Said | Ended
Event = Progress | PromptRead | Refused


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
        self._is_over = isinstance(event, Ended | Refused)
        self._on_event(event)


@dataclass(frozen=True, slots=True)
class State:
    """What is going on now: the loaded model's path, requests being answered, and requests waiting."""

    model: Path | None
    under_way: int
    waiting: int


class Answerer(Protocol):
    """Takes requests and reports to who asked: a desk in this process, or the line to one in another."""

    def ask(self, ask: Ask, on_event: Callable[[Event], None]) -> Ticket:
        """Hands in a request.  `on_event` is called on another thread, last with `Ended` or `Refused`, exactly once.

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


def closing() -> Refused:
    """What who still waits is told at the end."""
    return Refused(EngineError(ErrorCode.BUSY, "The server is closing: try again later."))
