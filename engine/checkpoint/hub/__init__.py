"""Models on a hub: which there are, what a repository holds, and what of it would run, before anything is fetched."""

from engine.checkpoint.hub.candidates import candidate_shape, candidates, find_candidate
from engine.checkpoint.hub.repository import (
    Candidate,
    Found,
    RepoFile,
    Repository,
    file_url,
    read_repository,
    search,
)

__all__ = [
    "Candidate",
    "Found",
    "RepoFile",
    "Repository",
    "candidate_shape",
    "candidates",
    "file_url",
    "find_candidate",
    "read_repository",
    "search",
]
