"""The part of a GGUF model that sees: the `mmproj` file beside it, as llama.cpp's converter writes it.

Its tower becomes that of the library's model: a configuration of the whole, and tensors by the names that checkpoints
have for them.  What belongs to another model is refused in a sentence when a picture is sent, and text goes on.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.checkpoint.gguf import SUFFIX
from engine.checkpoint.gguf.arrangements import ARRANGEMENTS
from engine.checkpoint.gguf.file import GgufFile, Strings, read_gguf, read_projector
from engine.checkpoint.headers import TensorEntry
from engine.common.errors import EngineError, ErrorCode
from engine.common.plain_text import plain_line
from engine.common.untrusted import open_untrusted, reason
from engine.families.gguf import Made
from engine.families.gguf.towers import OWN, TOWERS, UNREAD, Tower, common
from engine.families.pictures import SIGHTS

_IN = "clip.vision."
_ENDS_OF_GEMMA4 = {"boi": "<|image>", "eoi": "<image|>"}


@dataclass(frozen=True, slots=True)
class Projector:
    """What a `mmproj` file adds to a language model.

    Attributes:
        config: of the whole, but for what it says about text.
        text: changes of what it says about text.
        is_whole: whether the library's whole model runs the text side, too.
        preprocessor: as its preprocessor_config.json would be.
        tensors: by the names that a checkpoint has for them.
    """

    config: dict[str, Any]
    text: dict[str, Any]
    is_whole: bool
    preprocessor: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def whole_config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the whole, of that of the text side."""
        tied = text.get("tie_word_embeddings", False)
        own = {**text, **self.text}
        if "rope_parameters" in self.text:
            own["rope_parameters"] = {**text.get("rope_parameters", {}), **self.text["rope_parameters"]}
        return {**self.config, "tie_word_embeddings": tied, "text_config": own}

    def whole_tensors(self, text: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
        begins = "model.language_model." if self.is_whole else "model."
        renamed = {
            f"{begins}{key.removeprefix('model.')}" if key.startswith("model.") else key: entry
            for key, entry in text.items()
        }
        return {key: replace(entry, key=key) for key, entry in renamed.items()} | self.tensors


def beside(path: Path) -> Path | None:
    """The `mmproj` file in the folder of a model: of several, that of most bits that is likely to be the model's."""
    try:
        names = sorted(entry.name for entry in os.scandir(path.parent))
    except OSError:
        return None
    found = [name for name in names if "mmproj" in name.lower() and name.lower().endswith(SUFFIX)]
    if not found:
        return None

    def likely(name: str) -> tuple[int, int]:
        bits = next((at for at, kind in enumerate(("bf16", "f16", "f32", "q8")) if kind in name.lower()), 4)
        alike = [one == other for one, other in zip(_bare(name), _bare(path.name), strict=False)]
        return -(alike.index(False) if False in alike else len(alike)), bits

    return path.parent / min(found, key=likely)


def _bare(name: str) -> str:
    return name.lower().replace("mmproj", "").strip("-_.")


def projector_of(model: GgufFile) -> Projector | None:
    """That of a model; `None` if it reads text only, for a reason that `why_not` says."""
    found = _found(model)
    return found if isinstance(found, Projector) else None


def why_not(model: GgufFile) -> str:
    """Why a model reads text only, completing a sentence; empty if it sees."""
    found = _found(model)
    return found if isinstance(found, str) else ""


def _found(model: GgufFile) -> Projector | str:
    file = beside(model.path) if model.open_file is open_untrusted else None
    if file is None:
        return "there is no mmproj file, the part that sees, beside it"
    try:
        status = file.stat()
    except OSError as error:
        return f"{file.name} beside it cannot be read ({reason(error)})"
    return _looked_at(model.path, model.digest, file, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=4)
def _looked_at(path: Path, _digest: str, file: Path, _state: tuple[int, ...]) -> Projector | str:
    """The same of these two files, as they are now."""
    model = read_gguf(path)
    towers = [each for each in TOWERS if model.architecture in each.architectures]
    if not towers:
        return UNREAD.get(
            model.architecture,
            f"how {model.architecture} models see is not known to this version of Switchyard in GGUF files",
        )
    try:
        read = _usual(read_projector(file))
        said = read.metadata
        found = str(said.get(f"{_IN}projector_type", said.get("clip.projector_type")))  # may be arrays
        tower = next((each for each in towers if each.joiner == found), None)
        if tower is None or str(said.get(f"{_IN}projection_dim")) != str(model.value("embedding_length")):
            return f"{file.name} beside it is the part of another model that sees"
        mark = _token(model, tower.mark)
        if mark is None:
            return f"its vocabulary has no {tower.mark}, which stands for pictures in {tower.whole} models"
        return _read(model, _Said(read), tower, mark)
    except EngineError as error:
        return error.message.rstrip(".")


def _usual(file: GgufFile) -> GgufFile:
    """With the names that most converters write, where one has mistaken a tensor for another."""
    tensors, first = dict(file.tensors), file.tensors.get("v.blk.0.ffn_up.weight")
    width, inner = (str(file.metadata.get(f"{_IN}{name}_length")) for name in ("embedding", "feed_forward"))
    changes: dict[str, str] = {}
    # Older files have the two matrices of a layer's MLP under each other's names.
    if first is not None and [*map(str, first.shape)] == [width, inner] != [inner, width]:
        changes |= {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    # Newer ones take Llama 4's second norm for another of Gemma 4's, which has the same name in the library.
    if "v.blk.0.ln2.weight" not in tensors:
        changes["attn_post_norm"] = "ln2"
    renamed = {".".join(changes.get(part, part) for part in name.split(".")): each for name, each in tensors.items()}
    return replace(file, tensors=renamed)


def _read(model: GgufFile, said: _Said, tower: Tower, mark: int) -> Projector:
    vision = {**common(said), **tower.vision(said)}
    preprocessor = {**{name: said.colours(name) for name in ("image_mean", "image_std")}, **tower.preprocessor(said)}
    config = {
        "model_type": tower.whole,
        "vision_config": vision,
        "image_token_id": mark,
        "image_token_index": mark,
        **tower.config(said),
    }
    text: dict[str, Any] = {"model_type": tower.text} if tower.text not in ("", OWN) else {}
    if tower.whole == "gemma3":
        tokens = model.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, Strings)
        placeholder = _token(model, "<image_soft_token>") or len(tokens)
        config |= dict.fromkeys(("image_token_id", "image_token_index"), placeholder)
        config |= {"boi_token_index": mark, "eoi_token_index": _token(model, "<end_of_image>") or mark}
    elif tower.whole == "gemma4":
        config |= {f"{name}_token_id": _token(model, token) or mark for name, token in _ENDS_OF_GEMMA4.items()}
    if tower.text and SIGHTS[tower.whole].axes:
        sections = model.value("rope.dimension_sections")
        if not (isinstance(sections, np.ndarray) and len(sections) >= 3):
            raise _damaged(model, "does not say how pictures rotate (rope.dimension_sections)")
        text["rope_parameters"] = {"mrope_section": [int(each) for each in sections[:3]]}
    return Projector(config, text, bool(tower.text), preprocessor, dict(_tensors(said.file, vision, tower)))


class _Said:
    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{_IN}{name}", default)
        if type(value) is not int or not 0 < value < (2**31 if name.endswith("pixels") else 2**20):
            raise self._senseless(name, value)
        return value

    def real(self, name: str, default: float) -> float:
        value = self.file.metadata.get(f"{_IN}{name}", default)
        if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
            raise self._senseless(name, value)
        return float(value)  # type: ignore[arg-type]

    def listed(self, name: str) -> list[Any]:
        value = self.file.metadata.get(f"{_IN}{name}")
        return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "biu" else []

    def is_set(self, key: str) -> bool:
        return self.file.metadata.get(key) is True

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def shape(self, tensor: str, rank: int) -> tuple[int, ...]:
        entry = self.file.tensors.get(tensor)
        if entry is None or len(entry.shape) != rank:
            raise _damaged(self.file, f"has no {tensor} of {rank} dimensions")
        return entry.shape

    def colours(self, name: str) -> list[float]:
        value = self.file.metadata.get(f"{_IN}{name}")
        if not isinstance(value, np.ndarray) or value.shape != (3,):
            raise self._senseless(name, value)
        return [float(each) for each in value]

    def _senseless(self, name: str, value: object) -> EngineError:
        return _damaged(self.file, f"says {plain_line(str(value))[:60]} of {name}")


def _tensors(file: GgufFile, vision: Mapping[str, Any], tower: Tower) -> Iterator[tuple[str, TensorEntry]]:
    modules = {**tower.modules, **{f"{{layer}}.{ours}": f"v.blk.{{n}}.{its}" for ours, its in tower.layer.items()}}
    needed = {**{f"{ours}.weight": Made("", f"{its}.weight") for ours, its in modules.items()}, **tower.tensors}
    extras = {**{f"{ours}.bias": Made("", f"{its}.bias") for ours, its in modules.items()}, **tower.extras}
    deep = vision.get("deepstack_visual_indexes", [])
    for key, made in (*needed.items(), *(each for each in extras.items() if each[0] not in needed)):
        places = [(at, n) for at, n in enumerate(deep if "{deep}" in key else range(vision["depth"]))]
        for at, n in places if any("{n}" in source for source in made.sources) else [(0, 0)]:
            sources = [source.replace("{n}", str(n)) for source in made.sources]
            missing = next((source for source in sources if source not in file.tensors), None)
            if missing is not None:
                if key in needed:
                    raise _damaged(file, f"lacks {missing}")
                continue
            name = key.replace("{layer}", f"{tower.layers}.{n}").replace("{deep}", str(at))
            name = f"{tower.begins}{name}"
            yield name, replace(ARRANGEMENTS[made.how]([file.tensors[source] for source in sources], vision), key=name)


def _token(model: GgufFile, text: str) -> int | None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Strings):
        return None
    try:
        return next((at for at, token in enumerate(tokens) if token == text), None)
    except UnicodeDecodeError:
        return None


def _damaged(file: GgufFile, what: str) -> EngineError:
    return EngineError(ErrorCode.CHECKPOINT_DAMAGED, f"{file.path} {what}: get another version of the file.")
