"""The tools of the window's chats: which are offered, who may call them, and running them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QTimer, Signal

from app.services.background import TaskQueue, timer
from app.services.chat_store.records import Attachment
from app.services.child_process import child
from app.services.settings import Settings
from app.services.tools.built_in import (
    BUILT_IN,
    RUN_BATCH,
    SEARCH,
    UNASKED,
    Attached,
    ToolError,
    run_built_in,
)
from app.services.tools.host import START_S
from app.services.tools.servers import ToolServer, kept_servers, plain_name
from engine.common.chat import Tool
from engine.common.paths import confined_module

if TYPE_CHECKING:
    from app.services.documents import Documents

translate = QCoreApplication.translate

SERVERS, ALLOWED = "tool_servers", "allowed_tools"
"""Keys of the settings."""
CALL_S, LIST_S = 120.0, 30.0
"""That a call, or a list of tools, may take."""
_GRACE_MS = 10_000
"""Then the process that talks to the servers does not even see that the time is over."""
MOST_OFFERED = 128
IDLE_MS = 600_000
"""After which servers that nobody calls end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: its result, or in one sentence why there is none."""

    text: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool under the name that models see.

    Attributes:
        server: empty for one that is built in; `name` is what the server calls it.
    """

    tool: Tool
    name: str
    server: str = ""

    @property
    def key(self) -> str:
        """By which a permission is kept."""
        return f"{self.server}/{self.name}"


Done = Callable[[Outcome], object]


@dataclass(slots=True)
class _Asked:
    done: Callable[[dict[str, Any]], object]
    clock: QTimer
    line: dict[str, Any] = field(default_factory=dict)


class Tools(QObject):
    """One for the window.  The process with the servers starts when one of them is needed.

    Args:
        start_batch: starts a job that answers a prompt for each row; returns a sentence about it, or raises ToolError.

    Signals:
        changed: servers, their tools or the switches are others.
    """

    changed = Signal()

    def __init__(
        self,
        settings: Settings,
        documents: Callable[[], Documents],
        start_batch: Callable[[str, Sequence[str]], str],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._settings, self._documents, self._start_batch = settings, documents, start_batch
        self._servers = kept_servers(settings.get(SERVERS, list[Any]()))
        self._process: QProcess | None = None
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._own = TaskQueue(self)
        self._idle = timer(self, self.stop_servers, IDLE_MS, once=True)
        self.problems: dict[str, str] = {}
        """By the names of servers, why their tools are not known."""

    # --- servers and switches ---

    @property
    def servers(self) -> tuple[ToolServer, ...]:
        """In the order of their names."""
        return self._servers

    def put(self, server: ToolServer, *, instead_of: str = "") -> None:
        """Adds a server, or changes one."""
        others = [each for each in self._servers if each.name not in (server.name, instead_of)]
        known = next((each for each in self._servers if each.name in (server.name, instead_of)), None)
        if known is not None and server.tools is None and known.is_same_place(server):
            server = replace(server, tools=known.tools)
        for name in {server.name, instead_of} - {""}:
            self.problems.pop(name, None)
            self.stop(name)
        self._keep([*others, server])

    def remove(self, name: str) -> None:
        """Forgets a server, and what was allowed of it."""
        self.stop(name)
        self.problems.pop(name, None)
        allowed = [key for key in self.always_allowed if not key.startswith(f"{name}/")]
        self._settings.set(ALLOWED, allowed)
        self._keep([each for each in self._servers if each.name != name])

    def is_on(self, built_in: str) -> bool:
        """Whether chats with tools offer a built-in one."""
        return self._settings.get(f"tool_{built_in}", True)

    def set_on(self, built_in: str, is_on: bool) -> None:
        """Offers a built-in tool, or not."""
        self._settings.set(f"tool_{built_in}", is_on)
        self.changed.emit()

    @property
    def always_allowed(self) -> tuple[str, ...]:
        """Keys of the tools that may run unasked."""
        return tuple(str(each) for each in self._settings.get(ALLOWED, list[Any]()))

    def allow_always(self, key: str) -> None:
        """Lets a tool run unasked in all chats."""
        self._settings.set(ALLOWED, sorted({*self.always_allowed, key}))
        self.changed.emit()

    def ask_again(self) -> None:
        """Takes back all that was allowed for always."""
        self._settings.set(ALLOWED, [])
        self.changed.emit()

    def may_run(self, offered: OfferedTool, in_chat: Sequence[str]) -> bool:
        """Whether a tool runs without asking."""
        unasked = not offered.server and offered.name in UNASKED
        return unasked or offered.key in self.always_allowed or offered.key in in_chat

    def _keep(self, servers: Sequence[ToolServer]) -> None:
        self._servers = tuple(sorted(servers, key=lambda each: each.name.casefold()))
        self._settings.set(SERVERS, [each.kept() for each in self._servers])
        self.changed.emit()

    # --- offers ---

    def offered(self) -> tuple[OfferedTool, ...]:
        """All that chats may offer, as far as it is known, always in the same order: the prompt begins with them."""
        found = [OfferedTool(each, each.name) for each in BUILT_IN if self.is_on(each.name)]
        taken = {each.name for each in BUILT_IN}
        for server in self._servers:
            for tool in (server.tools or ()) if server.is_on else ():
                name = plain_name(tool.name)
                if name in taken:
                    name = plain_name(f"{server.name}_{tool.name}")
                if name not in taken and len(found) < MOST_OFFERED:
                    taken.add(name)
                    found.append(OfferedTool(replace(tool, name=name), tool.name, server.name))
        return tuple(found)

    def when_known(self, done: Callable[[], object]) -> None:
        """Calls `done` once the tools of all servers that are on are known, or known not to be."""
        unknown = [each for each in self._servers if each.is_on and each.tools is None]
        left = len(unknown)
        if not unknown:
            done()

        def one(_outcome: Outcome) -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for server in unknown:
            self.look(server, one)

    def look(self, server: ToolServer, done: Done = lambda _outcome: None) -> None:
        """Asks a server for its tools; `done` gets a sentence about it."""

        def answered(answer: dict[str, Any]) -> None:
            tools = answer.get("tools")
            if tools is None:
                self.problems[server.name] = str(answer["problem"])
                self.changed.emit()
                done(Outcome(str(answer["problem"]), failed=True))
                return
            self.problems.pop(server.name, None)
            listed = tuple(Tool(each["name"], each["description"], each["parameters"]) for each in tools)
            known = next((each for each in self._servers if each.name == server.name), None)
            if known is not None and known.is_same_place(server):
                others = [each for each in self._servers if each.name != server.name]
                self._keep([*others, replace(known, tools=listed)])
            done(Outcome(translate("Tools", "It answers: {0} tools.", "", len(listed)).format(len(listed))))

        self._ask({"server": server.entry, "seconds": LIST_S}, LIST_S, answered)

    # --- calls ---

    def run(
        self, offered: OfferedTool, arguments: str, attachments: Sequence[Attachment], done: Done
    ) -> Callable[[], None]:
        """Runs a call; `done` is told its outcome once, later.  Returns what stops it."""
        over = False

        def once(outcome: Outcome) -> None:
            nonlocal over
            if not over:
                over = True
                done(outcome)

        try:
            given = json.loads(arguments)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            words = translate("Tools", "The arguments are no JSON object.")
            QTimer.singleShot(0, self, lambda: once(Outcome(words, failed=True)))
            return lambda: None
        if not offered.server:
            self._run_own(offered.name, given, attachments, once)
            return lambda: once(Outcome(translate("Tools", "The call was stopped."), failed=True))
        server = next((each for each in self._servers if each.name == offered.server and each.is_on), None)
        if server is None:
            words = translate("Tools", "{0} was removed or is off.").format(offered.server)
            QTimer.singleShot(0, self, lambda: once(Outcome(words, failed=True)))
            return lambda: None

        def answered(answer: dict[str, Any]) -> None:
            if "problem" in answer:
                once(Outcome(str(answer["problem"]), failed=True))
            else:
                once(Outcome(str(answer.get("text", "")), bool(answer.get("failed"))))

        line = {"server": server.entry, "seconds": CALL_S, "tool": offered.name, "arguments": given}
        number = self._ask(line, CALL_S, answered)
        return lambda: self._cancel(number)

    def _run_own(self, name: str, given: dict[str, Any], attachments: Sequence[Attachment], once: Done) -> None:
        def failed(error: Exception) -> None:
            once(Outcome(str(error) or type(error).__name__, failed=True))

        if name == SEARCH.name and attachments:
            self._documents().find(
                attachments,
                str(given.get("question", "")),
                lambda found: once(Outcome(found or "Nothing was found.")),
                failed,
            )
        elif name == RUN_BATCH.name:
            try:
                rows = given.get("rows")
                texts = [str(each) for each in rows] if isinstance(rows, list) else []
                once(Outcome(self._start_batch(str(given.get("prompt", "")), texts)))
            except ToolError as error:
                failed(error)
        else:
            folders = tuple(each.path for each in attachments if each.kind == "folder" and each.path)
            self._own.add(
                lambda: run_built_in(name, given, Attached(folders)), lambda text: once(Outcome(text)), failed
            )

    # --- the process ---

    def stop_servers(self) -> None:
        """Ends all servers; the next call starts what it needs."""
        self._end_process(translate("Tools", "The call was stopped."))

    def close(self) -> None:
        """Ends everything."""
        self._idle.stop()
        self.stop_servers()
        self._own.close()

    @property
    def is_running(self) -> bool:
        """Whether there is a process now."""
        return self._process is not None

    def stop(self, name: str) -> None:
        """Ends a server, if it runs."""
        if self._process is not None:
            self._write({"stop": name})

    def _cancel(self, number: int) -> None:
        if number in self._asked:
            self._write({"id": number, "cancel": True})

    def _ask(self, line: dict[str, Any], seconds: float, done: Callable[[dict[str, Any]], object]) -> int:
        number = next(self._numbers)
        clock = timer(self, self._on_late, int(1000 * (seconds + START_S)) + _GRACE_MS, once=True)
        self._asked[number] = _Asked(done, clock)
        clock.start()
        self._idle.stop()
        if self._process is None:
            command, variables = confined_module("app.services.tools.host")
            lost, failed = (
                translate("Tools", "The process with the tools ended."),
                translate("Tools", "The process with the tools could not be started."),
            )
            self._process = child(
                self,
                command,
                variables,
                ended=lambda *_: self._end_process(lost),
                not_started=lambda: self._end_process(failed),
                reads=self._on_answers,
                confined=True,
            )
            self._process.start()
        self._write({"id": number, "start": START_S, **line})
        return number

    def _write(self, line: dict[str, Any]) -> None:
        if self._process is not None:
            self._process.write(json.dumps(line).encode("ascii") + b"\n")

    def _on_answers(self) -> None:
        while self._process is not None and self._process.canReadLine():
            answer = json.loads(bytes(self._process.readLine().data()))
            asked = self._asked.pop(answer.get("id"), None)
            if asked is not None:
                asked.clock.deleteLater()
                asked.done(answer)
        if not self._asked:
            self._idle.start()

    def _on_late(self) -> None:
        self._end_process(translate("Tools", "The tools did not respond, and were stopped."))

    def _end_process(self, why: str) -> None:
        process, self._process = self._process, None
        asked, self._asked = list(self._asked.values()), {}
        if process is not None:
            process.blockSignals(True)
            _end_with_children(process)
            process.deleteLater()
        for each in asked:
            each.clock.stop()
            each.clock.deleteLater()
            each.done({"problem": why})


def _end_with_children(process: QProcess) -> None:
    """Ends the process and the servers that it started, whatever they do."""
    import psutil

    try:
        children = psutil.Process(process.processId()).children(recursive=True)
    except (psutil.Error, ValueError):
        children = []
    process.closeWriteChannel()
    process.kill()
    for each in children:
        try:
            each.kill()
        except psutil.Error:
            continue
    process.waitForFinished(2000)
