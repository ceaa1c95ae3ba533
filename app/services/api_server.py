"""The switch by which other programs use the model: the server's process, its key, and what it was asked."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from PySide6.QtCore import QObject, QProcess, QTimer, Signal
from PySide6.QtNetwork import QAbstractSocket, QNetworkInterface

from app.services.background import LatestTask
from app.services.child_process import child, delete_child
from app.services.engine_client import EngineClient, EngineState
from app.services.model_start import ModelStart
from app.services.settings import Settings
from engine.common.channel import forget_link, remove_abandoned
from engine.common.errors import EngineError
from engine.common.paths import python_module
from engine.common.settings import ask_keyring, tell_keyring
from engine.protocol import (
    Beside,
    Failed,
    FreeOthers,
    LineReader,
    Listen,
    Listening,
    Message,
    Rules,
    Served,
    Wants,
    decode,
    encode,
)

MOST_SERVED = 200
"""How many requests the window remembers."""
READ_BYTES = 16 * 1024
STOP_MS = 4000
ROOM_MS = 10_000
"""A model is loaded without the room that the one beside it takes, if that is not free after so long."""
CLOSE_MS = 1500
"""The window closes: streams that are under way are not waited for."""
_KEY_NAME = "key for other programs"
_KEY_BYTES = 24
LOCAL, ANYWHERE = "127.0.0.1", "0.0.0.0"


class ServerState(Enum):
    OFF = "off"
    STARTING = "starting"
    ON = "on"
    FAILED = "failed"


class ApiServer(QObject):
    """The server's process while the switch is on.  It ends with the window, and outlives the engine.

    Signals:
        changed: the state, the address, the key, or the model beside the window's.
        served(Served): a request is over.
    """

    changed = Signal()
    served = Signal(object)

    def __init__(
        self,
        client: EngineClient,
        settings: Settings,
        start: ModelStart | None = None,
        parent: QObject | None = None,
        *,
        command: Sequence[str] | None = None,
    ) -> None:
        """`start` puts the window's model aside and loads it again; `command` starts a server other than the
        installed one."""
        super().__init__(parent)
        own, self._variables = python_module("engine.serving.front")
        self._command = list(command or own)
        self._client, self._settings, self._model_start = client, settings, start
        self._process: QProcess | None = None
        self._lines = LineReader()
        self._asked_for: Listen | None = None
        self.state, self.problem = ServerState.OFF, ""
        self._is_ending = False
        self._key = ""
        self._key_stays = False
        self._port, self._link = 0, ""
        self._address = ""
        """Of this PC in its network; looked up once for each start of the server."""
        self._keys = LatestTask(self)
        self.requests: deque[Served] = deque(maxlen=MOST_SERVED)
        self._beside, self._rules = Beside(""), Rules("", is_loading=False, config=settings.engine(""))
        self._wait_for_room: Callable[[], None] | None = None
        for news in (client.state_changed, client.model_loaded):
            news.connect(lambda _news: self._tell_rules())
        settings.changed.connect(self._on_setting)
        if start is not None:
            start.aside_changed.connect(self._tell_rules)
            start.make_room = self.make_room
            self.served.connect(lambda _request: start.is_used())

    # --- what there is ----------------------------------------------------------------------------

    @property
    def beside(self) -> Beside:
        return self._beside

    @property
    def key(self) -> str:
        return self._key if self._settings.serves != "pc" else ""

    @property
    def key_stays(self) -> bool:
        return self._key_stays

    @property
    def url(self) -> str:
        host = LOCAL
        if self._settings.serves == "network":
            host = self._address = self._address or _network_address()
        return f"http://{host}:{self._port or self._settings.server_port}"

    # --- what people do ---------------------------------------------------------------------------

    def begin(self) -> None:
        if self._settings.serves_others:
            self._apply()

    def make_key(self) -> None:
        self._keys.ask(_new_key, self._on_key)

    def look_for_key(self) -> None:
        if self._settings.serves != "pc" and not self._key and not self._keys.is_busy:
            self._keys.ask(_kept_key, self._on_key)

    def free_others(self) -> None:
        self._tell(FreeOthers())

    def make_room(self, then: Callable[[], None]) -> None:
        """Does this once the model beside the window's has been freed, or is still answering after a while."""
        if not self._beside.model or self._process is None:
            then()
            return
        self._wait_for_room = then
        QTimer.singleShot(ROOM_MS, self, self._go_on)
        self.free_others()

    def _go_on(self) -> None:
        then, self._wait_for_room = self._wait_for_room, None
        if then is not None:
            then()

    def close(self) -> None:
        self._keys.close()
        process, self._process, self._asked_for = self._process, None, None
        if process is not None:
            process.closeWriteChannel()
            if not process.waitForFinished(CLOSE_MS):
                process.kill()
                process.waitForFinished(STOP_MS)
                self._clear_after_killed()

    def _on_setting(self, key: str) -> None:
        if key in ("serve_others", "serve_to", "serve_port"):
            self._apply()
        self._tell_rules()

    # --- the process ------------------------------------------------------------------------------

    def _on_key(self, found: tuple[str, bool]) -> None:
        self._key, self._key_stays = found
        self._apply()

    def _apply(self) -> None:
        settings = self._settings
        wanted: Listen | None = None
        if settings.serves_others:
            self.look_for_key()
            if settings.serves == "pc" or self._key:
                host = ANYWHERE if settings.serves == "network" else LOCAL
                wanted = Listen(host, settings.server_port, self.key)
        if wanted != self._asked_for or (self.state is ServerState.FAILED and self._process is None):
            self._asked_for = wanted
            self._client.serve_others("", "")
            if self._process is not None:
                self._end(self._process)
            elif wanted is not None:
                self._start(wanted)
        if not settings.serves_others:
            self._become(ServerState.OFF)
        elif self.state is ServerState.OFF or wanted is None:
            self._become(ServerState.STARTING)
        else:
            self.changed.emit()

    def _start(self, wanted: Listen) -> None:
        self._lines, self._address = LineReader(), ""
        process = child(
            self,
            self._command,
            self._variables,
            ended=lambda *_: self._on_finished(process),
            not_started=lambda: self._on_not_started(process),
            reads=lambda: self._read(process),
        )
        self._process, self._is_ending = process, False
        self._become(ServerState.STARTING)
        process.start()
        self._rules = self._rules_now()
        process.write(encode(wanted) + encode(self._rules))

    def _rules_now(self) -> Rules:
        client, settings, start = self._client, self._settings, self._model_start
        config = client.config
        minutes = settings.others_idle_minutes
        return Rules(
            window=config.model if config is not None else start.aside if start is not None else "",
            is_loading=config is not None and client.state in (EngineState.STARTING, EngineState.LOADING),
            config=settings.engine(""),
            idle_s=60.0 * minutes if minutes else None,
            wakes=start is not None and start.is_aside,
            gives_way=start is not None and settings.gives_way,
        )

    def _tell_rules(self) -> None:
        rules = self._rules_now()
        if self._process is not None and rules != self._rules:
            self._rules = rules
            self._tell(rules)

    def _tell(self, message: Message) -> None:
        if self._process is not None and not self._is_ending:
            self._process.write(encode(message))

    def _end(self, process: QProcess) -> None:
        self._is_ending = True
        self._become(ServerState.STARTING)
        process.closeWriteChannel()
        QTimer.singleShot(STOP_MS, process, process.kill)

    def _read(self, process: QProcess) -> None:
        if process is not self._process or self._is_ending:
            return
        try:
            lines = self._lines.feed(bytes(process.read(READ_BYTES).data()))
            messages = [decode(line) for line in lines]
        except EngineError as error:
            self._fail(error.message)
            process.kill()
            return
        for message in messages:
            self._on_message(message)
        if process.bytesAvailable():
            QTimer.singleShot(0, process, lambda: self._read(process))

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Served):
            self.requests.appendleft(message)
            self.served.emit(message)
        elif isinstance(message, Beside):
            self._set_beside(message)
        elif isinstance(message, Wants):
            if self._model_start is not None:
                self._model_start.need() if message.what == "model" else self._model_start.give_way()
        elif isinstance(message, Listening):
            self._port, self._link = message.port, message.link
            self._client.serve_others(message.link, message.secret)
            self._become(ServerState.ON)
        elif isinstance(message, Failed):
            self._fail(
                self.tr("Port {0} is in use by another program, or not allowed. Choose another one.").format(
                    self._settings.server_port
                )
            )

    def _on_finished(self, process: QProcess) -> None:
        delete_child(process)
        if process is not self._process:
            return
        self._read(process)
        self._process, self._port = None, 0
        self._set_beside(Beside(""))
        self._clear_after_killed()
        self._client.serve_others("", "")
        if self._asked_for is None:
            return
        if self._is_ending:
            self._start(self._asked_for)  # the one before it had other settings
        elif self.state is not ServerState.FAILED:
            self._fail(self.tr("The server stopped unexpectedly. Turn it off and on again."))

    def _clear_after_killed(self) -> None:
        """Does what a server that was killed could not, whether or not it had said where its links are."""
        forget_link(self._link)
        remove_abandoned()

    def _on_not_started(self, process: QProcess) -> None:
        if process is self._process:
            self._process = None
            self._fail(self.tr("The server could not be started. Reinstall Switchyard."))
            delete_child(process)

    def _set_beside(self, beside: Beside) -> None:
        if beside != self._beside:
            self._beside = beside
            if not beside.model:
                self._go_on()
            self.changed.emit()

    def _fail(self, problem: str) -> None:
        self._become(ServerState.FAILED, problem)

    def _become(self, state: ServerState, problem: str = "") -> None:
        self.state, self.problem = state, problem
        self.changed.emit()


def _kept_key() -> tuple[str, bool]:
    key = ask_keyring(_KEY_NAME)
    return (key, True) if key else _new_key()


def _new_key() -> tuple[str, bool]:
    """A key, and whether the system's keyring keeps it."""
    key = secrets.token_urlsafe(_KEY_BYTES)
    tell_keyring(_KEY_NAME, key)
    return key, ask_keyring(_KEY_NAME) == key


def _network_address() -> str:
    for address in QNetworkInterface.allAddresses():
        is_v4 = address.protocol() == QAbstractSocket.NetworkLayerProtocol.IPv4Protocol
        if is_v4 and not address.isLoopback() and not address.isLinkLocal():
            return address.toString()
    return LOCAL
