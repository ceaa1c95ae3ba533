"""The catalogue: models that are worth fetching, with what a choice among them needs, readable without a network.

`python -m engine.checkpoint.catalogue check` is for maintainers: it compares every entry with what the hub says.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.counted_shape import as_quantised
from engine.checkpoint.hub import Repository, candidates, is_reference, parse_reference, read_repository
from engine.checkpoint.hub.repository import QUALITIES, quality_of
from engine.checkpoint.model_shape import ModelShape, read_model, shape_in
from engine.common.errors import EngineError
from engine.common.files import write_private
from engine.common.json_fields import MAX_PROFILE_BYTES, ProfileFile, refused
from engine.common.paths import data_dir, resources_dir
from engine.common.plain_text import quoted
from engine.common.untrusted import read_untrusted

KINDS = ("moe", "dense")
ABILITIES = ("reasoning", "code", "tools", "pictures", "documents", "languages", "embeddings")
"""What a model does beside answering texts: it thinks first, calls tools, sees pictures (all of these if its files do
here), or gives vectors of texts; and what it is especially good at: programs, long documents, very many languages."""
_FREE = ("Apache-2.0", "MIT")
_DATE = re.compile(r"20\d\d-[01]\d-[0-3]\d")


@dataclass(frozen=True, slots=True)
class CatalogueFile:
    """One quantisation of a model, as a hub has it.

    Attributes:
        reference: for `engine.checkpoint.hub.find_candidate`: `ORG/NAME:LABEL`.
        bytes: of all its files.
        quality: as in `Candidate`.
    """

    reference: str
    bytes: int
    quality: str

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
        abilities: those of `ABILITIES` that it has.
        files: quantisations, the best quality first.
        shape: the model, for predictions without a network.
        unchecked: names of the fields that nobody compared with the hub; `bytes` are those of the files.
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
    abilities: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether its licence allows every use."""
        return self.licence in _FREE

    @property
    def usual(self) -> CatalogueFile:
        """The file that most people take: the smallest of good quality, else the best."""
        good = [file for file in self.files if QUALITIES.index(file.quality) <= QUALITIES.index("good")]
        return min(good or self.files[:1], key=lambda file: file.bytes)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All entries, and the day of the last change (`2026-11-22`)."""

    date: str
    entries: tuple[CatalogueEntry, ...]


def catalogue_dir() -> Path:
    """The shipped catalogue's folder."""
    return resources_dir() / "catalogue"


def own_catalogue() -> Path:
    """The newer one that `use_catalogue` keeps."""
    return data_dir() / "catalogue.json"


def read_catalogue(path: Path | None = None) -> Catalogue:
    """The catalogue in a file; by default the newer one of that which `use_catalogue` kept and the shipped one.

    Raises:
        EngineError: `INVALID_REQUEST` if the file is not a catalogue.
    """
    if path is not None:
        return _read(ProfileFile(path))
    shipped = _read(ProfileFile(catalogue_dir() / "catalogue.json"))
    try:
        own = _read(ProfileFile(own_catalogue())) if own_catalogue().exists() else shipped
    except EngineError:  # it was checked when it came: since then it has been damaged
        return shipped
    return own if own.date > shipped.date else shipped


def catalogue_shape(name: str) -> ModelShape | None:
    """The shape of a model of the catalogue in the file that most people take; None if no model is called so."""
    wanted = name.strip().casefold()
    entry = next((each for each in read_catalogue().entries if each.name.casefold() == wanted), None)
    return as_quantised(entry.shape, entry.usual.label) if entry is not None else None


def use_catalogue(path: Path) -> Catalogue:
    """Checks a newer catalogue and keeps a copy, which is read from then on.

    Raises:
        EngineError: `INVALID_REQUEST` if the file is not a catalogue, or older than the shipped one.
    """
    found, shipped = read_catalogue(path), _read(ProfileFile(catalogue_dir() / "catalogue.json"))
    if found.date < shipped.date:
        raise refused(path, f"is of {found.date}, and the one that came with the program of {shipped.date}")
    own_catalogue().parent.mkdir(parents=True, exist_ok=True)
    write_private(own_catalogue(), read_untrusted(path, MAX_PROFILE_BYTES))
    return found


def _read(file: ProfileFile) -> Catalogue:
    date, models = file.text("date"), file.content.get("models")
    if not _DATE.fullmatch(date):
        raise refused(file.path, f"has {quoted(date[:20])} as its date, which must be like 2026-11-22")
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise refused(file.path, "has no list 'models'")
    return Catalogue(
        date, tuple(_entry(ProfileFile(file.path, model, f"models[{at}].")) for at, model in enumerate(models))
    )


def _entry(file: ProfileFile) -> CatalogueEntry:
    name, kind, files = file.text("name"), file.text("kind"), file.content.get("files")
    if kind not in KINDS:
        raise refused(file.path, f"has {quoted(kind[:20])} in {file.prefix}kind, which must be {' or '.join(KINDS)}")
    if not isinstance(files, list) or not files or not all(isinstance(each, dict) for each in files):
        raise refused(file.path, f"has no files of {quoted(name[:60])}")
    known = file.content.get("profile")
    shape = read_model(str(known)) if known is not None else shape_in(file.part("shape"), name)
    context = file.whole("context", 512, 10**9)
    unchecked, able = file.content.get("unchecked", []), file.content.get("abilities", [])
    if not isinstance(able, list) or not all(each in ABILITIES for each in able):
        raise refused(file.path, f"has {file.prefix}abilities that are none of {', '.join(ABILITIES)}")
    found = [_file(ProfileFile(file.path, each, f"{file.prefix}files."), name) for each in files]
    return CatalogueEntry(
        name=name,
        family=file.text("family"),
        kind=kind,
        parameters=file.number("parameters", 1e6, 1e14),
        active=file.number("active", 1e6, 1e14),
        licence=file.text("licence"),
        licence_link=file.text("licence_link"),
        context=context,
        strengths=file.text("strengths"),
        languages=file.text("languages"),
        files=tuple(sorted(found, key=lambda each: QUALITIES.index(each.quality))),
        shape=replace(shape, name=name, context_tokens=context),
        unchecked=tuple(str(each) for each in unchecked) if isinstance(unchecked, list) else (),
        abilities=tuple(able),
    )


def _file(file: ProfileFile, model: str) -> CatalogueFile:
    reference = file.text("reference")
    if not is_reference(reference) or not reference.partition("/")[2].partition(":")[2]:
        raise refused(file.path, f"has {quoted(reference[:80])} as a reference, which must be like ORG/NAME:Q4_K_M")
    found = CatalogueFile(reference, file.whole("bytes", 1, 10**14), "")
    return replace(found, quality=quality_of(found.label, model))


# For maintainers


def differences(catalogue: Catalogue) -> list[str]:
    """What the hub says otherwise than the catalogue, a line each; an empty list if nothing differs."""
    found: list[str] = []
    for entry in catalogue.entries:
        repositories: dict[str, Repository | EngineError] = {}
        for file in entry.files:
            where = parse_reference(file.reference)
            key = f"{where.hub}:{where.id}"
            if key not in repositories:
                try:
                    repositories[key] = read_repository(key)
                except EngineError as error:
                    repositories[key] = error
                    found.append(f"{entry.name}: {error.message}")
            repository = repositories[key]
            if not isinstance(repository, EngineError):
                found += _differences(entry, file, repository)
    return list(dict.fromkeys(found))


def _differences(entry: CatalogueEntry, file: CatalogueFile, repository: Repository) -> Iterator[str]:
    where = parse_reference(file.reference)
    if repository.id != where.id:
        yield f"{entry.name}: {where.id} is called {repository.id} now"
    if repository.licence and _plain(repository.licence) != _plain(entry.licence):
        yield f"{entry.name}: {repository.id} is under {repository.licence}, not {entry.licence}"
    if repository.gated:
        yield f"{entry.name}: {repository.id} is gated"
    able = {one.label: one for one in candidates(repository)}
    one = able.get(where.what)
    if one is None:
        yield f"{entry.name}: {repository.id} has no {where.what}, but {', '.join(sorted(able))}"
    elif one.problem:
        yield f"{entry.name}: {file.reference} cannot run: {one.problem}"
    elif one.bytes != file.bytes:
        yield f"{entry.name}: {file.reference} has {one.bytes} bytes, not {file.bytes}"


def _plain(licence: str) -> str:
    """`LFM 1.0` and `lfm1.0` are one."""
    return re.sub(r"[^a-z0-9]", "", licence.casefold())


def main(arguments: Sequence[str] | None = None) -> int:
    """The maintainer's command; returns the exit code: 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m engine.checkpoint.catalogue", description=__doc__)
    parser.add_argument("action", choices=["check"], help="compare every entry with what the hub says")
    parser.add_argument("--file", type=Path, help="a catalogue (default: the shipped one)")
    asked = parser.parse_args(arguments)
    try:
        catalogue = read_catalogue(asked.file or catalogue_dir() / "catalogue.json")
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    found = differences(catalogue)
    sys.stdout.write("".join(f"{line}\n" for line in found) or f"All {len(catalogue.entries)} entries agree.\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
