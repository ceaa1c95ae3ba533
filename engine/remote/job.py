"""A job whose rows are answered by endpoints, with this machine as one of them if it is named."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace, PlacePace
from engine.batch_files.journal import KnownJob, journal_path, read_job
from engine.batch_files.prepared_job import PreparedJob
from engine.common.config import HERE
from engine.common.errors import CancelCheck, EngineError, ErrorCode, RequestCancelled
from engine.jobs.job import Answerer, run_first_rows, run_job
from engine.jobs.rows import ClosingExecutor, RowAnswer
from engine.protocol import BatchSampled
from engine.remote.client import Client
from engine.remote.endpoint import Endpoint, parse_endpoint, remote_name
from engine.remote.executor import Server, SpreadRows
from engine.remote.failures import RemoteError
from engine.remote.spread import OUT, Place

_NOTHING = Pace(0, 0, None, 0.0, None, None)


class OwnModel(Protocol):
    """This machine's own engine with a model, for some of a job's rows."""

    @property
    def answerer(self) -> Answerer: ...

    def open(self, prepared: PreparedJob, watcher: JobWatcher) -> tuple[ClosingExecutor, int]:
        """Who answers rows here, and how many at once at most."""


MakeClient = Callable[[Endpoint], Client]


@dataclass(frozen=True, slots=True)
class Met:
    """An endpoint that has been looked at.

    Attributes:
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


def _sampled(tries: Sequence[RowAnswer], seconds: float, places: Sequence[PlacePace]) -> BatchSampled | None:
    """What tries that took so many seconds say; None if none was answered."""
    rows = len({answer.row for answer in tries if not answer.error})
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
def _meeting(names: Sequence[str], cancelled: CancelCheck, make_client: MakeClient) -> Iterator[list[Met] | None]:
    """Looks at all endpoints at once; None if it was cancelled meanwhile.  Their clients are closed in the end."""
    clients = list[tuple[Endpoint, Client]]()
    try:
        for endpoint in endpoints_of(names):
            clients.append((endpoint, make_client(endpoint)))
        met: list[Met] | None = []
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


def _met(endpoint: Endpoint, client: Client, cancelled: CancelCheck) -> Met:
    try:
        found = client.models(cancelled)
    except RemoteError as error:
        models = endpoint.found.models
        model = endpoint.model or (models[0] if len(models) == 1 else "")
        return Met(endpoint, client, model, endpoint.found.server, endpoint.found.version, error)
    model, problem = endpoint.model, None
    if not model:
        try:
            model = client.only_model(cancelled)
        except RemoteError as error:
            problem = error
    return Met(endpoint, client, model, found.server, found.version, problem)


def answerer_of(met: Sequence[Met], own: OwnModel | None, earlier: KnownJob | None, *, may_mix: bool) -> Answerer:
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


def _before(met: Sequence[Met], earlier: KnownJob | None) -> str:
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


def _executor(prepared: PreparedJob, met: Sequence[Met], own: OwnModel | None, watcher: JobWatcher) -> SpreadRows:
    servers = [Server(each.place, each.client, each.model) for each in met]
    here, at_once = None, 1
    if HERE in prepared.job.endpoints:
        if own is None:
            what = "This PC is to answer rows as well, but no model is loaded: load one, or leave this PC out."
            raise EngineError(ErrorCode.INVALID_REQUEST, what)
        here, at_once = own.open(prepared, watcher)
    return SpreadRows(
        servers,
        here,
        here_at_once=at_once,
        may_ask_twice=prepared.job.ask_twice,
        patience_s=watcher.patience_s,
    )
