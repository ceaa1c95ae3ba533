"""Models made for embeddings: how a text becomes one vector, as sentence-transformers' files or a GGUF header say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.checkpoint.config_file import MAX_CONFIG_BYTES, read_json
from engine.checkpoint.gguf import gguf_at
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import quoted
from engine.common.untrusted import parse_json, read_untrusted

Pooling = Literal["cls", "mean", "last"]
"""Which hidden states of the last layer count: the first token's, the mean of all, or the last one's."""

MODULES = "modules.json"
_SETTINGS, _LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
_OF_EMBEDDING = re.compile(
    rf"{re.escape(MODULES)}|{re.escape(_SETTINGS)}|{re.escape(_LENGTH)}|\d+_[A-Za-z]+/(?:config\.json|model\.safetensors)"
)
PART_FOLDER = re.compile(r"\d+_[A-Za-z]+")
_GGUF_POOLING: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
"""llama.cpp's `llama_pooling_type`; 0 is none, and 4 ranks pairs of texts."""
_POOLING: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a model embeds.

    Attributes:
        most_tokens: of a text; 0: as many as the model's positions.
        dense: folders of linear layers behind the pooling, in order.
        prompt: what is put before a text for which no other is asked.
    """

    pooling: Pooling
    normalises: bool = True
    most_tokens: int = 0
    dense: tuple[Path, ...] = ()
    prompt: str = ""


def is_of_embedding(name: str) -> bool:
    return _OF_EMBEDDING.fullmatch(name) is not None


def embedding_of(path: Path) -> Embedding | None:
    """How the model at a path embeds; `None` if it was not made for that.

    Raises:
        EngineError: `CHECKPOINT_DAMAGED`, or `MODEL_UNSUPPORTED` if it embeds in a way that is not known here.
    """
    gguf = gguf_at(path)
    if gguf is not None:
        return _of_gguf(gguf)
    if not (path / MODULES).is_file():
        return None
    found: dict[str, Any] = {"normalises": False}
    dense: list[Path] = []
    for kind, folder in _modules(path):
        if kind == "Pooling":
            found["pooling"] = _pooling(path, read_json(folder / "config.json", MAX_CONFIG_BYTES))
        elif kind == "Dense":
            dense.append(folder)
        elif kind == "Normalize":
            found["normalises"] = True
        elif kind != "Transformer":
            raise _unknown(path, f"a part of the kind {quoted(kind[:40])}")
    if "pooling" not in found:
        raise _unknown(path, "no pooling")
    length = read_json(path / _LENGTH, MAX_CONFIG_BYTES).get("max_seq_length") if (path / _LENGTH).is_file() else None
    settings = read_json(path / _SETTINGS, MAX_CONFIG_BYTES) if (path / _SETTINGS).is_file() else {}
    prompts, default = settings.get("prompts"), settings.get("default_prompt_name")
    prompt = prompts.get(default) if isinstance(prompts, dict) and isinstance(default, str) else ""
    return Embedding(
        found["pooling"],
        found["normalises"],
        length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else 0,
        tuple(dense),
        prompt if isinstance(prompt, str) else "",
    )


def how_it_embeds(path: Path) -> Embedding:
    """As `embedding_of`.

    Raises:
        EngineError: `INVALID_REQUEST` for a model that was not made for that, and as there.
    """
    found = embedding_of(path)
    if found is None:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"{path.name} is a chat model, which makes no embeddings: ask for a model that is made for them.",
        )
    return found


def refuse_embedding(path: Path) -> None:
    """Raises EngineError `MODEL_UNSUPPORTED` if a model that is to chat was made for embeddings."""
    if embedding_of(path) is not None:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"{path.name} is made for embeddings and does not chat: choose another model here. Programs get its "
            "vectors from `switchyard serve` at /v1/embeddings.",
        )


def _of_gguf(gguf: Path) -> Embedding | None:
    from engine.checkpoint.gguf.file import read_gguf  # imports numpy, which others do not need

    said = read_gguf(gguf).metadata
    kind = said.get(f"{said.get('general.architecture')}.pooling_type")
    pooling = _GGUF_POOLING.get(int(kind)) if isinstance(kind, int) else None
    return Embedding(pooling) if pooling is not None else None


def _modules(path: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each part, in order."""
    try:
        listed = parse_json(read_untrusted(path / MODULES, MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise _damaged(path / MODULES, f"cannot be read ({str(error)[:80]})") from None
    found: list[tuple[str, Path]] = []
    for each in listed if isinstance(listed, list) else [None]:
        kind, folder = (each.get("type"), each.get("path")) if isinstance(each, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or (folder and not PART_FOLDER.fullmatch(folder)):
            raise _damaged(path / MODULES, "is no list of parts with a type and a path")
        found.append((kind.rpartition(".")[2], path / folder))
    return found


def _pooling(path: Path, said: dict[str, Any]) -> Pooling:
    wanted = [name for name, is_set in said.items() if name.startswith("pooling_mode_") and is_set is True]
    named = said.get("pooling_mode")
    if isinstance(named, str):
        wanted = [f"pooling_mode_{named}", f"pooling_mode_{named}_tokens", f"pooling_mode_{named}_token"]
        wanted = [name for name in wanted if name in _POOLING]
    if len(wanted) == 1 and wanted[0] in _POOLING:
        return _POOLING[wanted[0]]
    raise _unknown(path, "a pooling other than of the first token, the last one, or the mean of all")


def _damaged(file: Path, what: str) -> EngineError:
    return EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file} {what}: download the model again.")


def _unknown(path: Path, what: str) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_UNSUPPORTED, f"{path.name} makes embeddings with {what}, which Switchyard does not know."
    )
