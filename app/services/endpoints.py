"""Servers elsewhere that people added: listed, tested and kept, off the GUI thread where that can take a while."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QObject, Signal

from app.services.background import LatestTask, TaskQueue
from app.services.settings import Settings
from engine.common.errors import EngineError
from engine.remote.endpoint import (
    Endpoint,
    RemoteModel,
    forget_key,
    is_remote,
    key_of_this_run,
    plain_name,
    remove_endpoint,
    save_endpoint,
    save_key,
    saved_endpoints,
    without_sight,
)

if TYPE_CHECKING:
    from engine.remote.capabilities import About
    from engine.remote.nearby import Nearby

AGREED = "endpoints_agreed"
"""Of the settings: names and addresses to which people agreed to send text."""

Failed = Callable[[Exception], object]


class Endpoints(QObject):
    """One of them for the window.

    Signals: `changed`, when `entries` is another.
    """

    changed = Signal()

    def __init__(self, settings: Settings, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._testing, self._looking, self._doing = LatestTask(self), LatestTask(self), TaskQueue(self)
        self._closing = threading.Event()
        self.problem = ""
        """Why the list cannot be read, as a sentence; empty if it can."""
        self._entries: tuple[Endpoint, ...] = ()
        self._read()

    @property
    def entries(self) -> tuple[Endpoint, ...]:
        return self._entries

    def look_again(self) -> None:
        before = self._entries, self.problem
        self._read()
        if before != (self._entries, self.problem):
            self.changed.emit()

    def find(self, model: str) -> RemoteModel | None:
        """Who `endpoint:NAME/MODEL` means; None if there is no such server any more."""
        name, _, chosen = model.partition(":")[2].partition("/")
        for each in self._entries:
            if is_remote(model) and plain_name(each.name) == plain_name(name):
                return RemoteModel(each, chosen or each.model, key_of_this_run(each))
        return None

    def models(self) -> tuple[tuple[Endpoint, str, int], ...]:
        found: list[tuple[Endpoint, str, int]] = []
        for each in self._entries:
            contexts = dict(zip(each.found.models, each.found.contexts, strict=False))
            names = dict.fromkeys((*filter(None, (each.model,)), *each.found.models))
            found += [(each, name, contexts.get(name, 0)) for name in names or ("",)]
        return tuple(found)

    # --- what people agreed to ---

    def is_agreed(self, endpoint: Endpoint) -> bool:
        """Whether text may go there: it stays on this machine, or somebody agreed to it."""
        return endpoint.is_here or _agreement(endpoint) in self._agreed()

    def agree(self, endpoint: Endpoint) -> None:
        """Somebody agreed; another address is another question."""
        self._settings.set(AGREED, [*self._agreed(), _agreement(endpoint)])

    def _agreed(self) -> list[Any]:
        nothing: list[Any] = []
        return self._settings.get(AGREED, nothing)

    # --- changes ---

    def test(self, endpoint: Endpoint, key: str | None, done: Callable[[About], object], failed: Failed) -> None:
        """Looks at a server with this key, or with the one that is kept for it if it is None."""
        self._testing.ask(lambda: _look(endpoint, key, self._closing.is_set), done, failed)

    def look_around(self, done: Callable[[tuple[Nearby, ...]], object], failed: Failed) -> None:
        self._looking.ask(lambda: _nearby(self._closing.is_set), done, failed)

    def offered(self, endpoint: Endpoint, done: Callable[[tuple[bytes, str]], object], failed: Failed) -> None:
        self._testing.ask(lambda: _offered(endpoint), done, failed)

    def trust(self, endpoint: Endpoint, pem: bytes, done: Callable[[str], object], failed: Failed) -> None:
        self._doing.add(lambda: _kept(endpoint, pem), done, failed)

    def stop_testing(self) -> None:
        self._testing.forget()

    def keep(
        self, endpoint: Endpoint, key: str | None, instead_of: str, done: Callable[[bool], object], failed: Failed
    ) -> None:
        """Keeps it, with its key if there is a new one; `done` is told whether the key stays after this run."""

        def doing() -> bool:
            stays = not key or save_key(endpoint, key)
            save_endpoint(endpoint, instead_of=instead_of)
            return stays

        def on_kept(stays: bool) -> None:
            self.look_again()
            done(stays)

        self._doing.add(doing, on_kept, failed)

    def saw_blind(self, model: str) -> None:
        """The server's model that `endpoint:NAME/MODEL` means has refused pictures: it is sent none until it is tested
        again."""
        remote = self.find(model)
        if remote is None or remote.is_blind:
            return
        seen = without_sight(remote.endpoint, remote.model)
        self._entries = tuple(seen if each is remote.endpoint else each for each in self._entries)
        self.changed.emit()
        self._doing.add(lambda: save_endpoint(seen), failed=lambda _error: None)  # then it is found out again

    def remove(self, endpoint: Endpoint, failed: Failed) -> None:
        def doing() -> None:
            remove_endpoint(endpoint.name)
            forget_key(endpoint)

        self._doing.add(doing, lambda _nothing: self.look_again(), failed)

    def close(self) -> None:
        self._closing.set()
        self._testing.close()
        self._looking.close()
        self._doing.close()

    def _read(self) -> None:
        try:
            self._entries, self.problem = saved_endpoints(), ""
        except EngineError as error:
            self._entries, self.problem = (), error.message


def _agreement(endpoint: Endpoint) -> str:
    return f"{endpoint.name} {endpoint.url}"


def _look(endpoint: Endpoint, key: str | None, cancelled: Callable[[], bool]) -> About:
    from engine.remote.capabilities import about
    from engine.remote.client import Client  # imported late: it is slow to load

    with Client(endpoint, key) as client:
        return about(client, cancelled=cancelled)


def _nearby(cancelled: Callable[[], bool]) -> tuple[Nearby, ...]:
    from engine.remote.nearby import look_around

    return look_around(cancelled)


def _offered(endpoint: Endpoint) -> tuple[bytes, str]:
    from engine.remote.trust import fingerprint, offered_certificate

    pem = offered_certificate(endpoint)
    return pem, fingerprint(pem)


def _kept(endpoint: Endpoint, pem: bytes) -> str:
    from engine.remote.trust import keep_certificate

    return str(keep_certificate(endpoint, pem))
