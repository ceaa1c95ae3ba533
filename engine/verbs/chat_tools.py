"""Tools of `switchyard chat`: which are offered, asking on the terminal, and the loop of calls in an answer."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.common.channel import Channel, Pipes
from engine.common.chat import ChatMessage
from engine.common.errors import EngineError, ErrorCode
from engine.common.settings import read_settings, settings_path
from engine.tools.built_in import CALCULATOR, CLOCK, READ_FILE, ToolError, run_built_in
from engine.tools.host import CALL_S, LIST_S, START_S
from engine.tools.rounds import (
    DENIED,
    STOPPED,
    OfferedTool,
    Round,
    Step,
    ToolUse,
    begin_round,
    find_tool,
    offered_tools,
    turns_after,
)
from engine.tools.servers import (
    ALLOWED,
    SERVERS,
    ServerError,
    ToolServer,
    kept_servers,
    servers_of,
    switch_of,
    with_values,
)
from engine.verbs.output import note

_GRACE_S = 10.0
_LONGEST_LINE = 400
Cancelled = Callable[[], bool]


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tools",
        action="store_true",
        help="let the model call tools: calculator, clock, read_file (--folder), and MCP servers of the settings",
    )
    parser.add_argument(
        "--tool-server",
        action="append",
        default=[],
        metavar="NAME",
        help="tools of this MCP server of the settings, or of those in a .json file with mcpServers; may be repeated",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder whose files the tool read_file may read; may be repeated",
    )
    parser.add_argument("--allow-tools", action="store_true", help="run tools without asking")


def tools_of(args: argparse.Namespace) -> ChatTools | None:
    """What the options ask for; None without tools."""
    if not (args.tools or args.tool_server):
        for option, is_given in (("--folder", args.folder), ("--allow-tools", args.allow_tools)):
            if is_given:
                raise EngineError(ErrorCode.INVALID_REQUEST, f"{option} needs --tools: add it.")
        return None
    if args.folder and not args.tools:
        raise EngineError(ErrorCode.INVALID_REQUEST, "--folder needs --tools: add it.")
    if bad := next((folder for folder in args.folder if not folder.is_dir()), None):
        raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no folder {bad}: check the path.")
    try:
        settings = read_settings(settings_path()).values
    except (OSError, ValueError):
        settings = {}
    raw, allowed = settings.get(SERVERS), settings.get(ALLOWED)
    kept = kept_servers(raw if isinstance(raw, list) else [])
    chosen = [each for each in kept if each.is_on] if args.tools else []
    for name in args.tool_server:
        for server in _named(name, kept):
            chosen = [*(each for each in chosen if each.name != server.name), replace(server, is_on=True)]
    names = {CALCULATOR.name, CLOCK.name, *([READ_FILE.name] if args.folder else [])} if args.tools else set()
    return ChatTools(
        sorted(chosen, key=lambda each: each.name.casefold()),
        {name for name in names if settings.get(switch_of(name), True) is not False},
        tuple(str(folder) for folder in args.folder),
        allowed={str(each) for each in allowed} if isinstance(allowed, list) else set(),
        runs_all=args.allow_tools,
    )


def _named(name: str, kept: Sequence[ToolServer]) -> Sequence[ToolServer]:
    if name.endswith(".json"):
        try:
            return servers_of(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} cannot be read ({why}): check the path.") from None
        except ServerError as error:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"{name} names no servers. {error}") from None
    if found := [each for each in kept if each.name.casefold() == name.casefold()]:
        return found
    known = ", ".join(each.name for each in kept)
    there = f"there are {known}" if known else "add it in the window's settings, or name a .json file"
    raise EngineError(ErrorCode.INVALID_REQUEST, f"There is no MCP server named {name[:60]!r}: {there}.")


class ChatTools:
    """The tools of one run, and the process that talks to MCP servers, which starts when one is needed.

    Args:
        built_in: names of those that are offered.
        folders: which `read_file` may read.
        allowed: keys of tools that run unasked; more come as people allow them.
        runs_all: nothing is asked.
    """

    def __init__(
        self,
        servers: Sequence[ToolServer],
        built_in: set[str],
        folders: tuple[str, ...],
        *,
        allowed: set[str],
        runs_all: bool,
    ) -> None:
        self._servers, self._built_in, self._folders = list(servers), built_in, folders
        self._allowed, self._runs_all = allowed, runs_all
        self._host = _HostProcess()
        self._offered: tuple[OfferedTool, ...] | None = None

    def __enter__(self) -> ChatTools:
        return self

    def __exit__(self, *_error: object) -> None:
        self._host.close()

    @property
    def offered(self) -> tuple[OfferedTool, ...]:
        """Asked of servers whose tools are not known yet; one that fails is told of, and has none."""
        if self._offered is None:
            self._servers = [each if each.tools is not None else self._listed(each) for each in self._servers]
            self._offered = offered_tools(self._servers, self._built_in.__contains__)
        return self._offered

    def _listed(self, server: ToolServer) -> ToolServer:
        from engine.common.chat import Tool

        answer = self._host.ask(server, {"seconds": LIST_S}, LIST_S, lambda: False)
        if "problem" in answer:
            note(f"switchyard: {answer['problem']}")
        return replace(server, tools=tuple(Tool(**each) for each in answer.get("tools", ())))

    def run_round(self, begun: Round, cancelled: Cancelled) -> Step:
        step = begun.step
        for use in begun.step.calls:
            ended = use
            if use.state == "asked":
                ended = self._run(use, cancelled)
                step = step.with_use(use.id, lambda _before, ended=ended: ended)  # type: ignore[misc]
            note(_line(ended))
        return step

    def _run(self, use: ToolUse, cancelled: Cancelled) -> ToolUse:
        offered = find_tool(self.offered, use.name)
        assert offered is not None
        if cancelled():
            return replace(use, state="failed", result=STOPPED)
        if not (self._runs_all or offered.may_run(self._allowed)) and not self._is_allowed(offered, use):
            return replace(use, state="denied", result=DENIED)
        begun = time.monotonic()
        text, failed = self._outcome(offered, use, cancelled)
        took = time.monotonic() - begun
        return replace(use, state="failed" if failed else "done", result=text, seconds=took)

    def _outcome(self, offered: OfferedTool, use: ToolUse, cancelled: Cancelled) -> tuple[str, bool]:
        try:
            given = json.loads(use.arguments)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return "The arguments are no JSON object.", True
        if not offered.server:
            try:
                return run_built_in(offered.name, given, self._folders), False
            except ToolError as error:
                return str(error), True
        server = next(each for each in self._servers if each.name == offered.server)
        asked = {"seconds": CALL_S, "tool": offered.name, "arguments": given}
        answer = self._host.ask(server, asked, CALL_S, cancelled)
        if "problem" in answer:
            return str(answer["problem"]), True
        return str(answer.get("text", "")), bool(answer.get("failed"))

    def _is_allowed(self, offered: OfferedTool, use: ToolUse) -> bool:
        if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
            note(f"switchyard: {use.name} needs your leave, and nobody can be asked here: add --allow-tools to run it")
            return False
        of_server = f" of the server {offered.server}" if offered.server else ""
        note(f"The model wants to call {use.name}{of_server} with {use.arguments}")
        while True:
            sys.stderr.write("Allow it? [y]es, [a]lways in this chat, [n]o: ")
            sys.stderr.flush()
            try:
                said = sys.stdin.readline()
            except KeyboardInterrupt:
                said = ""
            answer = said.strip().lower()
            if not said or answer in ("n", "no"):
                return False
            if answer in ("a", "always"):
                self._allowed.add(offered.key)
            if answer in ("y", "yes", "a", "always"):
                return True


def _line(use: ToolUse) -> str:
    came = " ".join(use.result.split())
    came = came if len(came) <= _LONGEST_LINE else f"{came[:_LONGEST_LINE]}…"
    return f"[{use.name} {use.arguments[:_LONGEST_LINE]}: {came or '(nothing)'}]"


def use_document(use: ToolUse) -> dict[str, Any]:
    """A call for `--json`; arguments that are none are the text that came."""
    arguments: Any = use.arguments
    with contextlib.suppress(ValueError):
        arguments = json.loads(use.arguments)
    return {
        "name": use.name,
        "server": use.server,
        "arguments": arguments,
        "state": use.state,
        "result": use.result,
        "seconds": use.seconds,
    }


class _HostProcess:
    """`engine.tools.host`, asked one thing at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._number = 0

    def ask(self, server: ToolServer, line: dict[str, Any], seconds: float, cancelled: Cancelled) -> dict[str, Any]:
        """The answer, or a `problem`."""
        try:
            whole = with_values(server)
        except ServerError as error:
            return {"problem": str(error)}
        channel = self._channel or self._started()
        self._number += 1
        channel.send(_sent({"id": self._number, "start": START_S, "server": whole.entry, **line}))
        until, is_cancelled = time.monotonic() + seconds + START_S + _GRACE_S, False
        while time.monotonic() < until:
            if cancelled() and not is_cancelled:
                is_cancelled = True
                channel.send(_sent({"id": self._number, "cancel": True}))
            try:
                answer = self._answers.get(timeout=0.1)
            except queue.Empty:
                continue
            if answer is None:
                self.close()
                return {"problem": "The process with the tools ended."}
            if answer.get("id") == self._number:
                return answer
        self.close()
        return {"problem": "The tools did not respond, and were stopped."}

    def _started(self) -> Channel:
        from engine.common.confined import started

        self._process = process = started("engine.tools.host")
        self._answers = answers = queue.Queue[dict[str, Any] | None]()
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = Pipes(process.stdout, process.stdin)
        self._channel = Channel(pipes, lambda line: answers.put(json.loads(line)), lambda: answers.put(None))
        self._channel.start()
        return self._channel

    def close(self) -> None:
        """Ends the process, and the servers that it started, whatever they do."""
        import psutil

        process, self._process, channel, self._channel = self._process, None, self._channel, None
        if process is None or channel is None:
            return
        try:
            children = psutil.Process(process.pid).children(recursive=True)
        except psutil.Error:
            children = []
        process.kill()
        process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        channel.close()


def _sent(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode("ascii") + b"\n"


def answer_with_tools(
    ask: Callable[[list[ChatMessage], tuple[OfferedTool, ...]], Any],
    messages: Sequence[ChatMessage],
    tools: ChatTools | None,
    cancelled: Cancelled,
) -> tuple[Any, tuple[Step, ...], list[ChatMessage]]:
    """The answer behind all calls, the steps with them, and the conversation up to that answer.

    Args:
        ask: has the last message answered, which may call these tools.
    """
    offered = tools.offered if tools is not None else ()
    steps: tuple[Step, ...] = ()
    turns = list(messages)
    while True:
        result = ask(turns, offered)
        if tools is None or not result.calls or result.finish_reason == "cancelled":
            return result, steps, turns
        begun = begin_round(steps, result.text, result.reasoning, result.calls, offered)
        steps = (*steps, tools.run_round(begun, cancelled))
        turns += turns_after(steps, is_last=begun.is_last)
        offered = () if begun.is_last else offered
        if cancelled():
            return replace(result, text="", reasoning="", calls=(), finish_reason="cancelled"), steps, turns
