"""Models on a hub: which there are, what a repository holds, and what of it would run, before anything is fetched."""

from engine.checkpoint.hub.contents import candidate_shape, candidates, find_candidate
from engine.checkpoint.hub.http import HubError, HubReason
from engine.checkpoint.hub.repository import (
    Candidate,
    Found,
    Reference,
    RepoFile,
    Repository,
    file_url,
    is_reference,
    parse_reference,
    read_repository,
    search,
)

__all__ = [
    "Candidate",
    "Found",
    "HubError",
    "HubReason",
    "Reference",
    "RepoFile",
    "Repository",
    "candidate_shape",
    "candidates",
    "file_url",
    "find_candidate",
    "is_reference",
    "parse_reference",
    "read_repository",
    "search",
]
