"""Chats that another server answers, each on a thread of its own: the engine and its model have no part in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.common.chat import calls_text
from engine.common.errors import RequestCancelled
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import RequestQueue
from engine.protocol import Event, Failed, Finished, Generate, Token
from engine.remote.endpoint import Endpoint, Found, RemoteModel
from engine.telemetry.request_log import RequestLog

if TYPE_CHECKING:
    from engine.remote.chat_form import RemoteAnswer, RemoteDelta
    from engine.remote.client import Client


class RemoteChats:
    """Asks endpoints, each through one client as long as it stays the same.

    Args:
        send: told of every token.
        is_elsewhere: told the number of a request in the requests' lane, and which endpoint answers it.
    """

    def __init__(
        self, requests: RequestQueue, send: Callable[[Event], None], is_elsewhere: Callable[[int, str], None]
    ) -> None:
        self._requests, self._send, self._is_elsewhere = requests, send, is_elsewhere
        self._lock = threading.Lock()
        self._clients: dict[tuple[Endpoint, str], Client] = {}
        self._threads: set[threading.Thread] = set()

    def begin(self, request: Generate) -> None:
        """Takes a request with a `remote`, which ends later."""
        assert request.remote is not None
        if not self._requests.accept_elsewhere(request):
            return
        thread = threading.Thread(target=self._answer, args=(request, request.remote), name="remote-chat", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """Breaks off what is under way, and waits for its end."""
        with self._lock:
            clients, threads = list(self._clients.values()), list(self._threads)
            self._clients.clear()
        for client in clients:
            client.close()
        for thread in threads:
            thread.join()

    def _answer(self, request: Generate, remote: RemoteModel) -> None:
        from engine.remote.chat_form import RemoteRequest  # takes a while, and most sessions ask nobody

        name, log, pieces = request.request_id, RequestLog(is_elsewhere=True), 0
        self._is_elsewhere(log.number, remote.endpoint.name)

        def on_delta(delta: RemoteDelta) -> None:
            nonlocal pieces
            pieces = delta.pieces
            self._send(Token(name, delta.text, pieces, delta.reasoning))
            log.has_written(pieces)

        asked = RemoteRequest(request.messages, request.sampling, remote.model, chosen=remote.chosen)
        try:
            answer = self._client(remote).ask(asked, on_delta, lambda: self._requests.is_cancelled(name))
            if calls := calls_text(answer.tool_calls):  # of tools that the server itself offered: nobody here has any
                self._send(Token(name, f"\n```\n{calls}\n```\n", max(pieces, 1)))
            self._requests.end(_finished(name, answer))
        except RequestCancelled:
            self._requests.end(Finished(name, "cancelled", 0, 0, pieces, 0.0, 0.0))
        except BaseException as error:  # whatever happened, end this request
            log_failure(error, "asking another server")
            failure = as_engine_error(error, "asking another server")
            self._requests.end(Failed(name, failure.code, failure.message))
        finally:
            log.ends()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _client(self, remote: RemoteModel) -> Client:
        """The endpoint's client.  What it found out of the server, and which model is chosen, makes it no other."""
        from engine.remote.client import Client

        plain = replace(remote.endpoint, found=Found(), model="")
        with self._lock:
            known = self._clients.get((plain, remote.key))
        if known is not None:
            return known
        client = Client(remote.endpoint, remote.key or None)  # may wait for who unlocks the keyring
        with self._lock:
            kept = self._clients.setdefault((plain, remote.key), client)
        if kept is not client:
            client.close()
        return kept


def _finished(name: str, answer: RemoteAnswer) -> Finished:
    return Finished(
        name,
        answer.finish_reason,
        answer.prompt_tokens or 0,
        answer.reused_tokens,
        answer.written,
        answer.first_token_s or 0.0,
        answer.tokens_per_s,
    )
