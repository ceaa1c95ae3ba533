"""`switchyard chat`: answer once, or converse in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.common.chat import ChatMessage, FinishReason, Tool, ToolCall, parts_with
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.common.falls import FALLS
from engine.common.files import NewFile
from engine.common.model_info import ModelInfo
from engine.common.pictures import pictures_in_files
from engine.protocol import Token
from engine.remote.endpoint import called, is_remote, parse_remote
from engine.tools.rounds import OfferedTool, Step
from engine.verbs.chat_tools import ChatTools, add_tool_options, answer_with_tools, tools_of, use_document
from engine.verbs.models.library import ProgressLine
from engine.verbs.options import add_engine_options, add_sampling_options, engine_config, given_sampling
from engine.verbs.output import emit, note, stopped_by_ctrl_c, write_aside, write_text

if TYPE_CHECKING:
    from engine.protocol import LoadPhase
    from engine.remote.client import Client
    from engine.runtime.engine import Engine
    from engine.telemetry.records import Records


_LEFT_OUT = {"dry": "DRY", "beams": "beam search", "thinking": "--thinking"}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, as the engine gives them."""

    text: str
    reasoning: str
    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    ttft_s: float
    tokens_per_s: float
    model: str
    left_out: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()


class RemoteTalk:
    """Has an endpoint's model answer as the engine would."""

    def __init__(self, client: Client, model: str, chosen: tuple[str, ...]) -> None:
        self._client, self.model, self._chosen = client, model, chosen
        self._noted: set[str] = set()

    def generate(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams,
        *,
        on_progress: Callable[[int, int], None],  # noqa: ARG002 - nothing is known of it
        on_text: Callable[[str, int], None],
        on_reasoning: Callable[[str, int], None],
        cancelled: Callable[[], bool],
        tools: tuple[Tool, ...] = (),
    ) -> Told:
        said: list[str] = []
        thought: list[str] = []
        pieces = 0

        def on_delta(delta: Token) -> None:
            nonlocal pieces
            pieces = delta.generated_tokens
            if delta.reasoning:
                thought.append(delta.reasoning)
                on_reasoning(delta.reasoning, pieces)
            if delta.text:
                said.append(delta.text)
                on_text(delta.text, pieces)

        if tools and "tools" in self._client.found.lacks:
            words = f"{called(self._client.endpoint)} takes no tools: leave --tools out, or choose another model."
            raise EngineError(ErrorCode.MODEL_UNSUPPORTED, words)
        from engine.remote.chat_form import RemoteRequest

        request = RemoteRequest(tuple(messages), sampling, self.model, tools, chosen=self._chosen)
        try:
            answer = self._client.ask(request, on_delta, cancelled)
        except RequestCancelled:
            return Told("".join(said), "".join(thought), "cancelled", 0, pieces, 0.0, 0.0, self.model)
        new = [name for name in answer.left_out if name not in self._noted]
        self._noted.update(new)
        if new:
            names = ", ".join(_LEFT_OUT.get(name, f"--{name.replace('_', '-')}") for name in new)
            note(f"switchyard: {called(self._client.endpoint)} does not take {names}; it answers without")
        return Told(
            answer.text,
            answer.reasoning,
            answer.finish_reason,
            answer.prompt_tokens or 0,
            answer.written,
            answer.first_token_s or 0.0,
            answer.tokens_per_s,
            answer.model,
            answer.left_out,
            answer.tool_calls,
        )


@contextmanager
def traced(engine: Engine, path: Path | None) -> Iterator[None]:
    """If `path` is given, records the block and writes it there: a table of spans (`.csv`), otherwise a trace."""
    if path is None:
        yield
        return
    from engine.telemetry.trace_export import collected

    telemetry, info = engine.telemetry, engine.info
    if telemetry is not None:
        telemetry.start()
    try:
        with collected() as collection:
            yield
    finally:
        if telemetry is not None:
            telemetry.stop()
    about = {"model": info.name, "device": info.device, "precision": info.precision} if info is not None else {}
    write_timeline(collection.spans, collection.steps, path, about, lost=collection.dropped)


def write_timeline(spans: Records, steps: Records, path: Path, about: dict[str, str], *, lost: int = 0) -> None:
    """Writes spans, as a table if the path ends in `.csv`, otherwise as a trace, and notes it on stderr.

    Args:
        lost: number of dropped spans.
    """
    from engine.telemetry.trace_export import write_spans, write_trace

    table = path.suffix.lower() == ".csv"
    try:
        if table:
            with NewFile(path) as new:
                with new.path.open("w", encoding="utf-8", newline="") as file:
                    write_spans(spans, file)
                new.take_place()
        else:
            write_trace(spans, steps, path, about)
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"Cannot write the trace to {path}: {error.strerror or error}."
        ) from error
    viewer = "" if table else ", for ui.perfetto.dev or chrome://tracing"
    note(f"switchyard: wrote {len(spans):,} spans to {path}{viewer}" + (f"; {lost:,} more were lost" if lost else ""))


_HELP = "/reset starts over, /quit or Ctrl-D quits, Ctrl-C stops an answer."


def converse(
    talker: Engine | RemoteTalk,
    heading: str,
    sampling: SamplingParams,
    system: str | None,
    tools: ChatTools | None = None,
) -> int:
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
            messages = _turn(talker, sampling, [*messages, ChatMessage("user", line)], tools)
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

    def end_part(self, result: Any) -> None:
        """The model has ended, or calls tools: what follows begins on a line of its own."""
        self.end_thought()
        if result.calls and result.text and not self._quiet:
            write_text("\n")

    def end_thought(self) -> None:
        if self._thinks:
            self._thinks = False
            write_aside("\n\n")


def _turn(
    talker: Engine | RemoteTalk, sampling: SamplingParams, messages: list[ChatMessage], tools: ChatTools | None
) -> list[ChatMessage]:
    """Answers the last message; returns the new conversation, without the message if answering failed."""
    try:
        with stopped_by_ctrl_c() as stopped:
            result, steps, turns = _answer(talker, sampling, messages, tools, _Shown(), stopped)
    except EngineError as error:
        note(f"switchyard: {error.message}")
        return messages[:-1]
    write_text("\n")
    note(f"[{result.generated_tokens} tokens, {result.tokens_per_s:.1f}/s, first after {result.ttft_s:.2f} s]")
    if steps and not result.text:  # it was stopped among its calls, which stay
        return turns
    return [*turns, ChatMessage("assistant", result.text, result.reasoning)]


def _answer(
    talker: Engine | RemoteTalk,
    sampling: SamplingParams,
    messages: Sequence[ChatMessage],
    tools: ChatTools | None,
    shown: _Shown,
    cancelled: Callable[[], bool],
) -> tuple[Any, tuple[Step, ...], list[ChatMessage]]:
    """See `answer_with_tools`; texts are shown as they come."""

    def ask(turns: list[ChatMessage], offered: tuple[OfferedTool, ...]) -> Any:
        result = talker.generate(
            turns,
            sampling,
            on_progress=lambda _done, _total: None,
            on_text=shown.on_text,
            on_reasoning=shown.on_reasoning,
            cancelled=cancelled,
            tools=tuple(each.tool for each in offered),
        )
        shown.end_part(result)
        return result

    return answer_with_tools(ask, messages, tools, cancelled)


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
    add_tool_options(parser)
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
    question = None if converses else _question(args)
    with tools_of(args) or contextlib.nullcontext() as tools:
        if is_remote(args.model):
            return _elsewhere(args, given, question, tools)
        return _here(args, given, question, tools)


def _here(args: argparse.Namespace, given: dict[str, Any], question: str | None, tools: ChatTools | None) -> int:
    if question is None:
        engine, info = load_engine(args)
        try:
            with _recorded_routing(engine, args.record_routing), traced(engine, args.trace):
                sampling = replace(engine.default_sampling(), **given)
                return converse(engine, _heading(info), sampling, args.system, tools)
        finally:
            engine.unload()
    return _answer_once(args, given, question, tools)


def _heading(info: ModelInfo) -> str:
    return f"{info.name} on {info.device}, {info.precision}, {info.threads} threads"


def _elsewhere(args: argparse.Namespace, given: dict[str, Any], question: str | None, tools: ChatTools | None) -> int:
    """Has a server elsewhere answer the question, or converses with it; nothing of the engine is loaded."""
    from engine.remote.client import Client

    parts = parts_with(question or "", pictures_in_files(args.picture or ()))
    for option in ("record_routing", "trace"):
        if getattr(args, option, None) is not None:
            name = f"--{option.replace('_', '-')}"
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} needs a model on this PC: leave it out.")
    endpoint, model = parse_remote(args.model)
    with Client(endpoint) as client:
        model = model or client.only_model()
        talk, sampling = RemoteTalk(client, model, tuple(given)), replace(SamplingParams(), **given)
        heading = f"{model}, sent to {called(endpoint)}"
        if question is None:
            return converse(talk, heading, sampling, args.system, tools)
        note(f"switchyard: {heading}")
        told, uses = _whole_answer(talk, args, sampling, question, parts, tools)
    fields = ("text", "reasoning", "prompt_tokens", "generated_tokens", "ttft_s", "tokens_per_s", "finish_reason")
    document = {
        **{name: getattr(told, name) for name in fields},
        "model": told.model,
        "endpoint": endpoint.name,
        "host": endpoint.host,
        "left_out": list(told.left_out),
        "calls": uses,
    }
    emit(document, as_json=args.json, human="")
    return 0


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
    talker: Engine | RemoteTalk,
    args: argparse.Namespace,
    sampling: SamplingParams,
    question: str,
    parts: str,
    tools: ChatTools | None,
) -> tuple[Any, list[dict[str, Any]]]:
    """The answer, which is shown as it comes unless a document is wanted, and the calls of tools before it."""
    system = [ChatMessage("system", args.system)] if args.system else []
    asked = [*system, ChatMessage("user", question, parts=parts)]
    result, steps, _turns = _answer(talker, sampling, asked, tools, _Shown(quiet=args.json), lambda: False)
    return result, [use_document(use) for step in steps for use in step.calls]


def _answer_once(args: argparse.Namespace, given: dict[str, Any], question: str, tools: ChatTools | None) -> int:
    parts = parts_with(question, pictures_in_files(args.picture or ()))
    engine, info = load_engine(args)
    try:
        with _recorded_routing(engine, args.record_routing), traced(engine, args.trace):
            sampling = replace(engine.default_sampling(), **given)
            result, uses = _whole_answer(engine, args, sampling, question, parts, tools)
    finally:
        engine.unload()
    document = {
        "text": result.text,
        "reasoning": result.reasoning,
        "calls": uses,
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
