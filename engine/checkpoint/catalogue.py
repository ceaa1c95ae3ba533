"""The catalogue: models that are worth fetching, with what a choice among them needs, readable without a network.

`python -m engine.checkpoint.catalogue check` is for maintainers: it compares every entry with what the hub says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """One quantisation of a model, as a hub has it.

    Attributes:
        reference: for `engine.checkpoint.hub.find_candidate`: `ORG/NAME:LABEL`.
        bytes: of all its files.
        quality: as in `Candidate`.
        is_checked: whether the hub was asked; otherwise `bytes` is from elsewhere, or rounded.
    """

    reference: str
    bytes: int
    quality: str
    is_checked: bool = False

    @property
    def label(self) -> str:
        """`Q4_K_M`, say."""
        return self.reference.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model.

    Attributes:
        name: for people.
        family: who made it, in words.
        kind: `moe` or `dense`.
        parameters, active: in all, and used per token.
        licence, licence_link: its short name, and where it is written.
        context: longest, in tokens.
        strengths: what it is good at, in one plain sentence.
        languages: in words.
        files: quantisations, the best quality first.
        shape: the model, for predictions without a network.
        unchecked: names of the fields that nobody compared with the hub.
    """

    name: str
    family: str
    kind: str
    parameters: float
    active: float
    licence: str
    licence_link: str
    context: int
    strengths: str
    languages: str
    files: tuple[CatalogueFile, ...]
    shape: ModelShape
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All entries, and the day of the last change (`2026-11-22`)."""

    date: str
    entries: tuple[CatalogueEntry, ...]

    def entry_of(self, repository: str) -> CatalogueEntry | None:
        """The entry that a repository (`ORG/NAME`) belongs to."""
        wanted = repository.casefold()
        return next(
            (
                entry
                for entry in self.entries
                if any(file.reference.rpartition(":")[0].casefold() == wanted for file in entry.files)
            ),
            None,
        )


def read_catalogue(path: Path | None = None) -> Catalogue:
    """The catalogue in a file; by default the one that `use_catalogue` put in place, else the shipped one.

    Raises:
        EngineError: `INVALID_REQUEST` if the file is not a catalogue.
    """
    raise NotImplementedError


def use_catalogue(path: Path) -> Catalogue:
    """Checks a newer catalogue and keeps a copy, which is read from then on.

    Raises:
        EngineError: `INVALID_REQUEST` if the file is not a catalogue.
    """
    raise NotImplementedError
