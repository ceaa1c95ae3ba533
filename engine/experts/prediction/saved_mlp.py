"""Trained predictors on disk: one safetensors file for each model, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.prediction.mlp import ExpertMlp, RoutingStatistics
from engine.experts.prediction.training import TrainedMlp

_log = logging.getLogger(__name__)

_VERSION = "1"
_HEADER_BYTES = 8
UNREADABLE = "What was learned about this model's experts could not be read; it will be learned again."


def mlp_file(model_key: str) -> Path:
    """Where the predictor of a model is kept.

    Args:
        model_key: whatever tells this model's routing from any other's, such as the checkpoint's fingerprint.
    """
    return cache_dir() / "predictors" / f"{hashlib.sha256(model_key.encode()).hexdigest()[:32]}.safetensors"


def save_mlp(trained: TrainedMlp, path: Path) -> None:
    """Writes it in place of an earlier one.

    Raises:
        OSError: it could not be written; what was there is still there.
    """
    statistics = trained.statistics
    tensors = {f"model.{name}": value.contiguous() for name, value in trained.model.state_dict().items()}
    tensors["popularity"], tensors["affinity"] = statistics.popularity, statistics.affinity
    metadata = {
        "version": _VERSION,
        "distance": str(statistics.distance),
        "widths": json.dumps(trained.widths),
        "loss": repr(trained.loss),
    }
    write_private(path, save(tensors, metadata))


def load_mlp(path: Path, layers: int, experts: int) -> TrainedMlp | None:
    """The predictor in a file; None where there is none.

    Raises:
        ValueError: what is there is damaged, of another version, or of a model of another shape.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error}") from error
    try:
        tensors = load(content)
        length = int.from_bytes(content[:_HEADER_BYTES], "little")
        metadata = json.loads(content[_HEADER_BYTES : _HEADER_BYTES + length])["__metadata__"]
        if metadata["version"] != _VERSION:
            raise ValueError("another version")
        widths = tuple(int(width) for width in json.loads(metadata["widths"]))
        distance = int(metadata["distance"])
        statistics = RoutingStatistics(distance, tensors.pop("popularity"), tensors.pop("affinity"))
        if statistics.popularity.shape != (layers, experts) or not 0 < distance < layers:
            raise ValueError("another model's shape")
        if statistics.affinity.shape != (layers - distance, experts, experts) or not 0 < len(widths) <= 16:
            raise ValueError("another model's shape")
        with torch.random.fork_rng(devices=[]):  # nobody's dice are thrown for weights that are replaced at once
            model = ExpertMlp(layers, experts, widths)
        model.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise ValueError("numbers that cannot be")
        return TrainedMlp(model.eval(), statistics, widths, float(metadata["loss"]))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path.name} is not a predictor of this model ({error})") from error


def load_or_tell(path: Path, layers: int, experts: int) -> tuple[TrainedMlp | None, str | None]:
    """As `load_mlp`, but a file that is of no use is ignored: (None, a sentence for the user)."""
    try:
        return load_mlp(path, layers, experts), None
    except ValueError as error:
        _log.warning("%s: %s", path, error)
        return None, UNREADABLE
