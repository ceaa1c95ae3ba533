"""Trains DuoServe's predictor on recorded routes (section 4.2), and stores it as one safetensors file per model."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from engine.common.files import write_private
from engine.common.paths import cache_dir
from engine.experts.prediction.mlp import WIDTHS, ExpertMlp, RoutingStatistics
from engine.experts.replay import RoutingTrace

BATCH = 256
_HELD_BACK = 0.1
"""Share of the tokens, the latest ones, held out for validation."""
_PATIENCE = 3
"""Epochs without improvement before training stops."""
LEAST_TOKENS = 64

_log = logging.getLogger(__name__)
_VERSION = "1"
_HEADER_BYTES = 8
UNREADABLE = "What was learned about this model's experts could not be read; it will be learned again."


@dataclass(frozen=True)
class TrainedMlp:
    """A predictor.

    Attributes:
        widths: of its hidden layers.
        loss: eq. 6 per expert, on the held-out tokens.
    """

    model: ExpertMlp
    statistics: RoutingStatistics
    widths: tuple[int, ...]
    loss: float


class TrainingCancelled(Exception):  # noqa: N818
    """The training was cancelled and has no result."""


def train(
    trace: RoutingTrace,
    *,
    distance: int = 2,
    widths: Sequence[int] = WIDTHS,
    epochs: int = 20,
    learning_rate: float = 1e-3,
    seed: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> TrainedMlp:
    """Trains on the trace, keeping the network with the best loss on the last tenth of it.

    The result is reproducible for the same seed, trace and machine.

    Args:
        distance: layers from the last known one to the predicted one.
        cancelled: polled before every batch.

    Raises:
        TrainingCancelled: `cancelled` returned true.
        ValueError: the trace has too few tokens or layers.
    """
    layers, experts = trace.layers, trace.num_experts
    held_back = _held_back(trace)
    if trace.tokens < LEAST_TOKENS or not 0 < distance < layers:
        raise ValueError("too few routes to learn from")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = torch.from_numpy(trace.experts.astype("int64"))
        training_trace = RoutingTrace(
            trace.experts[:-held_back], trace.weights[:-held_back], trace.sequence_starts, experts
        )
        statistics = RoutingStatistics.of(training_trace, distance)
        model = ExpertMlp(layers, experts, widths)
        optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
        samples = _samples(chosen[:-held_back], distance)
        judged = _judged_samples(trace, distance)
        best_loss, best_state, worse = float("inf"), copy.deepcopy(model.state_dict()), 0
        for _ in range(epochs):
            model.train()
            for batch in _batches(samples[torch.randperm(len(samples))], BATCH):
                if cancelled():
                    raise TrainingCancelled
                if len(batch) < 2:
                    continue  # batch norm needs at least two samples
                optimizer.zero_grad(set_to_none=True)
                loss = _loss(model, statistics, chosen, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            judged_loss = _judge(model, statistics, chosen, judged)
            worse += 1
            if judged_loss < best_loss:
                best_loss, best_state, worse = judged_loss, copy.deepcopy(model.state_dict()), 0
            if worse >= _PATIENCE:
                break
    model.load_state_dict(best_state)
    return TrainedMlp(model.eval(), statistics, tuple(widths), best_loss)


def loss_on(trained: TrainedMlp, trace: RoutingTrace) -> float:
    """Loss on the held-out tokens of this trace, to compare predictors trained on different traces."""
    chosen = torch.from_numpy(trace.experts.astype("int64"))
    samples = _judged_samples(trace, trained.statistics.distance)
    return _judge(trained.model, trained.statistics, chosen, samples)


def paths(chosen: torch.Tensor, last: torch.Tensor, experts: int) -> torch.Tensor:
    """The choices up to the last known layer, in the format of `ExpertMlp`: [B, L * k].

    Args:
        chosen: int64 [B, L, k], -1 for none.
        last: [B], the last known layer.
    """
    layers = chosen.shape[1]
    offsets = torch.arange(layers)[None, :, None]
    known = (chosen >= 0) & (offsets <= last[:, None, None])
    return torch.where(known, chosen + offsets * experts, layers * experts).flatten(1)


def _held_back(trace: RoutingTrace) -> int:
    return max(1, int(trace.tokens * _HELD_BACK))


def _judged_samples(trace: RoutingTrace, distance: int) -> torch.Tensor:
    first = trace.tokens - _held_back(trace)
    return _samples(torch.from_numpy(trace.experts[first:].astype("int64")), distance) + torch.tensor([first, 0])


def _samples(chosen: torch.Tensor, distance: int) -> torch.Tensor:
    """(token, last known layer) of every choice that can be predicted: int64 [N, 2]."""
    routed = (chosen >= 0).any(2)
    return (routed[:, :-distance] & routed[:, distance:]).nonzero()


def _batches(samples: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (samples[first : first + size] for first in range(0, len(samples), size))


def _loss(model: ExpertMlp, statistics: RoutingStatistics, chosen: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    token, layer = batch.unbind(1)
    rows, experts = chosen[token], statistics.experts
    each = torch.arange(len(batch))
    surroundings = statistics.surroundings(layer, rows[each, layer])
    logits = model(paths(rows, layer, experts), surroundings)
    wanted = rows[each, layer + statistics.distance]
    truth = torch.zeros(len(batch), experts + 1).scatter_(1, torch.where(wanted < 0, experts, wanted), 1.0)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, truth[:, :experts])


def _judge(model: ExpertMlp, statistics: RoutingStatistics, chosen: torch.Tensor, samples: torch.Tensor) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch in _batches(samples, 4 * BATCH):
            total += float(_loss(model, statistics, chosen, batch)) * len(batch)
    return total / max(1, len(samples))


def mlp_file(model_key: str) -> Path:
    """File of a model's predictor.

    Args:
        model_key: identifies the model's routing, for example the checkpoint's fingerprint.
    """
    return cache_dir() / "predictors" / f"{hashlib.sha256(model_key.encode()).hexdigest()[:32]}.safetensors"


def save_mlp(trained: TrainedMlp, path: Path) -> None:
    """Writes the predictor, replacing an earlier one.

    Raises:
        OSError: the write failed; the previous file is unchanged.
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
    """Loads the predictor from a file; None if the file does not exist.

    Raises:
        ValueError: the file is damaged, of another version, or for a model of another shape.
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
        with torch.random.fork_rng(devices=[]):  # initialising weights must not advance the global RNG
            model = ExpertMlp(layers, experts, widths)
        model.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise ValueError("weights that are not finite")
        return TrainedMlp(model.eval(), statistics, widths, float(metadata["loss"]))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path.name} is not a predictor of this model ({error})") from error


def load_if_usable(path: Path, layers: int, experts: int) -> tuple[TrainedMlp | None, str | None]:
    """As `load_mlp`, but logs and ignores an unusable file: (None, a sentence for the user)."""
    try:
        return load_mlp(path, layers, experts), None
    except ValueError as error:
        _log.warning("%s: %s", path, error)
        return None, UNREADABLE
