"""The model library: one folder per model in the models folder, and the meaning of `M` on the command line.

The prepared experts of a checkpoint are stored in the data folder, where they are found again and removed with it.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.config_file import CONFIG_NAME, read_config
from engine.checkpoint.gguf.names import all_parts
from engine.checkpoint.manifest import MANIFEST_NAME, damaged_files, read_manifest
from engine.checkpoint.names import (
    STARTER_NAME,
    in_library,
    is_path_like,
    not_in_library,
    resolve,
    starter_folder,
)
from engine.checkpoint.profile import ModelProfile, read_profile
from engine.checkpoint.shards import read_tensors
from engine.checkpoint.staging import discard
from engine.checkpoint.usage import read_usage, where
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import data_dir, models_dir


def bank_path(directory: Path, precision: str) -> Path:
    """The bank file of a checkpoint directory: in the data folder, as it is as large as the model."""
    return _banks_dir() / f"{directory.name}-{precision}-{where(directory)}.bank"


def banks_of(directory: Path) -> list[Path]:
    """The existing bank files of a checkpoint directory, finished or not, in all precisions."""
    middle = f"-{where(directory)}.bank"
    try:
        return [file for file in _banks_dir().iterdir() if middle in file.name and file.is_file()]
    except OSError:
        return []


def remove_banks(files: list[Path]) -> int:
    """Deletes them and returns the bytes freed.  A file in use stays, on systems that lock open files."""
    freed = 0
    for file in files:
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            file.unlink()
            freed += size
    return freed


def _banks_dir() -> Path:
    return data_dir() / "banks"


OWN = "switchyard"

__all__ = [
    "OWN",
    "LibraryEntry",
    "Verification",
    "list_models",
    "remove",
    "resolve",
    "show",
    "starter_is_built",
    "verify",
]


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One model in a list.

    Attributes:
        name: what to call it; for a directory outside the library, its path.
        family: transformers' `model_type`; empty if unreadable.
        parameters: of the whole model, not only the active ones.
        bytes_on_disk: of all its files.
        dtype: how the weights are stored (`bfloat16`, `fp8`, ...), as the configuration says.
        experts, experts_per_token: 0 for dense models, or if the configuration does not give them.
        context_tokens: the model's own limit; 0 if unknown.
        source: where it was built or imported from; empty if it has no manifest.
        problem: one sentence if it is unusable, otherwise empty.
        origin: whose it is: `switchyard` (in the library), `folder` (the user's own, in one of the model folders or at
            a path), or the program in whose store it lies: `hub cache`, `LM Studio`, `Ollama`, `Jan`, `GPT4All`.
        bank_bytes: of its prepared experts, in all precisions.
        last_used: when it was last loaded or answered on this machine, in seconds since the epoch.
        measured_tokens_per_s: the median decode speed of its last answers on this machine.
        precision_words: how the weights are stored, for people: `Q4_K`, `GPTQ`, `bf16`.
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
    bank_bytes: int = 0
    last_used: float | None = None
    measured_tokens_per_s: float | None = None
    precision_words: str = ""

    @property
    def is_in_place(self) -> bool:
        """Whether it is used where it lies and does not belong to the library."""
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
        damaged: file -> its defect; empty if all is well.
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


def look_around(*, within_s: float = 10.0, cancelled: Callable[[], bool] = lambda: False) -> Listing:  # noqa: ARG001
    """All models of this machine: the library's, those in other model folders, those of other programs.

    Folders on a slow network may take as long as `within_s`: not for the thread that draws a window.
    """
    return Listing(tuple(list_models()))


def list_models() -> list[LibraryEntry]:
    """All models in the library, the starter first, then by name; damaged ones with their problem."""
    try:
        folders = [folder for folder in models_dir().iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"Cannot read the model library {models_dir()} ({error.strerror or error})."
        ) from error
    folders.sort(key=lambda folder: (folder.name != STARTER_NAME, folder.name.casefold()))
    return [describe(folder, folder.name) for folder in folders]


def show(model: str) -> LibraryEntry:
    """One model, in the library or at a path.

    Raises:
        EngineError: as `resolve`.
    """
    path = resolve(model)
    return describe(path, path.name if path.parent == models_dir() else str(path))


def describe(path: Path, name: str) -> LibraryEntry:
    """The entry of the model at `path`; reads its configuration and the headers of its weights only."""
    manifest = read_manifest(path)
    source = manifest.source if manifest else ""
    usage = read_usage(path)
    size = _bytes_on_disk(path)
    try:
        profile = read_profile(path)
    except EngineError as error:
        return LibraryEntry(name, path, bytes_on_disk=size, source=source, problem=error.message)
    return LibraryEntry(
        name=name,
        path=path,
        family=profile.family,
        parameters=profile.parameters,
        bytes_on_disk=size,
        dtype=profile.quantization or profile.dtype,
        experts=profile.experts,
        experts_per_token=profile.experts_per_token,
        context_tokens=profile.context_tokens,
        source=source,
        bank_bytes=sum(file.stat().st_size for file in banks_of(path)),
        last_used=usage.last_used,
        measured_tokens_per_s=usage.measured_tokens_per_s,
        precision_words=_precision_words(profile),
    )


def _precision_words(profile: ModelProfile) -> str:
    stored = profile.quantization or profile.dtype
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "compressed-tensors": "compressed tensors"}
    return short.get(stored, stored if stored == "fp8" else stored.upper())


def verify(
    model: str,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Verification:
    """Compare every byte with the manifest; without one (a directory elsewhere) check structure and sizes.

    Args:
        on_progress: called with `done` and `total` bytes.

    Raises:
        EngineError: as `resolve`.
        RequestCancelled: `cancelled()` returned true.
    """
    path = resolve(model)
    name = path.name if path.parent == models_dir() else str(path)
    manifest = read_manifest(path)
    if manifest is not None:
        damage = damaged_files(path, manifest, on_progress=on_progress, cancelled=cancelled)
        return Verification(name, path, "sha256", len(manifest.files), damage)
    try:
        read_config(path)
        files = {file for tensor in read_tensors(path).values() for file in tensor.files}
    except EngineError as error:
        return Verification(name, path, "headers", 0, {str(path): error.message})
    return Verification(name, path, "headers", len(files) + (path / CONFIG_NAME).is_file(), {})


def remove(name: str) -> int:
    """Deletes a model from the library with its prepared experts; returns the bytes freed.

    Anything outside the library is refused.  A model that is a symbolic link is unlinked; its target stays.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `BUSY` (in use, on systems that lock open files).
    """
    folder = in_library(name)
    if folder is None:
        if is_path_like(name) and Path(name).expanduser().exists():
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{name} is not a model in the library; nothing outside the library is ever removed.",
            )
        raise not_in_library(name)
    size = 0 if folder.is_symlink() else _bytes_on_disk(folder)
    banks = [] if folder.is_symlink() else banks_of(folder)  # look them up before the path is gone
    try:
        discard(folder)
    except OSError as error:
        code = ErrorCode.BUSY if error.errno in (errno.EBUSY, errno.EACCES) else ErrorCode.INVALID_REQUEST
        raise EngineError(
            code, f"Cannot remove {folder} ({error.strerror or error}): close whatever is using it and try again."
        ) from error
    return size + remove_banks(banks)


def _bytes_on_disk(path: Path) -> int:
    total = 0
    for file in path.rglob("*") if path.is_dir() else all_parts(path):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total
