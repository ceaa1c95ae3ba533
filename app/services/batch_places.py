"""Endpoints as batch jobs need them: those that are there, and the keys that only this window has."""

from __future__ import annotations

import importlib.util

from engine.batch_files.messages import EndpointKey
from engine.common.config import BatchJob, EngineConfig
from engine.common.errors import EngineError
from engine.remote.endpoint import Endpoint, saved_endpoints
from engine.remote.keys import key_of_this_run


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def on_each_node(config: EngineConfig | None, job: BatchJob) -> EngineConfig | None:
    """How a cluster runs a job's model; limits of this PC are not those of its nodes."""
    if config is None or not job.ray:
        return None
    return EngineConfig(config.model, precision=config.precision, kv_precision=config.kv_precision)


def offered_endpoints() -> tuple[Endpoint, ...]:
    """Those that people added; none if the list cannot be read, which Settings explains."""
    try:
        return saved_endpoints()
    except EngineError:
        return ()


def keys_for(job: BatchJob) -> tuple[EndpointKey, ...]:
    """Keys that were given to this window and are kept nowhere, of the endpoints that a job names."""
    if not job.is_remote:
        return ()
    named = [endpoint for endpoint in offered_endpoints() if endpoint.name in job.endpoints]
    return tuple(EndpointKey(each.name, key) for each in named if (key := key_of_this_run(each)))
