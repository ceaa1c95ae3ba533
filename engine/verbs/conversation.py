"""A conversation in the terminal: lines in, streamed answers out, Ctrl-C stops an answer, Ctrl-D quits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError
from engine.common.model_info import ModelInfo
from engine.verbs.output import note, write_text

if TYPE_CHECKING:
    from engine.runtime.engine import Engine

_HELP = "/reset starts over, /quit or Ctrl-D quits, Ctrl-C stops an answer."


def converse(engine: Engine, info: ModelInfo, sampling: SamplingParams, system: str | None) -> int:
    """Converses until the user quits; returns the exit code."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives `input` line editing and a history

    note(f"{info.name} on {info.device}, {info.precision}, {info.threads} threads. {_HELP}")
    opening = [ChatMessage("system", system)] if system else []
    messages = list(opening)
    while (line := _next_line()) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(opening)
            note("A new conversation.")
        elif line in ("/help", "/?"):
            note(_HELP)
        elif line:
            messages = _turn(engine, sampling, [*messages, ChatMessage("user", line)])
    return 0


def _next_line() -> str | None:
    while True:
        try:
            return input("> ").strip()
        except KeyboardInterrupt:
            write_text("\n")  # Ctrl-C at the prompt drops the line, like in shells
        except EOFError:
            write_text("\n")
            return None


def _turn(engine: Engine, sampling: SamplingParams, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Answers the last message; returns the new conversation, without the message if answering failed."""
    try:
        with _stopped_by_ctrl_c() as stopped:
            result = engine.generate(
                messages,
                sampling,
                on_progress=lambda _done, _total: None,
                on_text=lambda text, _tokens: write_text(text),
                cancelled=stopped,
            )
    except EngineError as error:
        note(f"switchyard: {error.message}")
        return messages[:-1]
    write_text("\n")
    note(f"[{result.generated_tokens} tokens, {result.tokens_per_s:.1f}/s, first after {result.ttft_s:.2f} s]")
    return [*messages, ChatMessage("assistant", result.text)]


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Inside the block, Ctrl-C sets a flag instead of interrupting a computation; a second one interrupts."""
    presses = 0

    def on_press(_signal: int, _frame: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, on_press)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)
