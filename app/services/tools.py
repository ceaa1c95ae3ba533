"""The tools of the window's chats: which are offered, who may call them, and running them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QCoreApplication, QObject, QProcess, QTimer, Signal

from app.services.background import TaskQueue, timer
from app.services.chat_store.records import Attachment
from app.services.child_process import child, delete_child
from app.services.settings import Settings
from engine.common.chat import Tool
from engine.common.config import BatchJob
from engine.common.paths import confined_module
from engine.tools.built_in import RUN_BATCH, SEARCH, begin_batch, run_built_in
from engine.tools.host import CALL_S, LIST_S, START_S
from engine.tools.rounds import STOPPED, OfferedTool, Outcome, offered_tools
from engine.tools.servers import (
    ALLOWED,
    SERVERS,
    ToolServer,
    forget_values,
    kept_servers,
    put_aside,
    store_values,
    switch_of,
    with_values,
)

if TYPE_CHECKING:
    from app.services.documents import Documents

translate = QCoreApplication.translate

_GRACE_MS = 10_000
"""Then the process that talks to the servers does not even see that the time is over."""
IDLE_MS = 600_000
"""After which servers that nobody calls end."""


Done = Callable[[Outcome], object]


@dataclass(slots=True)
class _Asked:
    done: Callable[[dict[str, Any]], object]
    clock: QTimer
    is_sent: bool = False


class Tools(QObject):
    """One for the window.  The process with the servers starts when one of them is needed.

    Args:
        add_job: queues a batch job of so many rows.

    Signals:
        changed: servers, their tools or the switches are others.
    """

    changed = Signal()

    def __init__(
        self,
        settings: Settings,
        documents: Callable[[], Documents],
        add_job: Callable[[BatchJob, int], object],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._settings, self._documents, self._add_job = settings, documents, add_job
        found = kept_servers(settings.get(SERVERS, list[Any]()))
        self._servers = tuple(map(put_aside, found))
        self._process: QProcess | None = None
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._own, self._keys = TaskQueue(self), TaskQueue(self)
        self._idle = timer(self, self.stop_servers, IDLE_MS, once=True)
        self._looked_at: dict[str, ToolServer] = {}
        """With the tools that they listed."""
        self.problems: dict[str, str] = {}
        self.for_this_run: set[str] = set()
        """Servers whose variables or headers are not kept: this system has no keyring."""
        for before, now in zip(found, self._servers, strict=True):
            if before != now:  # of a version that wrote their values into the settings
                self._store(now, lambda: self._keep(self._servers))

    # --- servers and switches ---

    @property
    def servers(self) -> tuple[ToolServer, ...]:
        return self._servers

    def put(self, server: ToolServer, *, instead_of: str = "") -> None:
        others = [each for each in self._servers if each.name not in (server.name, instead_of)]
        known = next((each for each in self._servers if each.name in (server.name, instead_of)), None)
        bare = put_aside(server)
        brings_values, server = bare != server, bare
        for each in (known, self._looked_at.get(server.name)):
            if each is not None and server.tools is None and each.is_same_place(server):
                server = replace(server, tools=each.tools)
        if known is not None and known.vault and (known.vault != server.vault or not server.pairs):
            self._keys.add(lambda: forget_values(known))
        if brings_values or (known is not None and server.pairs and not known.is_same_place(server)):
            self._store(server, self.changed.emit)
        if known is not None and known.place != server.place:
            self._disallow(known.name)  # which was allowed of another program
        for name in {server.name, instead_of} - {""}:
            self.problems.pop(name, None)
            self.stop(name)
        self._keep([*others, server])

    def remove(self, name: str) -> None:
        self.stop(name)
        self.problems.pop(name, None)
        for each in self._servers:
            if each.name == name and each.vault:
                self._keys.add(partial(forget_values, each))
        self._disallow(name)
        self._keep([each for each in self._servers if each.name != name])

    def _disallow(self, name: str) -> None:
        self._settings.set(ALLOWED, [key for key in self.always_allowed if not key.startswith(f"{name}/")])

    def is_on(self, built_in: str) -> bool:
        return self._settings.get(switch_of(built_in), True)

    def set_on(self, built_in: str, is_on: bool) -> None:
        self._settings.set(switch_of(built_in), is_on)
        self.changed.emit()

    @property
    def always_allowed(self) -> tuple[str, ...]:
        """Without those of older versions, which do not say of which description they are."""
        kept = (str(each) for each in self._settings.get(ALLOWED, list[Any]()))
        return tuple(key for key in kept if key.startswith("/") or "\n" in key)

    def allow_always(self, key: str) -> None:
        """Lets a tool run unasked in all chats."""
        others = {each for each in self.always_allowed if each.partition("\n")[0] != key.partition("\n")[0]}
        self._settings.set(ALLOWED, sorted({*others, key}))
        self.changed.emit()

    def ask_again(self) -> None:
        self._settings.set(ALLOWED, [])
        self.changed.emit()

    def _store(self, server: ToolServer, done: Callable[[], object]) -> None:
        def stored(is_kept: bool) -> None:
            (self.for_this_run.discard if is_kept else self.for_this_run.add)(server.name)
            done()

        if server.vault:
            self._keys.add(lambda: store_values(server), stored)

    def _keep(self, servers: Sequence[ToolServer]) -> None:
        self._servers = tuple(sorted(servers, key=lambda each: each.name.casefold()))
        self._settings.set(SERVERS, [each.kept() for each in self._servers])
        self.changed.emit()

    # --- offers ---

    def offered(self) -> tuple[OfferedTool, ...]:
        return offered_tools(self._servers, self.is_on)

    def when_known(self, done: Callable[[], object]) -> None:
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
        def answered(answer: dict[str, Any]) -> None:
            tools = answer.get("tools")
            if tools is None:
                self.problems[server.name] = str(answer["problem"])
                self.changed.emit()
                done(Outcome(str(answer["problem"]), failed=True))
                return
            self.problems.pop(server.name, None)
            listed = tuple(Tool(each["name"], each["description"], each["parameters"]) for each in tools)
            self._looked_at[server.name] = replace(server, tools=listed)
            known = next((each for each in self._servers if each.name == server.name), None)
            if known is not None and known.is_same_place(server):
                others = [each for each in self._servers if each.name != server.name]
                self._keep([*others, replace(known, tools=listed)])
            done(Outcome(translate("Tools", "It answers: {0} tools.", "", len(listed)).format(len(listed))))

        self._ask(server, {"seconds": LIST_S}, LIST_S, answered)

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
            QTimer.singleShot(0, self, lambda: once(Outcome("The arguments are no JSON object.", failed=True)))
            return lambda: None
        if not offered.server:
            self._run_own(offered.name, given, attachments, once)
            return lambda: once(Outcome(STOPPED, failed=True))
        server = next((each for each in self._servers if each.name == offered.server and each.is_on), None)
        if server is None:
            words = f"{offered.server} was removed or is off."
            QTimer.singleShot(0, self, lambda: once(Outcome(words, failed=True)))
            return lambda: None

        def answered(answer: dict[str, Any]) -> None:
            if "problem" in answer:
                once(Outcome(str(answer["problem"]), failed=True))
            else:
                once(Outcome(str(answer.get("text", "")), bool(answer.get("failed"))))

        number = self._ask(server, {"seconds": CALL_S, "tool": offered.name, "arguments": given}, CALL_S, answered)
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

            def begun(found: tuple[BatchJob, int, str]) -> None:
                self._add_job(*found[:2])
                once(Outcome(found[2]))

            self._own.add(lambda: begin_batch(given), begun, failed)
        else:
            folders = tuple(each.path for each in attachments if each.kind == "folder" and each.path)
            self._own.add(lambda: run_built_in(name, given, folders), lambda text: once(Outcome(text)), failed)

    # --- the process ---

    def stop_servers(self) -> None:
        """Ends all servers; the next call starts what it needs."""
        self._end_process(STOPPED)

    def close(self) -> None:
        self._idle.stop()
        self.stop_servers()
        self._own.close()
        self._keys.close()

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def stop(self, name: str) -> None:
        if self._process is not None:
            self._write({"stop": name})

    def _cancel(self, number: int) -> None:
        if (asked := self._asked.get(number)) is not None and not asked.is_sent:
            self._tell(number, {"problem": STOPPED})
        elif asked is not None:
            self._write({"id": number, "cancel": True})

    def _ask(
        self, server: ToolServer, line: dict[str, Any], seconds: float, done: Callable[[dict[str, Any]], object]
    ) -> int:
        number = next(self._numbers)
        clock = timer(self, self._on_late, int(1000 * (seconds + START_S)) + _GRACE_MS, once=True)
        self._asked[number] = _Asked(done, clock)
        clock.start()
        self._idle.stop()

        def send(whole: ToolServer) -> None:
            if (asked := self._asked.get(number)) is not None:
                asked.is_sent = True
                if self._process is None:
                    self._process = self._started()
                self._write({"id": number, "start": START_S, "server": whole.entry, **line})

        if server.lacks_values:
            self._keys.add(lambda: with_values(server), send, lambda error: self._tell(number, {"problem": str(error)}))
        else:
            send(server)
        return number

    def _tell(self, number: int, answer: dict[str, Any]) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked.clock.stop()
            asked.clock.deleteLater()
            asked.done(answer)
        if not self._asked:
            self._idle.start()

    def _write(self, line: dict[str, Any]) -> None:
        if self._process is not None:
            self._process.write(json.dumps(line).encode("ascii") + b"\n")

    def _started(self) -> QProcess:
        command, variables = confined_module("engine.tools.host")
        process = child(
            self,
            command,
            variables,
            ended=lambda *_: self._end_process("The process with the tools ended."),
            not_started=lambda: self._end_process("The process with the tools could not be started."),
            reads=self._on_answers,
            confined=True,
        )
        process.start()
        return process

    def _on_answers(self) -> None:
        while self._process is not None and self._process.canReadLine():
            answer = json.loads(bytes(self._process.readLine().data()))
            self._tell(answer["id"], answer)

    def _on_late(self) -> None:
        self._end_process("The tools did not respond, and were stopped.")

    def _end_process(self, why: str) -> None:
        process, self._process = self._process, None
        asked, self._asked = list(self._asked.values()), {}
        if process is not None:
            process.blockSignals(True)
            _end_with_children(process)
            delete_child(process)
        for each in asked:
            each.clock.stop()
            each.clock.deleteLater()
            each.done({"problem": why})


def _end_with_children(process: QProcess) -> None:
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
