"""Jobs that other servers answer, each on a thread of its own: the engine and its model have no part in them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.messages import BatchFinished, BatchSampled, SampleBatch, StartBatch
from engine.batch_files.prepared_job import PreparedJob
from engine.common.config import HERE
from engine.common.errors import EngineError, ErrorCode
from engine.process.batch import JobEvents, JobRunner, answered_job, finished_event
from engine.process.failures import as_engine_error, log_failure
from engine.process.requests import RequestQueue
from engine.protocol import Event, Failed, TerminalEvent

if TYPE_CHECKING:
    from engine.remote.client import Client
    from engine.remote.endpoint import Endpoint
    from engine.remote.job import OwnModel


def needs_no_model(request: StartBatch | SampleBatch) -> bool:
    """Whether only others answer; a sample of endpoints and this machine is of the endpoints alone."""
    job = request.job
    if job.ray:
        return isinstance(request, StartBatch)
    return job.is_remote and (isinstance(request, SampleBatch) or HERE not in job.endpoints)


class RemoteJobs:
    """Runs jobs and samples of them; none waits for the engine, or for each other.

    Args:
        send: told of what they do.
    """

    def __init__(self, requests: RequestQueue, send: Callable[[Event], None]) -> None:
        self._requests, self._send = requests, send
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def begin(self, request: StartBatch | SampleBatch) -> None:
        """Takes a request of a job that names endpoints, which ends later."""
        if not self._requests.accept_elsewhere(request):
            return
        thread = threading.Thread(target=self._run, args=(request,), name="remote-job", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def close(self) -> None:
        """Stops what is under way, which can be resumed later, and waits for its end."""
        self._is_closed = True
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _run(self, request: StartBatch | SampleBatch) -> None:
        ending: TerminalEvent
        try:
            if isinstance(request, StartBatch):
                ending = answered_job(request, runner_at(request, None), self._send, lambda: self._is_over(request))
            else:
                ending = self._sampled(request)
        except BaseException as error:  # whatever happened, end this job; the others go on
            log_failure(error, "asking other servers")
            failure = as_engine_error(error, "asking other servers")
            ending = Failed(request.request_id, failure.code, failure.message)
        self._requests.end(ending)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _is_over(self, request: StartBatch | SampleBatch) -> bool:
        return self._is_closed or self._requests.is_closed or self._requests.is_cancelled(request.request_id)

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
            each = sample.prompt_tokens, sample.generated_tokens
            self._send(BatchSampled(request.request_id, sample.rows, *each, sample.row_s, sample.cost, sample.currency))
        seconds = sample.row_s * sample.rows if sample is not None else 0.0
        return finished_event(request.request_id, not cancelled(), *events.counts, seconds)


def runner_at(request: StartBatch, own: OwnModel | None) -> JobRunner:
    """Runs the request's job at its endpoints, `own` among them if this machine is one, or on its cluster."""

    def run(prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        if prepared.job.ray:
            return _on_a_cluster(prepared, request, watcher)
        from engine.remote.job import run_remote_job

        return run_remote_job(prepared, watcher, own, _make_client(request))

    return run


def _on_a_cluster(prepared: PreparedJob, request: StartBatch, watcher: JobWatcher) -> JobEnding:
    from engine.remote.ray_job import run_cluster_job

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
