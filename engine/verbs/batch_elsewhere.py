"""`switchyard batch --endpoint`: rows are answered by servers, and by this machine's model if it is named."""

from __future__ import annotations

import argparse
from types import TracebackType
from typing import TYPE_CHECKING

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob
from engine.common.config import HERE
from engine.remote.job import OwnModel, endpoints_of, run_remote_job, run_remote_sample
from engine.verbs.chat import load_engine
from engine.verbs.output import note

if TYPE_CHECKING:
    from engine.remote.job import RemoteSample
    from engine.runtime.engine import Engine


class Elsewhere:
    """Answers rows as `Engine` does; a model is loaded only if this machine is one of those that answer.

    Raises:
        EngineError: there is no such endpoint, or no such model.
    """

    def __init__(self, args: argparse.Namespace, prepared: PreparedJob) -> None:
        names = prepared.job.endpoints
        hosts = [f"{endpoint.name} ({endpoint.host})" for endpoint in endpoints_of(names) if not endpoint.is_here]
        if hosts:
            note(f"switchyard: the text of the rows is sent to {' and '.join(hosts)}")
        self._engine: Engine | None = None
        self._own: OwnModel | None = None
        if HERE in names:
            self._engine, _info = load_engine(args)
            self._own = self._engine.hosted_model(beside_others=False)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._engine is not None:
            self._engine.unload()

    def run_batch(self, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        """See `run_remote_job`."""
        return run_remote_job(prepared, watcher, self._own)

    def sample_batch(self, prepared: PreparedJob, rows: int, watcher: JobWatcher) -> None:
        """See `run_remote_sample`; what it measured is told."""
        sample = run_remote_sample(prepared, rows, watcher, self._own)
        if sample is not None:
            note(f"switchyard: {sample_words(sample)}")


def sample_words(sample: RemoteSample) -> str:
    """What a sample measured, in a sentence."""
    each = f"{sample.prompt_tokens:,.0f} tokens read and {sample.generated_tokens:,.0f} written"
    cost = "" if sample.cost is None else f", at {sample.cost:,.2g} {sample.currency}".rstrip()
    return f"a row took {sample.row_s:.1f} s with few asked at once, {each}{cost}; many at once are faster"
