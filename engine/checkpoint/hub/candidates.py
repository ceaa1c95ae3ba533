"""Which files of a repository make up a model that can run, and what that model is."""

from __future__ import annotations

from engine.checkpoint.hub.repository import Candidate, Repository
from engine.checkpoint.model_shape import ModelShape
from engine.common.errors import CancelCheck, never_cancelled


def candidates(repository: Repository, *, cancelled: CancelCheck = never_cancelled) -> tuple[Candidate, ...]:
    """What can be fetched and run of a repository, the best quality first; then what cannot, with its `problem`.

    Raises:
        EngineError: `DOWNLOAD_FAILED`.
    """
    raise NotImplementedError


def find_candidate(reference: str, *, cancelled: CancelCheck = never_cancelled) -> Candidate:
    """The candidate that a reference means.

    Args:
        reference: as for `read_repository`, with `:LABEL` or `:FILE` behind it; without either, the one that the
            catalogue recommends, or the best of quality class `good`.

    Raises:
        EngineError: as `read_repository`; `MODEL_UNSUPPORTED`, with the reason, if there is nothing to run.
    """
    raise NotImplementedError


def candidate_shape(candidate: Candidate, *, cancelled: CancelCheck = never_cancelled) -> ModelShape:
    """The model, from the headers of its files; kept by commit, so that it is read over the network once.

    Raises:
        EngineError: `MODEL_UNSUPPORTED`, `CHECKPOINT_DAMAGED`, `DOWNLOAD_FAILED`.
    """
    raise NotImplementedError
