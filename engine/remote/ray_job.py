"""A whole job on a Ray cluster, from its settings to its result; the answers are kept here, as those of any job."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice

from engine.batch_files.job_watcher import JobEnding, JobWatcher, Pace
from engine.batch_files.journal import journal_path, read_job
from engine.batch_files.prepared_job import PreparedJob
from engine.batch_files.rows import RowRequest
from engine.checkpoint.names import name_of, resolve
from engine.checkpoint.shards import content_digest
from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode
from engine.formats import AUTO, is_precision
from engine.jobs.job import Answerer, run_job
from engine.protocol import ClusterJob
from engine.remote.ray_rows import SAMPLE_ROWS, RayRows


def run_cluster_job(prepared: PreparedJob, config: EngineConfig, watcher: JobWatcher) -> JobEnding:
    """Answers the rows of a job on the nodes of its cluster and writes its result.

    The job is the same as with this model on this machine: either can go on with what the other began.

    Args:
        config: of the engine on each node; its model is a name or a path, here and there.

    Raises:
        EngineError: the job cannot start or continue; its answers so far are kept.
    """
    models, digest = _where(config.model)
    config = _as_begun(prepared, config)
    sample = [(share, row) for share, row in islice(prepared.asked(), SAMPLE_ROWS) if isinstance(row, RowRequest)]
    asked = ClusterJob(models, digest, config, prepared.job, tuple(sample))
    known = Pace(0, 0, None, 0.0, None, None)
    with closing(RayRows(prepared.job.ray, asked)) as rows:

        def cancelled() -> bool:
            watcher.on_pace(known, rows.waits)
            return watcher.cancelled()

        if not rows.open(cancelled):
            return JobEnding(False, known, 0)
        digest, precision = rows.model
        return run_job(prepared, Answerer(models[-1], digest, precision), lambda _watcher: rows, watcher)


def _as_begun(prepared: PreparedJob, config: EngineConfig) -> EngineConfig:
    """A job with answers keeps its precision, unless another is asked for."""
    if config.precision != AUTO or not prepared.job.goes_on:
        return config
    begun = read_job(journal_path(prepared.output))
    if begun is None or not begun.kept or not is_precision(begun.precision):
        return config
    return replace(config, precision=begun.precision)


def _where(model: str) -> tuple[tuple[str, ...], str]:
    """What nodes may find a model by, and its digest; a name will do if it is not on this machine."""
    try:
        path = resolve(model)
    except EngineError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND or "/" in model or "\\" in model:
            raise
        return (model,), ""
    return tuple(dict.fromkeys((model, name_of(path), str(path)))), content_digest(path)
