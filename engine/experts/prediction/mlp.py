"""DuoServe's predictor (section 4): its state and network, trained on recorded routes while the machine is idle.

Training runs in a separate low-priority process that can be killed at any time.  A process rather than a thread, so
that a decode step never waits for the GIL and all memory is freed when it ends:

    python -m engine.experts.prediction.mlp ROUTES.npz PREDICTOR.safetensors OPTIONS
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils.fusion import fuse_linear_bn_eval

from engine.common.files import private_folder, write_private
from engine.common.paths import cache_dir, python_module
from engine.experts.prediction.predictors import Ranked
from engine.experts.replay import RoutingTrace, read_trace, write_trace

_log = logging.getLogger(__name__)

WIDTHS = (2048, 1024, 512, 256, 128, 64)
"""Widths of the hidden layers; seven layers with the output."""
DROPOUT = 0.1


@dataclass(frozen=True)
class RoutingStatistics:
    """Statistics of a model's routing in a trace.

    Attributes:
        distance: layers from the last known one to the predicted one; 1 in the paper.
        popularity: fp32 [L, E], eq. 2: P_l(i), the share of layer l's choices that were expert i.
        affinity: fp32 [L - distance, E, E], eq. 3: A_l(i, j), the share of j among the choices in layer l + distance
            of tokens that chose i in layer l.  Rows of experts that were never chosen are 0.
    """

    distance: int
    popularity: torch.Tensor
    affinity: torch.Tensor

    @classmethod
    def of(cls, trace: RoutingTrace, distance: int) -> RoutingStatistics:
        """Computes the statistics of a trace."""
        layers, experts = trace.layers, trace.num_experts
        popularity = torch.zeros(layers, experts)
        affinity = torch.zeros(max(0, layers - distance), experts, experts)
        before = [_multi_hot(trace.experts[:, layer], experts) for layer in range(min(distance, layers))]
        for layer in range(layers):
            chosen = before[layer] if layer < len(before) else _multi_hot(trace.experts[:, layer], experts)
            if layer >= len(before):
                before.append(chosen)
            popularity[layer] = _shares(chosen.sum(0))
            if layer >= distance:
                affinity[layer - distance] = _shares(before[layer - distance].T @ chosen)
                before[layer - distance] = torch.zeros(0)  # not needed again
        return cls(distance, popularity, affinity)

    @property
    def layers(self) -> int:
        return int(self.popularity.shape[0])

    @property
    def experts(self) -> int:
        return int(self.popularity.shape[1])

    def surroundings(self, layer: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The part of the state other than the path: [B, 2E].

        Popularity of the predicted layer's experts, and their mean affinity to the experts chosen in this layer; both
        as multiples of a uniform share, so that they are of the order of 1.

        Args:
            layer: [B], the last known layer.
            chosen: [B, k], its experts, -1 for none.
        """
        real = (chosen >= 0).float()
        rows = self.affinity[layer[:, None], chosen.clamp(min=0)]
        affinity = (rows * real[:, :, None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return torch.cat([self.popularity[layer + self.distance], affinity], dim=1) * self.experts


class ExpertMlp(nn.Module):
    """State -> a logit for each expert of the predicted layer.

    The path so far is a set of (layer, expert) pairs, one input each.  The first layer sums their embeddings, so the
    cost depends only on the number of pairs, and only their list needs padding.

    Args:
        layers, experts: of the model.
        widths: of the hidden layers.
    """

    def __init__(self, layers: int, experts: int, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.padding = layers * experts
        self.path = nn.EmbeddingBag(layers * experts + 1, widths[0], mode="sum", padding_idx=self.padding)
        nn.init.uniform_(self.path.weight, -0.05, 0.05)
        with torch.no_grad():
            self.path.weight[self.padding] = 0
        self.surroundings = nn.Linear(2 * experts, widths[0])
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.out = nn.Linear(widths[-1], experts)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, path: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """path: int64 [B, any], layer * E + expert, padded with `padding`; surroundings: [B, 2E] -> [B, E]."""
        state = self.path(path) + self.surroundings(surroundings)
        for index, norm in enumerate(self.norms):
            state = self.dropout(torch.relu(norm(state)))
            if index < len(self.hidden):
                state = self.hidden[index](state)
        logits: torch.Tensor = self.out(state)
        return logits


def _multi_hot(chosen: NDArray[np.int16], experts: int) -> torch.Tensor:
    """int [T, k] with -1 for none -> fp32 [T, E]."""
    index = torch.from_numpy(chosen.astype(np.int64))
    marks = torch.zeros(len(index), experts + 1)
    marks.scatter_(1, torch.where(index < 0, experts, index), 1.0)
    return marks[:, :experts]


def _shares(counts: torch.Tensor) -> torch.Tensor:
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


_BATCH = 256
_HELD_BACK = 0.1
"""Share of the tokens, the latest ones, held out for validation."""
_PATIENCE = 3
"""Epochs without improvement before training stops."""
_LEAST_TOKENS = 64

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


def train(
    trace: RoutingTrace,
    *,
    distance: int = 2,
    widths: Sequence[int] = WIDTHS,
    epochs: int = 20,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> TrainedMlp:
    """Trains on the trace, keeping the network with the best loss on the last tenth of it.

    The result is reproducible for the same seed, trace and machine.

    Args:
        distance: layers from the last known one to the predicted one.

    Raises:
        ValueError: the trace has too few tokens or layers.
    """
    layers, experts = trace.layers, trace.num_experts
    held_back = _held_back(trace)
    if trace.tokens < _LEAST_TOKENS or not 0 < distance < layers:
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
            for batch in _batches(samples[torch.randperm(len(samples))], _BATCH):
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
        for batch in _batches(samples, 4 * _BATCH):
            total += float(_loss(model, statistics, chosen, batch)) * len(batch)
    return total / max(1, len(samples))


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


def load_mlp(path: Path, layers: int, experts: int) -> tuple[TrainedMlp | None, str | None]:
    """The predictor in a file, if there is one; a sentence for the user if that is damaged or of another model."""
    try:
        content = path.read_bytes()
        tensors = load(content)
        length = int.from_bytes(content[:_HEADER_BYTES], "little")
        metadata = json.loads(content[_HEADER_BYTES : _HEADER_BYTES + length])["__metadata__"]
        if metadata["version"] != _VERSION:
            raise ValueError("another version")
        widths = tuple(int(width) for width in json.loads(metadata["widths"]))
        distance = int(metadata["distance"])
        statistics = RoutingStatistics(distance, tensors.pop("popularity"), tensors.pop("affinity"))
        if (
            statistics.popularity.shape != (layers, experts)
            or not 0 < distance < layers
            or statistics.affinity.shape != (layers - distance, experts, experts)
            or not 0 < len(widths) <= 16
        ):
            raise ValueError("another model's shape")
        with torch.random.fork_rng(devices=[]):  # initialising weights must not advance the global RNG
            model = ExpertMlp(layers, experts, widths)
        model.load_state_dict({name.removeprefix("model."): value for name, value in tensors.items()})
        if not all(bool(value.isfinite().all()) for value in model.state_dict().values()):
            raise ValueError("weights that are not finite")
        return TrainedMlp(model.eval(), statistics, widths, float(metadata["loss"])), None
    except FileNotFoundError:
        return None, None
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        RecursionError,
        MemoryError,
    ) as error:
        _log.warning("%s is not a predictor of this model (%s)", path, error)
        return None, UNREADABLE


_Job = tuple[int, int, torch.Tensor, torch.Tensor]
_EWMA_WEIGHT = 0.05


class MlpPredictor:
    """Predicts with a trained network.  An answer that comes too late is dropped.  Close it when done."""

    name = "mlp"
    learns = False  # `observe` does not train it

    def __init__(self, trained: TrainedMlp, limit: int) -> None:
        statistics = trained.statistics
        self._statistics = statistics
        self._layers, self._experts = statistics.layers, statistics.experts
        self._limit = min(limit, self._experts)
        self._network = FoldedMlp(trained.model)
        self._path: list[int] = []
        self._last = -1
        self._step = 0
        self._answers: dict[int, tuple[int, Ranked]] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self.beside_s = 0.0
        self._thread = threading.Thread(target=self._work, name="expert-predictor", daemon=True)
        self._thread.start()

    @property
    def distance(self) -> int:
        """Layers from the last known one to the predicted one."""
        return self._statistics.distance

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:  # noqa: ARG002
        if layer <= self._last:
            self._step += 1
            self._path = []
        self._last = layer
        first = layer * self._experts
        self._path += [first + expert for expert in experts]
        target = layer + self._statistics.distance
        # If the last prediction is still running, skip this one: neither wait nor queue behind it.
        if target < self._layers and experts and self._idle.is_set():
            self._idle.clear()
            chosen = torch.tensor(experts)[None]
            self._jobs.put((self._step, layer, torch.tensor(self._path), chosen))

    def predict(self, layer: int) -> Ranked:
        step, ranked = self._answers.get(layer, (-1, ()))
        return ranked if step == self._step and layer > self._last else ()

    def wait(self) -> None:
        """Blocks until the last request has been answered."""
        self._idle.wait()

    def close(self) -> None:
        """Ends the thread.  Idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._answer(*job)
            except (RuntimeError, MemoryError) as error:  # out of memory, for example: do without the prediction
                _log.warning("experts could not be predicted: %s", error)
            finally:
                self._idle.set()

    def _answer(self, step: int, layer: int, path: torch.Tensor, chosen: torch.Tensor) -> None:
        begun_s = time.thread_time()
        surroundings = self._statistics.surroundings(torch.tensor([layer]), chosen)
        values, best = self._network(path, surroundings[0]).topk(self._limit)
        ranked = list(zip(best.tolist(), values.tolist(), strict=True))
        self._answers[layer + self._statistics.distance] = step, ranked
        took_s = time.thread_time() - begun_s
        self.beside_s += (_EWMA_WEIGHT if self.beside_s else 1.0) * (took_s - self.beside_s)


class FoldedMlp:
    """The network for inference on single states, with each batch norm folded into the layer before it."""

    @torch.no_grad()
    def __init__(self, model: ExpertMlp) -> None:
        layers = [model.surroundings, *model.hidden]
        self._layers = [fuse_linear_bn_eval(*pair) for pair in zip(layers, model.norms, strict=True)]  # type: ignore[arg-type]
        norm = model.norms[0]
        self._path = model.path.weight * norm.weight * (norm.running_var + norm.eps).rsqrt()  # type: ignore[operator]
        self._out = model.out

    @torch.no_grad()
    def __call__(self, path: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """path: int64 [any], no padding; surroundings: [2E] -> probabilities [E]."""
        first, *others = self._layers
        state = first(surroundings).add_(self._path[path].sum(0)).relu_()
        for layer in others:
            state = layer(state).relu_()
        probabilities: torch.Tensor = self._out(state).sigmoid_()
        return probabilities


_LEAST_STEPS = 512


class RecordedRoutes:
    """A ring buffer of the routes of single tokens.  Stores expert numbers only, no text.

    Args:
        layers, experts, per_token: of the model.
        capacity: steps to keep.
    """

    def __init__(self, layers: int, experts: int, per_token: int, capacity: int = 4096) -> None:
        self._experts = experts
        self._ring: NDArray[np.int16] = np.full((capacity, layers, per_token), -1, np.int16)
        self._row: NDArray[np.int16] = np.full((layers, per_token), -1, np.int16)
        self._seen = 0
        self._lock = threading.Lock()
        self.steps = 0

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """Records one layer of a decode step; skips steps of several tokens and steps with missing layers."""
        if layer == 0:
            self._seen = 0
        if layer != self._seen or len(experts) != self._row.shape[1]:
            self._seen = -1  # until the next step begins
            return
        self._row[layer] = experts
        self._seen += 1
        if self._seen == self._row.shape[0]:
            with self._lock:
                self._ring[self.steps % len(self._ring)] = self._row
                self.steps += 1

    def trace(self) -> RoutingTrace | None:
        """The recorded steps, oldest first; None if there are none.  Thread-safe."""
        with self._lock:
            kept = min(self.steps, len(self._ring))
            rows = np.roll(self._ring, -(self.steps % len(self._ring)), axis=0)[len(self._ring) - kept :]
        if not kept:
            return None
        starts = np.array([0, kept], np.int64)
        return RoutingTrace(rows, np.zeros(rows.shape, np.float16), starts, self._experts)


class Learning:
    """Records routes, trains the predictor of one target's layers, one training at a time, and loads what came out.

    Args:
        model_key: identifies the model's routing, for example the checkpoint's fingerprint; names the layers if a model
            has several targets.
        limit: experts to predict.
        least_steps: decode steps needed for a training, and new steps needed before the next one.
        widths, epochs: see `train`.

    Attributes:
        path: the trained predictor's file, written atomically.
        note: a sentence for the user if that is unusable.
    """

    def __init__(
        self,
        model_key: str,
        *,
        layers: int,
        experts: int,
        per_token: int,
        limit: int,
        least_steps: int = _LEAST_STEPS,
        widths: Sequence[int] = WIDTHS,
        epochs: int = 20,
    ) -> None:
        self.routes = RecordedRoutes(layers, experts, per_token)
        self.path = cache_dir() / "predictors" / f"{hashlib.sha256(model_key.encode()).hexdigest()[:32]}.safetensors"
        self.note: str | None = None
        self._layers, self._experts, self._limit = layers, experts, limit
        self._least_steps = least_steps
        self._trained_steps = 0
        self._options = {"widths": list(widths), "epochs": epochs}
        self._child: subprocess.Popen[bytes] | None = None
        self._trace: Path | None = None
        self._predictors: list[MlpPredictor] = []

    @property
    def is_training(self) -> bool:
        """Whether a training was started and `finished` has not seen its end."""
        return self._child is not None

    def load(self) -> MlpPredictor | None:
        """The predictor that was trained last; None if there is none or it is unusable, which `note` then explains."""
        trained, self.note = load_mlp(self.path, self._layers, self._experts)
        if trained is None:
            return None
        self._predictors.append(MlpPredictor(trained, self._limit))
        return self._predictors[-1]

    def begin(self, ahead: int) -> bool:
        """Starts a training if enough new steps have been recorded since the last; whether it was started.

        Args:
            ahead: prefetch distance in layers.  It is trained for one more, because inference takes time.
        """
        if self._child is not None or self.routes.steps - self._trained_steps < self._least_steps:
            return False
        trace = self.routes.trace()
        if trace is None:
            return False
        options = {**self._options, "distance": min(ahead + 1, self._layers - 1)}
        try:
            private_folder(self.path.parent)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".routes-", suffix=".npz")
            os.close(handle)
            self._trace = Path(name)
            write_trace(trace, self._trace)
            command, variables = python_module("engine.experts.prediction.mlp")
            self._child = subprocess.Popen(
                [*command, name, str(self.path), json.dumps(options)],
                stdin=subprocess.PIPE,  # closed when this process ends, even by a crash, which ends the child
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **variables},
            )
        except OSError as error:
            _log.warning("could not start training the expert predictor: %s", error)
            self._clean_up()
            return False
        with contextlib.suppress(psutil.Error, OSError):
            psutil.Process(self._child.pid).nice(getattr(psutil, "IDLE_PRIORITY_CLASS", 19))
        self._trained_steps = self.routes.steps
        return True

    def finished(self) -> MlpPredictor | None:
        """The new predictor, if a training has succeeded since the last call."""
        if self._child is None or (code := self._child.poll()) is None:
            return None
        self._end(self._child)
        if code:
            _log.warning("training the expert predictor failed with exit code %d", code)
            return None
        outdated, self._predictors = self._predictors, []
        trained = self.load()
        for predictor in outdated:
            predictor.close()
        return trained

    def wait(self) -> None:
        """Blocks until no training is running; `finished` then returns its result."""
        if self._child is not None:
            self._child.wait()

    def close(self) -> None:
        """Kills a running training, which leaves the previous predictor, and ends threads.  Idempotent."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._end(self._child)
        for predictor in self._predictors:
            predictor.close()
        self._predictors = []

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is not None:
            child.stdin.close()
        self._child = None
        self._clean_up()

    def _clean_up(self) -> None:
        """Deletes the trace, and files that a killed child has left incomplete."""
        leftovers = [self._trace] if self._trace is not None else []
        for leftover in (*leftovers, *self.path.parent.glob(f".{self.path.name}-*")):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        self._trace = None


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 3 if there is too little to learn from."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    trace_file, target, options = arguments
    try:
        trace = read_trace(Path(trace_file))
        trained = train(trace, **json.loads(options))
    except ValueError:
        return 3
    # An earlier predictor may be better, having seen more steps than the ring buffer still has.
    earlier, _ = load_mlp(Path(target), trace.layers, trace.num_experts)
    if (
        earlier is None
        or earlier.statistics.distance != trained.statistics.distance
        or loss_on(earlier, trace) > trained.loss
    ):
        save_mlp(trained, Path(target))
    return 0


def _end_with_parent() -> None:
    """Exits at end of file on stdin, which happens however the parent process ends."""
    while os.read(0, 4096):  # not `sys.stdin`, whose lock would block the interpreter's shutdown
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
