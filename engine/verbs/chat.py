"""`switchyard chat`: answer once, or converse in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engine.common.chat import ChatMessage, parts_with
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.falls import FALLS
from engine.common.model_info import ModelInfo
from engine.common.pictures import pictures_in_files
from engine.remote.endpoint import is_remote
from engine.verbs.models.progress import ProgressLine
from engine.verbs.options import add_engine_options, add_sampling_options, engine_config, given_sampling
from engine.verbs.output import emit, note, write_aside, write_text
from engine.verbs.tracing import traced

if TYPE_CHECKING:
    from engine.protocol import LoadPhase
    from engine.runtime.engine import Engine

_HELP = "/reset starts over, /quit or Ctrl-D quits, Ctrl-C stops an answer."


class Answer(Protocol):
    """What is told of an answer."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...


_Answer = TypeVar("_Answer", bound=Answer, covariant=True)


class Talker(Protocol[_Answer]):
    """Who answers: the engine, or a server elsewhere."""

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[int, int], None],
        on_text: Callable[[str, int], None],
        on_reasoning: Callable[[str, int], None],
        cancelled: Callable[[], bool],
    ) -> _Answer: ...


def converse(talker: Talker[Answer], heading: str, sampling: SamplingParams, system: str | None) -> int:
    """Converses until the user quits; returns the exit code."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives `input` line editing and a history

    note(f"{heading}. {_HELP}")
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
            messages = _turn(talker, sampling, [*messages, ChatMessage("user", line)])
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


class _Shown:
    """An answer on its way to the terminal, after what the model thinks, which is dimmed.

    Args:
        quiet: nothing is shown.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._thinks = quiet, False

    def on_reasoning(self, text: str, _tokens: int) -> None:
        if not self._quiet:
            self._thinks = True
            write_aside(text)

    def on_text(self, text: str, _tokens: int) -> None:
        if text and not self._quiet:
            self.end_thought()
            write_text(text)

    def end_thought(self) -> None:
        """What follows is not thought."""
        if self._thinks:
            self._thinks = False
            write_aside("\n\n")


def _turn(talker: Talker[Answer], sampling: SamplingParams, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Answers the last message; returns the new conversation, without the message if answering failed."""
    shown = _Shown()
    try:
        with _stopped_by_ctrl_c() as stopped:
            result = talker.generate(
                messages,
                sampling,
                on_progress=lambda _done, _total: None,
                on_text=shown.on_text,
                on_reasoning=shown.on_reasoning,
                cancelled=stopped,
            )
    except EngineError as error:
        note(f"switchyard: {error.message}")
        return messages[:-1]
    shown.end_thought()
    write_text("\n")
    note(f"[{result.generated_tokens} tokens, {result.tokens_per_s:.1f}/s, first after {result.ttft_s:.2f} s]")
    return [*messages, ChatMessage("assistant", result.text, result.reasoning)]


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


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat",
        help="answer once, or converse in the terminal",
        description="Answers --prompt, or piped input, once; without either it converses in the terminal. "
        "Sampling options default to the model's own.",
    )
    parser.add_argument(
        "--model", default="starter", metavar="M", help="starter, a library name, a folder, or endpoint:NAME/MODEL"
    )
    parser.add_argument("--prompt", metavar="T", help="the prompt; piped input is then ignored")
    parser.add_argument("--system", metavar="S", help="system prompt")
    parser.add_argument(
        *("--picture", "--image"),
        type=Path,
        action="append",
        metavar="FILE",
        help="a PNG, JPEG, WebP or GIF file to send with the prompt to a model that sees; may be repeated",
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--record-routing", type=_trace_file, metavar="FILE", help="write the routing, for `switchyard cache`"
    )
    parser.add_argument(
        "--trace", type=_trace_file, metavar="FILE", help="write a timeline, for a trace viewer (.csv: a table)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answers or converses; returns the exit code."""
    given = given_sampling(args)
    replace(SamplingParams(), **given)  # validate before loading a model
    converses = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if converses and args.json:
        raise EngineError(ErrorCode.INVALID_REQUEST, "--json needs a prompt: give --prompt or pipe text in.")
    if args.picture and converses:
        raise EngineError(ErrorCode.INVALID_REQUEST, "--picture needs a prompt: give --prompt or pipe text in.")
    if is_remote(args.model):
        return _elsewhere(args, given, None if converses else _question(args))
    if converses:
        engine, info = load_engine(args)
        try:
            with _recorded_routing(engine, args.record_routing), traced(engine, args.trace):
                return converse(engine, _heading(info), replace(engine.default_sampling(), **given), args.system)
        finally:
            engine.unload()
    return _answer_once(args, given, _question(args))


def _heading(info: ModelInfo) -> str:
    return f"{info.name} on {info.device}, {info.precision}, {info.threads} threads"


def _elsewhere(args: argparse.Namespace, given: dict[str, Any], question: str | None) -> int:
    """Has a server elsewhere answer the question, or converses with it."""
    from engine.verbs import remote_chat

    parts = parts_with(question or "", pictures_in_files(args.picture or ()))

    def use(talk: remote_chat.RemoteTalk, heading: str, sampling: SamplingParams) -> int:
        if question is None:
            return converse(talk, heading, sampling, args.system)
        note(f"switchyard: {heading}")
        told = _whole_answer(talk, args, sampling, question, parts)
        emit(remote_chat.document(told, args), as_json=args.json, human="")
        return 0

    return remote_chat.run(args, given, use)


_DOING: dict[LoadPhase, str] = {
    "loading": "Opening",
    "reading": "Reading",
    "converting": "Converting",
}


def load_engine(args: argparse.Namespace) -> tuple[Engine, ModelInfo]:
    """An engine with the chosen model loaded; notes on unexpected settings go to stderr."""
    from engine.checkpoint.library import resolve
    from engine.process.importing import begin_reading, import_engine, load_torch_meanwhile

    path = resolve(args.model)  # before importing torch: report a mistyped name immediately
    config = engine_config(args, str(path))
    load_torch_meanwhile()
    begin_reading(config)

    engine = import_engine()()
    label = f"{_DOING['loading']} {path.name}"

    def on_phase(phase: LoadPhase) -> None:
        nonlocal label
        label = f"{_DOING[phase]} {path.name}"

    def on_progress(done: int, total: int) -> None:
        if sys.stderr.isatty() and total > 0:
            line.update(done, total, label=label)

    with ProgressLine(path.name, in_bytes=True) as line:
        info = engine.load(config, on_progress=on_progress, cancelled=lambda: False, on_phase=on_phase)
    engine.on_moved = lambda info: note(f"\nswitchyard: {info.news}")
    for remark in (info.device_note, info.template_note):
        if remark:
            note(f"switchyard: {remark}")
    if getattr(args, "thinking", None) not in (None, "auto") and not info.thinking:
        note("switchyard: this model's chat template cannot be told how much to think, so --thinking changes nothing")
    return engine, info


def _trace_file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: its folder must exist")
    return path


@contextmanager
def _recorded_routing(engine: Engine, path: Path | None) -> Iterator[None]:
    """If `path` is given, records the routing inside the block and writes it there."""
    if path is None:
        yield
        return
    recorder = engine.record_routing()
    recorder.begin_sequence()
    yield
    tokens = recorder.save(path)
    note(f"switchyard: the routing of {tokens} tokens is in {path}")


def _question(args: argparse.Namespace) -> str:
    text: str = args.prompt if args.prompt is not None else sys.stdin.read() if sys.stdin is not None else ""
    if not text.strip():
        raise EngineError(ErrorCode.INVALID_REQUEST, "The prompt is empty: give --prompt or pipe text in.")
    return text


def _whole_answer(
    talker: Talker[_Answer], args: argparse.Namespace, sampling: SamplingParams, question: str, parts: str = ""
) -> _Answer:
    """The answer, which is shown as it comes unless a document is wanted."""
    system = [ChatMessage("system", args.system)] if args.system else []
    shown = _Shown(quiet=args.json)
    result = talker.generate(
        [*system, ChatMessage("user", question, parts=parts)],
        sampling,
        on_progress=lambda _done, _total: None,
        on_text=shown.on_text,
        on_reasoning=shown.on_reasoning,
        cancelled=lambda: False,
    )
    shown.end_thought()
    return result


def _answer_once(args: argparse.Namespace, given: dict[str, Any], question: str) -> int:
    parts = parts_with(question, pictures_in_files(args.picture or ()))
    engine, info = load_engine(args)
    try:
        with _recorded_routing(engine, args.record_routing), traced(engine, args.trace):
            result = _whole_answer(engine, args, replace(engine.default_sampling(), **given), question, parts)
    finally:
        engine.unload()
    document = {
        "text": result.text,
        "reasoning": result.reasoning,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "ttft_s": result.ttft_s,
        "tokens_per_s": result.tokens_per_s,
        "device": info.device,
        "finish_reason": result.finish_reason,
        "model": info.name,
        "precision": info.precision,
        "threads": info.threads,
        "device_note": info.device_note,
        "template_note": info.template_note,
        "gave_way": FALLS.note,
        "pictures": result.pictures,
        "pictures_kept": result.pictures_kept,
        "pictures_s": result.pictures_s,
    }
    emit(document, as_json=args.json, human="")  # the text has been streamed; this ends its line
    return 0
