"""The model library: one folder per model under `engine.paths.models_dir()`, and what `M` on a command line means."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import CONFIG_NAME, read_config, text_part
from engine.checkpoint.manifest import MANIFEST_NAME, damaged_files, read_manifest
from engine.checkpoint.shards import read_tensors
from engine.checkpoint.staging import discard, is_staging_name
from engine.checkpoint.starter import STARTER_NAME, starter_folder
from engine.errors import EngineError, ErrorCode
from engine.paths import models_dir

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
_EXPERT_COUNT_KEYS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
_EXPERTS_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One model, as a list shows it.

    Attributes:
        name: what to call it; for a directory outside the library, its path.
        family: transformers' `model_type`; empty if unreadable.
        parameters: elements in the weight files; with packed formats (FP8, MXFP4) as stored, scales included.
        bytes_on_disk: of all its files.
        dtype: how the weights are stored (`bfloat16`, ...), as the configuration says.
        experts, experts_per_token: 0 for dense models, or where the configuration does not say in a known way.
        context_tokens: the model's own limit; 0 if it does not say.
        source: where it was made or imported from; empty if it has no manifest.
        problem: one sentence if it cannot be used, else empty.
    """

    name: str
    path: Path
    family: str
    parameters: int
    bytes_on_disk: int
    dtype: str = ""
    experts: int = 0
    experts_per_token: int = 0
    context_tokens: int = 0
    source: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        checked: `sha256` (every byte against the manifest) or `headers` (no manifest: structure and sizes only).
        damaged: file -> what is wrong with it; empty if all is well.
    """

    name: str
    path: Path
    checked: str
    files: int
    damaged: dict[str, str]


def resolve(model: str) -> Path:
    """The checkpoint directory that `model` means: `starter`, a library name, or a directory's path.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `MODEL_UNSUPPORTED` (a GGUF file, a hub id); `CHECKPOINT_UNSAFE` (a pickle).
    """
    if model.strip() == "":
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"No model was named: use `{STARTER_NAME}`, a library name or a folder."
        )
    named = _in_library(model)
    if named is not None:
        return named
    if model == STARTER_NAME:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND,
            "The starter model is not on this machine yet: run `switchyard models pull starter`.",
        )
    return _resolve_path(model)


def starter_is_built() -> bool:
    """Whether the starter is there; whether it is whole is for `verify` to say."""
    folder = starter_folder()
    return (folder / MANIFEST_NAME).is_file() and (folder / CONFIG_NAME).is_file()


def list_models() -> list[LibraryEntry]:
    """Every model in the library, the starter first, then by name; a damaged one with its problem said."""
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
    config: dict[str, Any] = {}
    parameters, problem = 0, ""
    try:
        config = read_config(path)
        parameters = sum(tensor.numel for tensor in read_tensors(path).values())
    except EngineError as error:
        problem = error.message
    text = text_part(config)
    manifest = read_manifest(path)
    return LibraryEntry(
        name=name,
        path=path,
        family=str(config.get("model_type", "")),
        parameters=parameters,
        bytes_on_disk=_bytes_on_disk(path),
        dtype=str(text.get("dtype") or text.get("torch_dtype") or ""),
        experts=_first_count(text, _EXPERT_COUNT_KEYS),
        experts_per_token=_first_count(text, _EXPERTS_PER_TOKEN_KEYS),
        context_tokens=_first_count(text, ("max_position_embeddings", "n_positions", "max_seq_len")),
        source=manifest.source if manifest else "",
        problem=problem,
    )


def verify(
    model: str,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Verification:
    """Compare every byte with the manifest; without one (a directory elsewhere) check structure and sizes.

    Args:
        on_progress: hears `done` of `total` bytes.

    Raises:
        EngineError: as `resolve`.
        RequestCancelled: if `cancelled()` came true.
    """
    path = resolve(model)
    name = path.name if path.parent == models_dir() else str(path)
    manifest = read_manifest(path)
    if manifest is not None:
        damage = damaged_files(path, manifest, on_progress=on_progress, cancelled=cancelled)
        return Verification(name, path, "sha256", len(manifest.files), damage)
    try:
        read_config(path)
        files = {tensor.file for tensor in read_tensors(path).values()}
    except EngineError as error:
        return Verification(name, path, "headers", 0, {str(path): error.message})
    return Verification(name, path, "headers", len(files) + 1, {})


def remove(name: str) -> int:
    """Delete a model from the library; the bytes it took.  Anything outside the library is refused.

    A model that is a link is unlinked; what it points to stays.

    Raises:
        EngineError: `MODEL_NOT_FOUND`; `BUSY` (in use, on systems that lock open files).
    """
    folder = _in_library(name)
    if folder is None:
        if _is_path_like(name) and Path(name).expanduser().exists():
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{name} is not a name in the model library, and nothing outside the library is ever removed.",
            )
        raise _not_in_library(name)
    size = 0 if folder.is_symlink() else _bytes_on_disk(folder)
    try:
        discard(folder)
    except OSError as error:
        code = ErrorCode.BUSY if error.errno in (errno.EBUSY, errno.EACCES) else ErrorCode.INVALID_REQUEST
        raise EngineError(
            code, f"Cannot remove {folder} ({error.strerror or error}): close whatever is using it and try again."
        ) from error
    return size


def check_new_name(name: str) -> None:
    """Whether a model may be called `name`: a plain file name on every platform, not taken, not a reserved word.

    Raises:
        EngineError: `INVALID_REQUEST`.
    """
    if not _NAME.fullmatch(name) or name.split(".")[0].casefold() in _WINDOWS_DEVICES:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{name!r} cannot be a model's name: use up to 100 letters, digits, dots, dashes and underscores.",
        )
    if name.casefold() == STARTER_NAME:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"The name {STARTER_NAME!r} is reserved: choose another (--name).")
    if models_dir().is_dir() and name.casefold() in {entry.name.casefold() for entry in models_dir().iterdir()}:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"The library already has a model called {name!r}: choose another name (--name), or remove that one first.",
        )


def _in_library(name: str) -> Path | None:
    """The library's folder of that name, if it is a plain name and exists."""
    if not _NAME.fullmatch(name) or is_staging_name(name):
        return None
    folder = models_dir() / name
    # A file system that ignores case must not make two names of one model.
    try:
        return folder if folder.is_dir() and name in {entry.name for entry in models_dir().iterdir()} else None
    except OSError:
        return None


def _resolve_path(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"{model!r} is not a usable path ({error}).") from error
    suffix = path.suffix.lower()
    if is_dir:
        if not (path / CONFIG_NAME).is_file():
            raise EngineError(
                ErrorCode.MODEL_NOT_FOUND,
                f"{path} holds no {CONFIG_NAME}, so it is not a model: name the folder that holds "
                f"{CONFIG_NAME} and the safetensors files.",
            )
        return path.resolve()
    if suffix == ".gguf":
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{model} is a GGUF file, which Switchyard cannot run yet: use a folder with safetensors files.",
        )
    if is_file and suffix in _PICKLES:
        raise EngineError(
            ErrorCode.CHECKPOINT_UNSAFE,
            f"{model} is a pickle file, which can run any program when it is opened, so Switchyard never loads one: "
            "use the model's safetensors version.",
        )
    if is_file:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"{model} is a file: name the folder that holds it and its {CONFIG_NAME}."
        )
    if _HUB_ID.fullmatch(model):
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"There is no folder {model}, and Switchyard cannot download models from the Hugging Face hub yet: "
            f"fetch it with `hf download {model} --local-dir FOLDER`, then run `switchyard models import FOLDER`.",
        )
    if _is_path_like(model):
        raise EngineError(ErrorCode.MODEL_NOT_FOUND, f"There is no folder {model}: check the path.")
    raise _not_in_library(model)


def _not_in_library(name: str) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_NOT_FOUND,
        f"There is no model called {name!r} in the library: `switchyard models list` shows what there is, "
        "`switchyard models import PATH` adds one.",
    )


def _is_path_like(model: str) -> bool:
    return any(character in model for character in "/\\~") or model in (".", "..") or Path(model).exists()


def _bytes_on_disk(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue
    return total


def _first_count(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
