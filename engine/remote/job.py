"""A job whose rows are answered by endpoints, with this machine as one of them if it is named."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, PlacePace
from engine.batch_files.journal import KnownJob, journal_path, read_job
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import Answer, Constraint, RowRequest, failed, grammar_of
from engine.common.chat import calls_as_json
from engine.common.config import HERE
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.jobs.job import Answerer, run_first_rows, run_job
from engine.jobs.rows import BatchOutcome, Check, ClosingExecutor, RowCallback
from engine.protocol import BatchSampled, Token
from engine.remote.chat_form import RemoteAnswer, RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import Endpoint, parse_endpoint, remote_name
from engine.remote.failures import RemoteError
from engine.remote.spread import MOST_AT_ONCE, OUT, Place, Spread, Turn

_NOTHING = Pace(0, 0, None, 0.0, None, None)


class OwnModel(Protocol):
    """This machine's own engine with a model, for some of a job's rows."""

    @property
    def answerer(self) -> Answerer: ...

    def open(self, prepared: PreparedJob, watcher: JobWatcher) -> tuple[ClosingExecutor, int]:
        """Who answers rows here, and how many at once at most."""


MakeClient = Callable[[Endpoint], Client]


def run_remote_job(
    prepared: PreparedJob, watcher: JobWatcher, own: OwnModel | None = None, make_client: MakeClient = Client
) -> JobEnding:
    """Answers the rows of a job at its endpoints and writes its result.

    Args:
        own: this machine's model; needed if `HERE` is among the endpoints.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    with _meeting(prepared.job.endpoints, watcher.cancelled, make_client) as met:
        if met is None:
            return JobEnding(False, _NOTHING, 0)
        earlier = read_job(journal_path(prepared.output)) if prepared.job.start != "restart" else None
        answerer = answerer_of(met, own, earlier, may_mix=prepared.job.mix_models)
        ending = run_job(prepared, answerer, lambda watcher: _executor(prepared, met, own, watcher), watcher)
        return replace(ending, note=" ".join(filter(None, (ending.note, _before(met, earlier)))))


def run_remote_sample(
    prepared: PreparedJob,
    rows: int,
    watcher: JobWatcher,
    own: OwnModel | None = None,
    make_client: MakeClient = Client,
) -> BatchSampled | None:
    """Answers the first rows of a job at its endpoints and keeps nothing.

    Args:
        watcher: receives each answer with the message it answers, in any order.

    Returns:
        what these rows say of the whole job; None if it was cancelled.
    """
    with _meeting(prepared.job.endpoints, watcher.cancelled, make_client) as met:
        if met is None:
            return None
        with closing(_executor(prepared, met, own, watcher)) as executor:
            begun_s = time.monotonic()
            tries = run_first_rows(prepared, rows, executor, watcher)
            return _sampled(tries, time.monotonic() - begun_s, executor.places)


def _sampled(tries: Sequence[Answer], seconds: float, places: Sequence[PlacePace]) -> BatchSampled | None:
    """What tries that took so many seconds say; None if none was answered."""
    rows = len({answer.row for answer in tries if not answer.failed})
    if not rows:
        return None
    costs = [place.cost for place in places if place.cost is not None]
    return BatchSampled(
        "",
        rows,
        sum(answer.prompt_tokens for answer in tries) / rows,
        sum(answer.generated_tokens for answer in tries) / rows,
        seconds / rows,
        sum(costs) / rows if costs else None,
        next((place.currency for place in places if place.cost is not None), ""),
    )


# --- who answers ----------------------------------------------------------------------------------


def endpoints_of(names: Sequence[str]) -> list[Endpoint]:
    """The endpoints that a job names, without this machine."""
    found: dict[str, Endpoint] = {}
    for name in names:
        if name == HERE:
            continue
        endpoint = parse_endpoint(name)
        if endpoint.name in found and found[endpoint.name] == endpoint:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"The endpoint {endpoint.name} is named twice: name it once.")
        if endpoint.name in found:  # two models of one server
            endpoint = replace(endpoint, name=f"{endpoint.name} {endpoint.model}"[:40])
        found[endpoint.name] = endpoint
    return list(found.values())


@contextmanager
def _meeting(names: Sequence[str], cancelled: CancelCheck, make_client: MakeClient) -> Iterator[list[Server] | None]:
    """Looks at all endpoints at once; None if it was cancelled meanwhile.  Their clients are closed in the end."""
    clients = list[tuple[Endpoint, Client]]()
    try:
        for endpoint in endpoints_of(names):
            clients.append((endpoint, make_client(endpoint)))
        met: list[Server] | None = []
        try:
            if clients:
                with ThreadPoolExecutor(len(clients)) as threads:
                    met = list(threads.map(lambda pair: _met(pair[0], pair[1], cancelled), clients))
        except RequestCancelled:
            met = None
        if met and HERE not in names and all(each.problem is not None and each.problem.kind in OUT for each in met):
            assert met[0].problem is not None
            raise met[0].problem
        yield met
    finally:
        for _endpoint, client in clients:
            client.close()


def _met(endpoint: Endpoint, client: Client, cancelled: CancelCheck) -> Server:
    try:
        found = client.models(cancelled)
    except RemoteError as error:
        models = endpoint.found.models
        model = endpoint.model or (models[0] if len(models) == 1 else "")
        return Server(endpoint, client, model, endpoint.found.server, endpoint.found.version, error)
    model, problem = endpoint.model, None
    if not model:
        try:
            model = client.only_model(cancelled)
        except RemoteError as error:
            problem = error
    return Server(endpoint, client, model, found.server, found.version, problem)


def answerer_of(met: Sequence[Server], own: OwnModel | None, earlier: KnownJob | None, *, may_mix: bool) -> Answerer:
    """Who answers, as the job's journal knows it.

    Args:
        earlier: the job so far, if there is one.
        may_mix: answers of other models may be added to those that are there.
    """
    models = {each.model for each in met if each.model}
    names = [remote_name(each.endpoint, each.model) for each in met]
    if own is not None:
        models.add(_own_digest(own.answerer.digest, own.answerer.precision))
        names.append(own.answerer.name)
    digest, precision = json.dumps(sorted(models)), ""
    before = _servers_before(earlier)
    servers = [each.described for each in met]
    servers += [each for each in before if each not in servers]
    if earlier is not None and earlier.kept and earlier.digest:
        begun = _models_of(earlier)
        others = [model for model in sorted(models) if model not in begun]
        if others and not may_mix:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"The {earlier.kept:,} answers of this job were given by {_listed(begun)}, and now "
                f"{_listed(others)} would add to them: choose endpoints with the same model, or agree to mix them "
                "(--mix-models).",
            )
        digest, precision = earlier.digest, earlier.precision
    return Answerer(", ".join(names), digest, precision, tuple(servers))


def _own_digest(digest: str, precision: str) -> str:
    return f"{HERE}:{digest}:{precision}"


def _models_of(earlier: KnownJob) -> list[str]:
    try:
        models = json.loads(earlier.digest)
    except ValueError:
        models = None
    if isinstance(models, list):
        return [str(model) for model in models]
    return [_own_digest(earlier.digest, earlier.precision)]  # this machine began it alone


def _listed(models: Sequence[str]) -> str:
    names = ("a model of this PC" if model.startswith(f"{HERE}:") else model for model in models)
    return " and ".join(names) or "another model"


def _servers_before(earlier: KnownJob | None) -> list[dict[str, str]]:
    servers = earlier.settings.get("servers") if earlier is not None and earlier.kept else None
    if not isinstance(servers, list):
        return []
    return [{str(name): str(value) for name, value in each.items()} for each in servers if isinstance(each, Mapping)]


def _before(met: Sequence[Server], earlier: KnownJob | None) -> str:
    """Who else answered rows of this job, as a sentence."""
    now = [each.described for each in met]
    gone = [each for each in _servers_before(earlier) if each not in now]
    if not gone:
        return ""
    names = []
    for each in gone:
        name, model, server, version = (each.get(field, "") for field in ("name", "model", "server", "version"))
        names.append(f"{name} ({' '.join(filter(None, (model, server and f'at {server}', version)))})")
    return f"Earlier rows were answered by {' and '.join(names)}."


def _executor(prepared: PreparedJob, met: Sequence[Server], own: OwnModel | None, watcher: JobWatcher) -> SpreadRows:
    here, at_once = None, 1
    if HERE in prepared.job.endpoints:
        if own is None:
            what = "This PC is to answer rows as well, but no model is loaded: load one, or leave this PC out."
            raise EngineError(ErrorCode.INVALID_REQUEST, what)
        here, at_once = own.open(prepared, watcher)
    return SpreadRows(
        met,
        here,
        here_at_once=at_once,
        may_ask_twice=prepared.job.ask_twice,
        patience_s=watcher.patience_s,
    )


_FENCED = re.compile(r"```[a-z]*\n(.*)\n```", re.DOTALL)


class AnswerCheck:
    """Checks many answers; each constraint is compiled once."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._grammars: dict[Constraint, str] = {}

    def kept(self, constraint: Constraint, text: str) -> tuple[str, bool]:
        """The answer alone, and whether it satisfies its constraint."""
        text = text.strip()
        if constraint.choices:
            return text, text in constraint.choices
        fenced = _FENCED.fullmatch(text)
        for each in (text, fenced[1].strip()) if fenced else (text,):
            if self._satisfies(constraint, each):
                return each, True
        return text, False

    def _satisfies(self, constraint: Constraint, text: str) -> bool:
        from llguidance import LLMatcher, LLTokenizer

        if constraint not in self._grammars:
            self._grammars[constraint] = grammar_of(constraint, any_space=True)
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer("byte")  # the grammar is of text, whatever a server's tokens are
        matcher = LLMatcher(self._tokenizer, self._grammars[constraint], log_level=0)
        return bool(matcher.consume_tokens(list(text.encode("utf-8", "replace")))) and bool(matcher.is_accepting())


_LOOK_S = 0.1
_COUNT_S = 0.25
_HERE = ""
_KEPT = "The answers so far are kept: resume the job once that has changed."


@dataclass(frozen=True, slots=True)
class Server:
    """An endpoint that rows are asked of, and that has been looked at.

    Attributes:
        client: closed with the executor.
        model: the id to ask for; empty while that is not known, as of a server that is not there now.
        server, version: what it said of itself.
        problem: why it may not answer.
    """

    endpoint: Endpoint
    client: Client
    model: str
    server: str = ""
    version: str = ""
    problem: RemoteError | None = None

    @property
    def described(self) -> dict[str, str]:
        """As journals keep it; no key is part of it."""
        endpoint = self.endpoint
        return {
            "name": endpoint.name,
            "url": endpoint.url,
            "model": self.model,
            "server": self.server,
            "version": self.version,
        }

    @property
    def place(self) -> Place:
        endpoint = self.endpoint
        return Place(
            endpoint.name,
            endpoint.host,
            endpoint.at_once,
            endpoint.requests_per_minute,
            endpoint.tokens_per_minute,
            endpoint.price_in,
            endpoint.price_out,
            endpoint.currency,
        )


@dataclass(slots=True, eq=False)
class _Running:
    """A request on its way; `pieces` is written by its thread and read by the job's."""

    turn: Turn
    pieces: int = 0
    is_unwanted: bool = False


_Event = Callable[[RowCallback], None]


class SpreadRows:
    """A `RowExecutor` over endpoints.

    Args:
        servers: at least one, or `here`.
        here: this machine's own engine as one more place; closed with this.
        here_at_once: how many rows it takes at most.
        may_ask_twice: see `Spread`.
        patience_s: how long to wait while nobody answers; None: until somebody does, or the job is cancelled.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        here: ClosingExecutor | None,
        *,
        here_at_once: int,
        may_ask_twice: bool,
        patience_s: float | None,
    ) -> None:
        places = [server.place for server in servers]
        if here is not None:
            places.append(Place(_HERE, most_at_once=here_at_once, reads_all=False))
        self._spread = Spread(places, may_ask_twice=may_ask_twice)
        self._servers = {server.endpoint.name: server for server in servers}
        self._patience_s = patience_s
        self._check = AnswerCheck()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._running: dict[Turn, _Running] = {}
        self._is_over = False
        self._counted_s = 0.0
        self._threads = {
            server.endpoint.name: ThreadPoolExecutor((server.endpoint.at_once or MOST_AT_ONCE) + 8, "remote-row")
            for server in servers
        }
        self._here = _Here(here, self._events.put, self._from_here, self._here_failed) if here is not None else None

    # --- a RowExecutor ----------------------------------------------------------------------------

    @property
    def note(self) -> str:
        """How this machine's own rows were answered, if there is something to say."""
        return self._here.rows.note if self._here is not None else ""

    @property
    def under_way(self) -> tuple[int, int]:
        return self._spread.under_way

    @property
    def waits(self) -> str:
        return self._spread.waits(time.monotonic())

    @property
    def places(self) -> tuple[PlacePace, ...]:
        return self._spread.paces(time.monotonic())

    def run(
        self, rows: Iterator[RowRequest], on_row: RowCallback, should_yield: Check, cancelled: Check
    ) -> BatchOutcome:
        self._spread.is_read = False
        while True:
            self._take_events(on_row)
            if cancelled():
                self._stop()
                return BatchOutcome.CANCELLED
            if should_yield():
                return BatchOutcome.YIELDED
            self._read(rows)
            now = time.monotonic()
            while (turn := self._spread.next(now)) is not None:
                self._begin(turn)
            if self._spread.is_read and self._spread.is_empty:
                return BatchOutcome.FINISHED
            self._require_somebody(now)
            self._wait(now, on_row)

    def close(self) -> None:
        """Ends what is under way, within a second or so."""
        self._stop()
        for server in self._servers.values():
            server.client.close()
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        if self._here is not None:
            self._here.close()

    # --- the job's thread -------------------------------------------------------------------------

    def _read(self, rows: Iterator[RowRequest]) -> None:
        for _ in range(max(0, self._spread.wanted)):
            asked = next(rows, None)
            if asked is None:
                self._spread.is_read = True
                return
            self._spread.add(asked)

    def _begin(self, turn: Turn) -> None:
        if self._here is not None and turn.at == _HERE:
            self._here.give(turn)
            return
        running = self._running[turn] = _Running(turn)
        server = self._servers[turn.at]
        self._threads[turn.at].submit(self._ask, server, running)

    def _take_events(self, on_row: RowCallback) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            event(on_row)
        now = time.monotonic()
        if now - self._counted_s >= _COUNT_S:
            self._counted_s = now
            for turn, running in self._running.items():
                self._spread.came(turn, running.pieces, now)

    def _wait(self, now: float, on_row: RowCallback) -> None:
        moment = self._spread.moment(now)
        seconds = _LOOK_S if moment is None else min(_LOOK_S, max(0.001, moment - now))
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return
        event(on_row)

    def _require_somebody(self, now: float) -> None:
        """Raises when waiting is of no use, or has been long enough."""
        spread = self._spread
        if spread.under_way[0] or not spread.waits(now):
            return
        if spread.are_all_out:
            whys = " ".join(dict.fromkeys(place.why for place in spread.paces(now)))
            raise EngineError(ErrorCode.ENDPOINT_FAILED, f"{whys} {_KEPT}")
        if self._patience_s is not None and spread.stuck_s(now) >= self._patience_s:
            whys = " ".join(dict.fromkeys(place.why for place in spread.paces(now) if place.why))
            raise EngineError(
                ErrorCode.ENDPOINT_FAILED, f"Nobody answered for {self._patience_s:.0f} s. {whys} {_KEPT}"
            )

    def _answered(self, turn: Turn, answer: Answer, on_row: RowCallback) -> None:
        now = time.monotonic()
        tokens = answer.prompt_tokens, answer.generated_tokens
        for other in self._spread.others_of(turn):
            if (running := self._running.get(other)) is not None:
                running.is_unwanted = True
        if self._spread.answered(turn, now, *tokens, failed=answer.failed):
            on_row(answer)

    def _stop(self) -> None:
        self._is_over = True
        for running in self._running.values():
            running.is_unwanted = True
        if self._here is not None:
            self._here.stop()

    # --- endpoints --------------------------------------------------------------------------------

    def _ask(self, server: Server, running: _Running) -> None:
        """On a thread of the endpoint."""
        turn = running.turn

        def came(delta: Token) -> None:
            running.pieces = delta.generated_tokens

        def cancelled() -> bool:
            return running.is_unwanted

        row = turn.row
        request = RemoteRequest(
            row.messages, row.sampling, server.model, constraint=row.constraint, own_tools=row.tools
        )
        try:
            answer = server.client.ask(request, came, cancelled)
        except RemoteError as error:
            failure = error
            self._events.put(lambda on_row: self._failed(running, failure, on_row))
        except RequestCancelled:
            self._events.put(lambda _on_row: self._dropped(running))
        except BaseException as error:  # a fault of ours, which ends the job
            fault = error
            self._events.put(lambda _on_row: self._broke(running, fault))
        else:
            self._events.put(lambda on_row: self._came(running, answer, on_row))

    def _came(self, running: _Running, answer: RemoteAnswer, on_row: RowCallback) -> None:
        self._running.pop(running.turn, None)
        turn = running.turn
        text, is_complete = answer.text, True
        calls = calls_as_json(answer.tool_calls)
        if turn.row.constraint is not None and not calls:
            text, is_complete = self._check.kept(turn.row.constraint, text)
        generated = answer.pieces if answer.generated_tokens is None else answer.generated_tokens
        read = answer.prompt_tokens
        if read is None:  # about; the server does not count
            read = sum(len(message.content) for message in turn.row.messages) // 4
        finish = answer.finish_reason
        counts = finish, read, generated
        ended = Answer(turn.row.row, text, *counts, "", answer.reasoning, turn.at, calls, is_complete)
        self._answered(turn, ended, on_row)

    def _failed(self, running: _Running, error: RemoteError, on_row: RowCallback) -> None:
        turn = running.turn
        self._running.pop(turn, None)
        if running.is_unwanted:
            self._spread.dropped(turn)
            return
        now = time.monotonic()
        self._spread.came(turn, running.pieces, now)
        if self._spread.failed(turn, now, error.kind, error.message, error.retry_after_s):
            on_row(replace(failed(turn.row.row, error.message), by=turn.at))

    def _dropped(self, running: _Running) -> None:
        self._running.pop(running.turn, None)
        self._spread.dropped(running.turn)

    def _broke(self, running: _Running, error: BaseException) -> None:
        self._dropped(running)
        raise error

    # --- this machine -----------------------------------------------------------------------------

    def _from_here(self, turn: Turn, answer: Answer, on_row: RowCallback) -> None:
        if answer.finish_reason == "cancelled":
            self._spread.dropped(turn)
        else:
            self._answered(turn, answer, on_row)

    def _here_failed(self, error: BaseException) -> None:
        if not isinstance(error, EngineError):
            raise error
        self._spread.leave(_HERE, error.message)


class _Here:
    """This machine's own engine, which takes rows on a thread of its own.

    Args:
        post: takes what is to be done on the job's thread.
        answered, failed: told there.
    """

    def __init__(
        self,
        rows: ClosingExecutor,
        post: Callable[[_Event], None],
        answered: Callable[[Turn, Answer, RowCallback], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.rows = rows
        self._post, self._answered, self._failed = post, answered, failed
        self._given: deque[Turn] = deque()
        self._taken: deque[Turn] = deque()
        self._turns: dict[int, Turn] = {}
        self._news = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="remote-row-here", daemon=True)
        self._thread.start()

    def give(self, turn: Turn) -> None:
        self._given.append(turn)
        self._news.set()

    def stop(self) -> None:
        self._is_over = True
        self._news.set()

    def close(self) -> None:
        self.stop()
        self._thread.join()
        self.rows.close()

    def _serve(self) -> None:
        try:
            while not self._is_over:
                self._news.wait()
                self._news.clear()
                outcome = BatchOutcome.YIELDED
                while outcome is BatchOutcome.YIELDED or self._given or self._taken:
                    # Rows that are there already are no reason to yield: they may not have been read yet.
                    while self._given:
                        self._taken.append(self._given.popleft())
                    outcome = self.rows.run(
                        self._rows(), self._has_answered, lambda: bool(self._given), lambda: self._is_over
                    )
                    if outcome is BatchOutcome.CANCELLED:
                        return
        except BaseException as error:
            failure = error
            self._post(lambda _on_row: self._failed(failure))

    def _rows(self) -> Iterator[RowRequest]:
        while self._taken:
            turn = self._taken.popleft()
            self._turns[turn.row.row] = turn
            yield turn.row

    def _has_answered(self, answer: Answer) -> None:
        turn = self._turns.pop(answer.row)
        self._post(lambda on_row: self._answered(turn, answer, on_row))
