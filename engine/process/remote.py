"""Chats and jobs that other servers answer, each on a thread of its own: the model has no part in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob
from engine.common.chat import calls_text
from engine.common.config import HERE
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.process.batch import JobEvents, JobRunner, answered_job
from engine.process.requests import RequestQueue, RequestThreads
from engine.protocol import (
    BatchFinished,
    Called,
    Event,
    Finished,
    Generate,
    Request,
    SampleBatch,
    StartBatch,
    Token,
)
from engine.remote.endpoint import Endpoint, Found, RemoteModel, called
from engine.telemetry.recorder import RequestLog

if TYPE_CHECKING:
    from engine.remote.client import Client
    from engine.remote.job import OwnModel


class RemoteRequests:
    """Has endpoints answer chats, jobs and samples of jobs; none waits for the engine, or for each other.

    Args:
        send: told of what comes before the end.
        is_elsewhere: told the number of a chat in the requests' lane, and which endpoint answers it.
    """

    def __init__(
        self,
        requests: RequestQueue,
        send: Callable[[Event], object],
        is_elsewhere: Callable[[int, str], None] = lambda _number, _place: None,
    ) -> None:
        self._requests, self._send, self._is_elsewhere = requests, send, is_elsewhere
        self._lock = threading.Lock()
        self._clients: dict[tuple[Endpoint, str], Client] = {}
        self.threads = RequestThreads(requests)

    def begin(self, request: Request) -> None:
        if not self._requests.accept_elsewhere(request):
            return
        if isinstance(request, Generate):
            self.threads.begin(request, "remote-chat", "asking another server", lambda: self._answer(request))
        elif isinstance(request, StartBatch | SampleBatch):
            self.threads.begin(request, "remote-job", "asking other servers", lambda: self._ending(request))

    def close(self) -> None:
        """Breaks off what is under way, and waits for its end."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()
        self.threads.join()

    def _answer(self, request: Generate) -> Finished:
        from engine.remote.chat_form import RemoteRequest  # takes a while, and most sessions ask nobody

        name, log, pieces, remote = request.request_id, RequestLog(is_elsewhere=True), 0, request.remote
        assert remote is not None
        self._is_elsewhere(log.number, remote.endpoint.name)

        def on_delta(delta: Token) -> None:
            nonlocal pieces
            pieces = delta.generated_tokens
            self._send(replace(delta, request_id=name))
            log.has_written(pieces)

        asked = RemoteRequest(
            request.messages, request.sampling, remote.model, tools=request.tools, chosen=remote.chosen
        )
        try:
            client = self._client(remote)
            if request.tools and "tools" in client.found.lacks:
                words = "takes no tools: switch them off in this chat, or choose another model."
                raise EngineError(ErrorCode.MODEL_UNSUPPORTED, f"{called(remote.endpoint)} {words}")
            answer = client.ask(asked, on_delta, lambda: self._requests.is_cancelled(name))
            if request.tools and answer.tool_calls:
                self._send(Called(name, answer.tool_calls))
            elif calls := calls_text(answer.tool_calls):  # of tools that the server itself offered: nobody here has any
                self._send(Token(name, f"\n```\n{calls}\n```\n", max(pieces, 1)))
            lengths = answer.prompt_tokens or 0, answer.reused_tokens, answer.written
            return Finished(name, answer.finish_reason, *lengths, answer.first_token_s or 0.0, answer.tokens_per_s)
        except RequestCancelled:
            return Finished(name, "cancelled", 0, 0, pieces)
        finally:
            log.ends()

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
            first = self._clients.setdefault((plain, remote.key), client)
        if first is not client:
            client.close()
        return first

    def _ending(self, request: StartBatch | SampleBatch) -> BatchFinished:
        if isinstance(request, SampleBatch):
            return self._sampled(request)
        return answered_job(request, runner_at(request, None), self._send, lambda: self._is_over(request))

    def _is_over(self, request: StartBatch | SampleBatch) -> bool:
        return self._requests.is_closed or self._requests.is_cancelled(request.request_id)

    def _sampled(self, request: SampleBatch) -> BatchFinished:
        from engine.batch_files.prepared_job import prepare
        from engine.remote.job import run_remote_sample  # takes a while, and most sessions ask nobody

        events = JobEvents(request.request_id, self._send)

        def cancelled() -> bool:
            return self._is_over(request)

        watcher = JobWatcher(events.pace, events.answer_now, lambda: False, lambda: None, cancelled)
        elsewhere = tuple(name for name in request.job.endpoints if name != HERE)
        prepared = prepare(replace(request.job, endpoints=elsewhere))
        sample = run_remote_sample(prepared, request.rows, watcher, make_client=_make_client(request))
        if sample is not None:
            self._send(replace(sample, request_id=request.request_id))
        seconds = sample.row_s * sample.rows if sample is not None else 0.0
        return events.finished(not cancelled(), seconds)


def needs_no_model(request: Request) -> bool:
    """Whether only others answer; a sample of endpoints and this machine is of the endpoints alone."""
    if isinstance(request, Generate):
        return request.remote is not None
    if not isinstance(request, StartBatch | SampleBatch):
        return False
    job = request.job
    if job.ray:
        return isinstance(request, StartBatch)
    return job.is_remote and (isinstance(request, SampleBatch) or HERE not in job.endpoints)


def runner_at(request: StartBatch, own: OwnModel | None) -> JobRunner:
    """Runs the request's job at its endpoints, `own` among them if this machine is one, or on its cluster."""

    def run(prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        if prepared.job.ray:
            return _on_a_cluster(prepared, request, watcher)
        from engine.remote.job import run_remote_job

        return run_remote_job(prepared, watcher, own, _make_client(request))

    return run


def _on_a_cluster(prepared: PreparedJob, request: StartBatch, watcher: JobWatcher) -> JobEnding:
    from engine.remote.ray_rows import run_cluster_job

    if request.config is None:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, "The cluster was not told which model to run: load it here, and start the job."
        )
    return run_cluster_job(prepared, request.config, watcher)


def _make_client(request: StartBatch | SampleBatch) -> Callable[[Endpoint], Client]:
    """Makes clients with the keys that came with the request, or those of the keyring."""
    from engine.remote.client import Client

    keys = {each.name: each.key for each in request.keys}
    return lambda endpoint: Client(endpoint, keys.get(endpoint.name))
