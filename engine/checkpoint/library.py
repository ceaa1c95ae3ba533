"""The models of this machine: what each is, when it was used, whether it is intact.

The library is one folder per model in the models folder. Models in other folders and in other programs' stores are used
where they lie (see `model_directories`). What is converted of a checkpoint is stored in the data folder, where it is
found again and removed with it.

When a model was last used on this machine, and how fast it answered: a small file per model in the data folder.

A file per model, replaced as a whole: several processes may write at once, and the last one wins.

Who uses a model: many processes may read it at once, but it is moved or removed only by one that is alone with it.

Everybody puts a locked file of their own into the model's folder of locks, in the data folder: a store of another
program may be read-only, and is not ours to write to. Only then they look at the others' files, so of two that begin at
the same time at least one sees the other. A lock dies with its process; a file without a lock means nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from engine.checkpoint.config_file import CONFIG_NAME, read_config, read_json
from engine.checkpoint.embedding import MODULES, PART_FOLDER, embedding_of, is_of_embedding
from engine.checkpoint.gguf import LABEL, SUFFIX, all_parts, gguf_at
from engine.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, damaged_files, read_manifest
from engine.checkpoint.model_directories import FOLDER, OWN, WITHIN_S, Found, find_models, origin_of
from engine.checkpoint.names import STARTER_NAME, find_named, name_of, resolve, starter_folder
from engine.checkpoint.profile import ModelProfile, read_profile
from engine.checkpoint.shards import check_filled, is_beside_weights, named_weights, read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, locked_file, new_folder, remove_unlocked, write_private
from engine.common.json_fields import fields_of
from engine.common.paths import PREPARED_VARIABLE, cache_dir, data_dir, models_dir
from engine.common.untrusted import open_untrusted, parse_json, read_record, read_untrusted, reason
from engine.families.pictures import SIGHTS
from engine.families.replies.reader import may_think, takes_tools, thinking_choices

LEAST_TOKENS = 16
"""An answer of fewer tokens says nothing about speed."""
_ANSWERS = 9
_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Usage:
    """What is remembered of one model.

    Attributes:
        last_used: seconds since the epoch; None if never.
        how: on which device and in which precision it ran then.
        tokens_per_s: decode speeds of the last answers that way, oldest first.
    """

    last_used: float | None = None
    how: str = ""
    tokens_per_s: tuple[float, ...] = ()

    @property
    def measured_tokens_per_s(self) -> float | None:
        """The median of the last answers; None before the first."""
        return median(self.tokens_per_s) if self.tokens_per_s else None


def where(model: Path) -> str:
    """Twelve hex digits that stand for a checkpoint's place: in the names of what is kept about it elsewhere."""
    return hashlib.sha256(str(model.resolve()).encode(errors="surrogateescape")).hexdigest()[:12]


def model_at(place: str) -> Path | None:
    """The checkpoint whose place this stands for (`where`), if it was ever used."""
    model = read_record(data_dir() / "usage" / f"{place}.json", _MOST_BYTES).get("model")
    return Path(model) if isinstance(model, str) else None


def read_usage(model: Path) -> Usage:
    found = read_record(_file(model), _MOST_BYTES)
    try:
        used, how, speeds = found["last_used"], str(found["how"]), found["tokens_per_s"]
        return Usage(float(used), how, tuple(float(speed) for speed in speeds if 0 < speed < 1e6)[-_ANSWERS:])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return Usage()


def is_any_known() -> bool:
    return any(_file(Path()).parent.glob("*.json"))


def note_use(model: Path, how: str, tokens_per_s: float = 0.0, tokens: int = 0) -> None:
    """Notes that a model was loaded, or answered at this speed.  Never fails: it is not worth an answer.

    Args:
        how: the device and the precision; speeds of another way are forgotten.
        tokens: of the answer.
    """
    before = read_usage(model)
    speeds = before.tokens_per_s if before.how == how else ()
    if tokens >= LEAST_TOKENS and tokens_per_s > 0:
        speeds = (*speeds, tokens_per_s)[-_ANSWERS:]
    record = {"model": str(model), "last_used": time.time(), "how": how, "tokens_per_s": speeds}
    with contextlib.suppress(OSError, ValueError):
        write_private(_file(model), json.dumps(record) + "\n")


def move_usage(model: Path, to: Path) -> None:
    with contextlib.suppress(OSError):
        _file(model).replace(_file(to))


def forget_usage(model: Path) -> None:
    with contextlib.suppress(OSError):
        _file(model).unlink(missing_ok=True)


def _file(model: Path) -> Path:
    return data_dir() / "usage" / f"{where(model)}.json"


_READER, _ALONE = "reader-", "alone-"


@contextlib.contextmanager
def reading(model: Path) -> Iterator[None]:
    """Uses the checkpoint at a path for the block.

    Where no lock can be kept (a read-only data folder), it is used all the same.

    Raises:
        EngineError: `BUSY` while it is being moved or removed.
    """
    with contextlib.ExitStack() as held:
        try:
            mine = held.enter_context(_announced(model, _READER))
        except OSError:
            mine = None
        if mine is not None and _others(mine, _ALONE):
            raise EngineError(ErrorCode.BUSY, f"{model.name} is being moved or removed: wait until that is done.")
        yield


@contextlib.contextmanager
def exclusive_use(model: Path) -> Iterator[None]:
    """Makes sure that nobody else uses the checkpoint at a path, nor begins to during the block.

    Raises:
        EngineError: `BUSY` if somebody does.
    """
    with contextlib.ExitStack() as held:
        with disk_errors_explained(data_dir()):
            mine = held.enter_context(_announced(model, _ALONE))
        if _others(mine, _ALONE):
            raise EngineError(
                ErrorCode.BUSY, f"{model.name} is being moved or removed already: wait until that is done."
            )
        if _others(mine, _READER):
            raise EngineError(
                ErrorCode.BUSY,
                f"{model.name} is in use: unload it in Switchyard's window, end other programs with it, and try again.",
            )
        yield


@contextlib.contextmanager
def _announced(model: Path, prefix: str) -> Iterator[Path]:
    folder, path = data_dir() / "locks" / where(model), None
    new_folder(folder)
    try:
        with locked_file(folder, prefix) as path:
            yield path
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _others(mine: Path, prefix: str) -> bool:
    """Whether others hold such a lock; files of killed processes are removed."""
    files = [file for file in mine.parent.iterdir() if file.name.startswith(prefix) and file != mine]
    return any(not remove_unlocked(file) for file in files)


_VERSION = [7, *sorted(SIGHTS)]
"""Of the file with descriptions, and what is known to see; another is not read."""
_MOST_DESCRIPTIONS = 8 * 2**20
_MOST_KEPT = 2000
_MOST_TEMPLATE = 16 * 2**20
TEMPLATE_FOLDER = "additional_chat_templates"
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8": "fp8", "compressed-tensors": "compressed"}
_CONVERTED = re.compile(r"-(?P<place>[0-9a-f]{12})\.gguf")
_DIGEST = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
_MORE_BESIDE = (
    MANIFEST_NAME, "tiktoken.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of models that are not downloaded."""
_ABOUT = re.compile(r"(?:readme|licen[cs]e|notice|use_policy|copying)(?:\.md|\.txt)?|\.gitattributes", re.IGNORECASE)


def converted_path(directory: Path, precision: str) -> Path:
    """The file with what is converted of a checkpoint: in the data folder, as it is as large as the model."""
    return converted_dir() / f"{directory.name}-{precision}-{where(directory)}.gguf"


def converted_of(directory: Path) -> list[Path]:
    """The files with what was converted of a checkpoint, finished or not, in all precisions."""
    middle = f"-{where(directory)}.gguf"
    try:
        return [file for file in converted_dir().iterdir() if middle in file.name and file.is_file()]
    except OSError:
        return []


def remove_converted(files: list[Path]) -> int:
    """Deletes them and returns the bytes freed.  A file in use stays, on systems that lock open files."""
    freed = 0
    for file in files:
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed


def converted_dir() -> Path:
    own = os.environ.get(PREPARED_VARIABLE)
    return Path(own) if own else data_dir() / "converted"


def leftovers() -> list[Path]:
    """Converted weights that nothing needs: of models that are gone, and those that an earlier version made.

    A model whose folder is gone as well may be on a disk that is not connected.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError):
        found += [file for file in (data_dir() / "banks").iterdir() if ".bank" in file.name and file.is_file()]
    with contextlib.suppress(OSError):
        for file in converted_dir().iterdir():
            named = _CONVERTED.search(file.name)
            model = model_at(named["place"]) if named is not None else None
            if model is not None and model.is_absolute() and model.parent.is_dir() and not os.path.lexists(model):
                found.append(file)
    return found


def remove_leftovers() -> int:
    freed = remove_converted(leftovers())
    with contextlib.suppress(OSError):  # there is none, or something else is in it
        (data_dir() / "banks").rmdir()
    return freed


__all__ = ["LibraryEntry", "Listing", "Verification", "list_models", "look_around", "resolve", "show", "verify"]


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One model in a list.

    Attributes:
        name: what to call it; for a directory outside the library, its path.
        family: transformers' `model_type`; empty if unreadable.
        dtype: how the weights are stored (`bfloat16`, `fp8`, ...), as the configuration says.
        experts, experts_per_token: 0 for dense models, or if the configuration does not give them.
        context_tokens: the model's own limit; 0 if unknown.
        source: where it was built or imported from; empty if it has no manifest.
        problem: one sentence if it is unusable, otherwise empty.
        origin: whose it is: `switchyard` (in the library), `folder` (the user's own, in one of the model folders or at
            a path), or the program in whose store it lies: `hub cache`, `LM Studio`, `Ollama`, `Jan`, `GPT4All`.
        converted_bytes: of what was converted of it, in all precisions.
        last_used: when it was last loaded or answered on this machine, in seconds since the epoch.
        measured_tokens_per_s: the median decode speed of its last answers on this machine.
        precision_words: how the weights are stored, for people: `Q4_K`, `GPTQ`, `bf16`.
        calls_tools, thinks: whether its chat template knows tools, and reasoning before an answer.
        content: what its weights are, for `listed_once`.
        also: other places where the same model lies: whose each is, as `origin`, and its path. Only in a list.
    """

    name: str
    path: Path
    family: str = ""
    parameters: int = 0
    bytes_on_disk: int = 0
    dtype: str = ""
    experts: int = 0
    experts_per_token: int = 0
    context_tokens: int = 0
    source: str = ""
    problem: str = ""
    origin: str = "switchyard"
    converted_bytes: int = 0
    last_used: float | None = None
    measured_tokens_per_s: float | None = None
    precision_words: str = ""
    embeds: bool = False
    sees: bool = False
    calls_tools: bool = False
    thinks: bool = False
    content: tuple[str, ...] = ()
    also: tuple[tuple[str, Path], ...] = ()

    @property
    def can_chat(self) -> bool:
        return not self.problem and not self.embeds

    @property
    def is_in_place(self) -> bool:
        return self.origin != OWN


@dataclass(frozen=True, slots=True)
class Listing:
    """The models that were found; `problems` are sentences about folders that could not be read, or not in time."""

    entries: tuple[LibraryEntry, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`.

    Attributes:
        checked: `sha256` (every byte against the manifest) or `headers` (no manifest: structure and sizes only).
    """

    name: str
    path: Path
    checked: str
    files: int
    damaged: dict[str, str]


def starter_is_built() -> bool:
    """Whether the starter exists; `verify` checks whether it is intact."""
    folder = starter_folder()
    return (folder / MANIFEST_NAME).is_file() and (folder / CONFIG_NAME).is_file()


def look_around(*, within_s: float = WITHIN_S, cancelled: Callable[[], bool] = lambda: False) -> Listing:
    """All models of this machine: the library's with the starter first, those in other model folders, those of other
    programs; damaged ones with their problem.

    What was read of a model is kept for as long as its files' names, sizes and times stay. A folder that does not
    answer may take as long as `within_s`: this is not for the thread that draws a window.
    """
    _descriptions.load()
    found, problems = find_models(within_s=within_s, cancelled=cancelled, look_at=_descriptions.look_at)
    named = [replace(_descriptions.seen[model.path], name=model.name) for model in found]
    _descriptions.save()
    entries = sorted(listed_once(named), key=lambda entry: entry.name != STARTER_NAME)
    return Listing(tuple(entries), tuple(problems))


def list_models() -> list[LibraryEntry]:
    """The models that `look_around` finds in a second, for whoever cannot wait."""
    return list(look_around(within_s=1.0).entries)


def show(model: str) -> LibraryEntry:
    path = resolve(model)
    if path.parent == models_dir():
        return describe(path, path.name)
    found = None if os.path.lexists(model) else find_named(model)
    return _entry(found) if found is not None else describe(path, str(path))


def describe(path: Path, name: str) -> LibraryEntry:
    """The entry of the model at `path`; reads its configuration and the headers of its weights only."""
    return _entry(Found(name, path, origin_of(path)))


def chat_template(path: Path) -> str:
    """The chat template of the model at `path`, with all its versions if it has several.

    Empty if it has none that can be read: no reason not to describe the rest.
    """
    gguf = gguf_at(path)
    try:
        if gguf is not None:
            from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need

            said = read_gguf(gguf).metadata
            return "\n".join(str(said[key]) for key in said if key.startswith("tokenizer.chat_template"))
        files = [path / "chat_template.jinja", *sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))]
        texts: list[Any] = [read_untrusted(file, _MOST_TEMPLATE).decode() for file in files if file.exists()]
        if not texts:
            written = read_json(path / "tokenizer_config.json", _MOST_TEMPLATE).get("chat_template")
            several = written if isinstance(written, list) else [{"template": written}]
            texts = [each.get("template") for each in several if isinstance(each, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    except (EngineError, OSError, ValueError):
        return ""


def _entry(model: Found) -> LibraryEntry:
    usage, said = read_usage(model.path), _descriptions.of(model.path)
    link = link_key(_weights_of(model.path))
    return replace(
        said,
        content=(*said.content, link) if link else said.content,
        name=model.name,
        origin=model.origin,
        converted_bytes=total_bytes(converted_of(model.path)),
        last_used=usage.last_used,
        measured_tokens_per_s=usage.measured_tokens_per_s,
    )


def _read(path: Path) -> LibraryEntry:
    manifest = read_manifest(path)
    entry = LibraryEntry(
        name="",
        path=path,
        bytes_on_disk=total_bytes(model_files(path)),
        source=manifest.source if manifest else "",
    )
    try:
        profile = read_profile(path)
        embeds = embedding_of(path) is not None
    except EngineError as error:
        return replace(entry, problem=error.message)
    template = chat_template(path)
    return replace(
        entry,
        family=profile.family,
        parameters=profile.parameters,
        dtype=profile.quantization or profile.dtype,
        experts=profile.experts,
        experts_per_token=profile.experts_per_token,
        context_tokens=profile.context_tokens,
        precision_words=precision_words(path, profile),
        embeds=embeds,
        sees=profile.sees,
        calls_tools=not embeds and takes_tools(template),
        thinks=not embeds and (bool(thinking_choices(template)) or may_think(template, profile.family)),
        content=content_keys(_weights_of(path), path if path.is_dir() else path.parent, manifest),
    )


def precision_words(path: Path, profile: ModelProfile) -> str:
    stored = profile.quantization or profile.dtype
    gguf = gguf_at(path)
    mix = LABEL.search(f"{gguf.name} {name_of(path)}".upper()) if gguf is not None else None
    if mix is not None:  # the name of the whole mixture, which its maker gave it
        return mix[0]
    return _SHORT.get(stored, stored.upper())


class _Descriptions:
    """What was read of models, kept in a file for as long as their files have the same names, sizes and times."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, LibraryEntry]] = {}
        self.seen: dict[Path, LibraryEntry] = {}
        self._is_loaded_from: Path | None = None
        self._changed = False

    def of(self, path: Path) -> LibraryEntry:
        state, kept = _state(path), self._kept.get(str(path))
        if kept is not None and kept[0] == state:
            return kept[1]
        entry = _read(path)
        if not entry.problem:  # which another version may not have
            self._kept[str(path)] = state, entry
            self._changed = True
        return entry

    def look_at(self, model: Found) -> None:
        """Makes the entry of a model that was found, in the thread that found it: its disk may not answer.

        One model that cannot be described must not hide the others.
        """
        try:
            self.seen[model.path] = _entry(model)
        except Exception as error:
            problem = f"{model.path} cannot be read ({reason(error)})."
            self.seen[model.path] = LibraryEntry(model.name, model.path, origin=model.origin, problem=problem)

    def load(self) -> None:
        if self._is_loaded_from == _descriptions_file():
            return
        self._is_loaded_from = _descriptions_file()
        self._kept = {}
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError, EngineError):
            raw = parse_json(read_untrusted(_descriptions_file(), _MOST_DESCRIPTIONS))
            if raw["version"] == _VERSION:
                self._kept = {
                    path: (
                        kept["state"],
                        LibraryEntry("", Path(path), **fields_of(LibraryEntry, {name: kept[name] for name in _KEPT})),
                    )
                    for path, kept in raw["models"].items()
                }

    def save(self) -> None:
        if not self._changed:
            return
        self._changed = False
        models = {
            path: {"state": state, **{name: getattr(entry, name) for name in _KEPT}}
            for path, (state, entry) in list(self._kept.items())
        }
        text = json.dumps({"version": _VERSION, "models": dict(list(models.items())[-_MOST_KEPT:])})
        with contextlib.suppress(OSError, ValueError):
            write_private(_descriptions_file(), text)


_descriptions = _Descriptions()


def _descriptions_file() -> Path:
    return cache_dir() / "models.json"


_KEPT = (
    *("family", "dtype", "source", "precision_words", "parameters", "bytes_on_disk", "experts", "experts_per_token"),
    *("context_tokens", "embeds", "sees", "calls_tools", "thinks", "content"),
)


def _state(path: Path) -> str:
    digest = hashlib.sha256()
    towers = [] if path.is_dir() else sorted(path.parent.glob("*mmproj*.gguf"))
    for file in (*files_of(path), *towers):
        with contextlib.suppress(OSError):
            status = file.stat()
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def model_files(path: Path) -> list[Path]:
    """The files that belong to the model at a path, sorted: those of its manifest, or else those that by their names
    are its weights, what is read beside them, its card and its licence.

    The folder may hold anything else, such as all that was ever downloaded, and that is never among them.
    """
    if not path.is_dir():
        return files_of(path)
    manifest = read_manifest(path)
    if manifest is not None and manifest.files:
        names = {MANIFEST_NAME, *(record.path for record in manifest.files)}
        return [file for file in files_of(path) if file.relative_to(path).as_posix() in names]
    weights = _weights_by_name(path)
    return [file for file in files_of(path) if file in weights or _is_beside(file, path)]


def _weights_of(path: Path) -> list[Path]:
    weights = _weights_by_name(path) if path.is_dir() else set(files_of(path))
    return sorted(file for file in weights if file.is_file())


def _weights_by_name(folder: Path) -> set[Path]:
    try:
        gguf = gguf_at(folder)
    except EngineError:  # several, of which none is meant
        return set()
    return set(named_weights(folder) if gguf is None else all_parts(gguf))


def _is_beside(file: Path, folder: Path) -> bool:
    if is_of_embedding(file.relative_to(folder).as_posix()):
        return True
    if file.parent != folder:
        return file.parent == folder / TEMPLATE_FOLDER and file.suffix == ".jinja"
    return file.name in _MORE_BESIDE or is_beside_weights(file.name) or is_about(file)


def is_about(file: Path) -> bool:
    """Whether this is a model's card or licence, or else somebody's notes of that name."""
    return _ABOUT.fullmatch(file.name) is not None


def files_of(path: Path) -> list[Path]:
    """The files at a model's path, sorted, whether they are its own or lie beside: see `model_files`.

    Of a folder with a manifest all; of other folders those that lie in it, and its chat templates.
    """
    if not path.is_dir():
        return [part for part in all_parts(path) if part.is_file()]
    if (path / MANIFEST_NAME).is_file():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    else:
        parts = [
            Path(entry) for entry in _entries(path) if (path / MODULES).is_file() and PART_FOLDER.fullmatch(entry.name)
        ]
        files = [Path(entry) for folder in (path, path / TEMPLATE_FOLDER, *parts) for entry in _entries(folder)]
    return sorted(file for file in files if file.is_file())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def total_bytes(files: list[Path]) -> int:
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


def verify(
    model: str,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Verification:
    """Compare every byte with the checksums that are known; without any check structure and sizes.

    The library's models have a manifest. The hub's cache and Ollama name their files by their SHA-256.

    Args:
        on_progress: called with `done` and `total` bytes.

    Raises:
        EngineError: as `resolve`; `BUSY` while it is being moved or removed.
        RequestCancelled: `cancelled()` returned true.
    """
    entry = show(model)
    path = entry.path
    with reading(path):
        manifest = read_manifest(path)
        folder = path if path.is_dir() else path.parent
        digests = ((file, digest) for file in files_of(path) if (digest := _digest(file)))
        records = (
            FileRecord(file.relative_to(folder).as_posix(), file.stat().st_size, digest) for file, digest in digests
        )
        named = Manifest("", tuple(records))
        manifest = manifest if manifest is not None and manifest.files else named
        if manifest.files:
            damage = damaged_files(folder, manifest, on_progress=on_progress, cancelled=cancelled)
            return Verification(entry.name, path, "sha256", len(manifest.files), damage)
        try:
            read_config(path)
            tensors = read_tensors(path)
            files = {file for tensor in tensors.values() for file in tensor.files}
            check_filled(tensors.values(), thorough=True)
        except EngineError as error:
            return Verification(entry.name, path, "headers", 0, {str(path): error.message})
    return Verification(entry.name, path, "headers", len(files) + (path / CONFIG_NAME).is_file(), {})


def _digest(file: Path) -> str:
    """Its SHA-256, if its name, or that of the file that it links to, is that; else empty."""
    match = _DIGEST.fullmatch(file.resolve().name)
    return match[1] if match is not None else ""


# One model in several stores is known by what its weights are: the same files (by link), the same SHA-256 where that is
# known without reading them (our manifest, the names in the hub's cache and in Ollama's store), or GGUF files of one
# name and size with the same bytes at many places.  Models that merely resemble each other must never count as one.
_SAMPLES, _SAMPLE_BYTES = 64, 2**12
_LEAST_BYTES = 2**16
"""Smaller weights are no model worth telling apart."""


def link_key(weights: Sequence[Path]) -> str:
    """The same for links to the same files; empty if that cannot be told."""
    try:
        found = [(status.st_dev, status.st_ino) for status in (file.stat() for file in weights)]
    except OSError:
        return ""
    return f"file:{sorted(found)}" if found and all(inode for _, inode in found) else ""


def content_keys(weights: Sequence[Path], folder: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """What the weights are, as far as that is known, or from some of their bytes."""
    with contextlib.suppress(OSError, RuntimeError):
        if not weights or sum(file.stat().st_size for file in weights) < _LEAST_BYTES:
            return ()
        known = {record.path: record.sha256 for record in manifest.files} if manifest is not None else {}
        digests = [
            _digest(file) or known.get(os.path.relpath(file, folder).replace(os.sep, "/"), "") for file in weights
        ]
        keys = [f"sha256:{' '.join(sorted(digests))}"] if all(digests) else []
        if all(file.name.lower().endswith(SUFFIX) for file in weights):
            keys.append(f"gguf:{' '.join(sorted(_sampled(file) for file in weights))}")
        return tuple(keys)
    return ()


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name.casefold()}\0{size}\0".encode(errors="surrogateescape"))
    with open_untrusted(file) as reader:
        for at in range(_SAMPLES):
            reader.seek((size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
            digest.update(reader.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def listed_once(entries: Iterable[LibraryEntry]) -> list[LibraryEntry]:
    """The same entries in their order, copies of one model as one that names the others: the user's own before those
    of other programs."""
    groups: list[list[LibraryEntry]] = []
    by_key: dict[str, list[LibraryEntry]] = {}
    for entry in entries:
        keys = () if entry.problem else entry.content
        met = {id(by_key[key]): by_key[key] for key in keys if key in by_key}
        group = next(iter(met.values()), None)
        if group is None:
            group = []
            groups.append(group)
        for other in list(met.values())[1:]:  # of which only this one tells that they are the same
            group += other
            groups.remove(other)
            by_key |= {key: group for key, known in by_key.items() if known is other}
        group.append(entry)
        by_key |= dict.fromkeys(keys, group)
    return [_as_one(group) for group in groups]


def _as_one(group: list[LibraryEntry]) -> LibraryEntry:
    first = min(group, key=lambda entry: (OWN, FOLDER).index(entry.origin) if entry.origin in (OWN, FOLDER) else 2)
    return replace(first, also=tuple((one.origin, one.path) for one in group if one is not first))
