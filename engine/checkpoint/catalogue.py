"""The catalogue: models that are worth fetching, with what a choice among them needs, readable without a network.

And a model's shape by what the user names: a shipped profile, a model of the catalogue or of this machine, a folder, or
a hub id. Where there is no profile, it follows from the configuration and the headers of the tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from engine.checkpoint.config_file import read_config
from engine.checkpoint.counted_shape import as_quantised, shape_of
from engine.checkpoint.hub import QUALITIES, is_reference, quality_of
from engine.checkpoint.hub.contents import candidate_shape, find_candidate
from engine.checkpoint.model_directories import find_models
from engine.checkpoint.model_shape import ModelShape, model_names, read_model, shape_in
from engine.checkpoint.names import STARTER_NAME, find_named, in_library, is_path_like, name_of, resolve
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import write_private
from engine.common.json_fields import MAX_PROFILE_BYTES, ProfileFile, near_names, refused
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
        family: who made it, in words.
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


def find_shape(model: str) -> ModelShape:
    """The shape of a model, from headers alone.

    Args:
        model: `starter`, the name of a model on this machine, a checkpoint directory, a profile's name or file
            (`.json`), a name of the catalogue, or a reference to a hub (`ORG/NAME`, `ORG/NAME:Q4_K_M`). Without a
            profile, a hub model's headers are read over the network.

    Raises:
        EngineError: there is none, or it is not understood; the message says why, with suggestions.
    """
    if model.endswith(".json") or (model.casefold() in model_names() and in_library(model) is None):
        return read_model(model)
    found = find_named(model)
    if found is None and is_reference(model) and not Path(model).exists():
        return _known(model) or candidate_shape(find_candidate(model))
    if found is None and not is_path_like(model) and (listed := catalogue_shape(model)) is not None:
        return listed
    if found is None and model.strip() and not is_path_like(model) and model != STARTER_NAME:
        raise _unknown(model)
    folder = resolve(model)
    return shape_of(name_of(folder), read_config(folder), read_tensors(folder).values())


def is_on_hub(model: str) -> bool:
    return is_reference(model) and not Path(model).exists() and find_named(model) is None and _known(model) is None


def _known(hub_id: str) -> ModelShape | None:
    shapes = map(read_model, model_names())
    return next((shape for shape in shapes if shape.hub_id.casefold() == hub_id.casefold()), None)


def _unknown(model: str) -> EngineError:
    listed = [entry.name for entry in read_catalogue().entries]
    near = near_names(model, model_names() + listed + [found.name for found in find_models()[0]])
    meant = f"did you mean {' or '.join(near)}?" if near else f"known names are {', '.join(model_names())}."
    return EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"There is no model called {model!r} in the library or among the known models: {meant} "
        "A model's folder works too, or its hub id, such as Qwen/Qwen3-30B-A3B.",
    )
