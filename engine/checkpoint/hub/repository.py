"""What a hub tells of its models: the files of a repository with sizes and checksums, and a search."""

from __future__ import annotations

from dataclasses import dataclass

from engine.common.errors import CancelCheck, never_cancelled

HUGGINGFACE, MODELSCOPE = "huggingface", "modelscope"


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repository.

    Attributes:
        path: inside the repository, with `/`.
        size: in bytes.
        sha256: of its content; empty where the hub does not tell.
    """

    path: str
    size: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Repository:
    """A model's repository at one commit.

    Attributes:
        hub: `huggingface` or `modelscope`.
        id: `ORG/NAME`.
        commit: what `files` were listed of; later requests name it, so that nothing changes underneath them.
        files: all of them, sorted by path.
        licence, licence_link: its short name, and where it is written.
        gated: whether its files are given only to people who accepted its licence on the hub's page.
        downloads: of the last month.
        endpoint: the hub's address without a slash at the end, a mirror's if one is set.
    """

    hub: str
    id: str
    commit: str
    files: tuple[RepoFile, ...]
    licence: str
    licence_link: str
    gated: bool
    downloads: int = 0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing of a repository that can be fetched and run: a GGUF model with all its parts, or a safetensors folder.

    Attributes:
        repository: where it is.
        label: for people: `Q4_K_M`, `BF16`, `GPTQ 4-bit`, `MXFP4`; no two of a repository have the same.
        files: everything to fetch, configuration and tokenizer included, and nothing else.
        quality: beside the original: `original`, `near`, `good`, `fair` or `poor`.
        problem: in a sentence, why it cannot run; empty if it can.
    """

    repository: Repository
    label: str
    files: tuple[RepoFile, ...]
    quality: str
    problem: str = ""

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    @property
    def reference(self) -> str:
        """What `find_candidate` finds it by: `ORG/NAME:Q4_K_M`, before it `modelscope:` for that hub."""
        hub = "" if self.repository.hub == HUGGINGFACE else f"{self.repository.hub}:"
        return f"{hub}{self.repository.id}:{self.label}"


@dataclass(frozen=True, slots=True)
class Found:
    """A repository that a search found.

    Attributes:
        id: `ORG/NAME`; hub: as in `Repository`.
        downloads, likes: as the hub counts them.
        updated: ISO 8601, or empty.
        licence: its short name, or empty; gated: as in `Repository`.
        parameters: in the model; None where the hub does not tell.
        problem: in a sentence, why nothing in it can run, as far as its tags show; empty if something may.
    """

    id: str
    hub: str
    downloads: int
    likes: int
    updated: str
    licence: str
    gated: bool
    parameters: float | None = None
    problem: str = ""


def read_repository(reference: str, *, cancelled: CancelCheck = never_cancelled) -> Repository:
    """The repository that a reference means; a label or a file name behind it is left aside.

    Args:
        reference: `ORG/NAME`, `ORG/NAME@REVISION`, `modelscope:ORG/NAME`, or an address of the hub's pages.

    Raises:
        EngineError: `INVALID_REQUEST`, `MODEL_NOT_FOUND`, `DOWNLOAD_FAILED` (no network, no permission, cancelled).
    """
    raise NotImplementedError


def file_url(repository: Repository, file: RepoFile) -> str:
    """Where a file's content of the repository's commit is."""
    raise NotImplementedError


def search(text: str, *, limit: int = 20, cancelled: CancelCheck = never_cancelled) -> tuple[Found, ...]:
    """Repositories whose names match, the most downloaded first; those with something to run before the others.

    Args:
        text: words; `modelscope:` before them asks that hub.

    Raises:
        EngineError: `DOWNLOAD_FAILED`.
    """
    raise NotImplementedError
