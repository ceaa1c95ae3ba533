"""`synthetic:NAME?layers=4` on a bench's command line: the checkpoint is created once and cached."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from engine.bench.synthetic.shapes import SHAPES, Shape, config_of, tensors_of
from engine.bench.synthetic.tokenizer import write_tokenizer
from engine.bench.synthetic.weights import RandomWeights
from engine.checkpoint.library import resolve
from engine.checkpoint.safetensors_numpy import write_safetensors
from engine.checkpoint.staging import put_in_place, staging_folder
from engine.common.errors import EngineError, ErrorCode
from engine.common.files import disk_errors_explained, require_space
from engine.common.paths import cache_dir

_PREFIX = "synthetic:"
_FORMAT = 2
"""Part of the folder's name: increase it when the weights of a shape change."""
_SMALLEST = {"layers": 1, "vocab": 259, "experts": 1}
_LARGEST = {"layers": 1000, "vocab": 2**20, "experts": 4096}


def is_synthetic(model: str) -> bool:
    """Whether this names a synthetic model."""
    return model.startswith(_PREFIX)


def resolve_model(model: str, say: Callable[[str], None]) -> Path:
    """The checkpoint directory of a bench's model: as elsewhere, or a synthetic one.

    Raises:
        EngineError: as `engine.checkpoint.library.resolve` and `make_synthetic`.
    """
    return make_synthetic(model, say) if is_synthetic(model) else resolve(model)


def make_synthetic(model: str, say: Callable[[str], None] = lambda _text: None) -> Path:
    """The checkpoint directory of `synthetic:NAME`, created if missing.

    Args:
        model: `synthetic:NAME?option=number&...`; the options are `layers`, `vocab` and `experts`.
        say: called with progress messages.

    Raises:
        EngineError: `MODEL_NOT_FOUND` if no such shape is known, `INVALID_REQUEST` for an option that makes no sense,
            `DISK_FULL`.
    """
    name, shape = _parse(model)
    folder = cache_dir() / "synthetic" / f"{name}-v{_FORMAT}"
    if (folder / "config.json").is_file():
        return folder
    nbytes = 2 * _parameters(shape)
    say(f"making {name} with random weights in {folder.parent}: {nbytes / 1e9:.1f} GB, cached")
    with disk_errors_explained(folder.parent), staging_folder(folder.parent) as staged:
        require_space(folder.parent, nbytes)
        _write(staged, shape)
        if not folder.exists():  # another process may have created it meanwhile
            put_in_place(staged, folder)
    return folder


def _parse(model: str) -> tuple[str, Shape]:
    """The folder's name and the shape."""
    name, _, query = model.removeprefix(_PREFIX).partition("?")
    shape = SHAPES.get(name)
    if shape is None:
        raise EngineError(
            ErrorCode.MODEL_NOT_FOUND, f"There is no synthetic model {name!r}: use one of {', '.join(SHAPES)}."
        )
    options: dict[str, int] = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        usable = key in _SMALLEST and value.isascii() and value.isdecimal() and len(value) < 10
        if not usable or not _SMALLEST[key] <= int(value) <= _LARGEST[key]:
            raise EngineError(
                ErrorCode.INVALID_REQUEST,
                f"{part!r} is not an option of a synthetic model: use for example {_PREFIX}{name}?layers=4&vocab=8192.",
            )
        options[key] = int(value)
    shape = shape.changed(**options)
    if shape.experts < shape.top_k:
        raise EngineError(
            ErrorCode.INVALID_REQUEST, f"A token of {name} uses {shape.top_k} experts, so it needs at least that many."
        )
    return "-".join([name, *(f"{key}{value}" for key, value in sorted(options.items()))]), shape


def _parameters(shape: Shape) -> int:
    return sum(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)


def _write(folder: Path, shape: Shape) -> None:
    largest = max(math.prod(spec.shape) for specs in tensors_of(shape) for spec in specs)
    weights, files = RandomWeights(largest), shape.layers + 2
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(tensors_of(shape), start=1):
        file = f"model-{number:05}-of-{files:05}.safetensors"
        write_safetensors(folder / file, {spec.name: weights.fill(spec) for spec in specs})
        weight_map |= dict.fromkeys((spec.name for spec in specs), file)
    index = {"metadata": {"total_size": 2 * _parameters(shape)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", encoding="utf-8")
