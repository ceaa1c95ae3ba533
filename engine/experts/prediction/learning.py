"""Life cycle of the trained predictor: loaded if there is one, retrained while the machine is idle, then replaced.

Training runs in a separate low-priority process that can be killed at any time.  A process rather than a thread, so
that a decode step never waits for the GIL and all memory is freed when it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.common.files import private_folder
from engine.common.paths import python_module
from engine.experts.prediction.mlp import WIDTHS, ExpertMlp
from engine.experts.prediction.predictors import Ranked
from engine.experts.prediction.training import TrainedMlp, load_if_usable, mlp_file
from engine.experts.replay import RoutingTrace, write_trace

_log = logging.getLogger(__name__)

_Job = tuple[int, int, torch.Tensor, torch.Tensor]
_EWMA_WEIGHT = 0.05


class MlpPredictor:
    """Predicts with a trained network.  An answer that comes too late is dropped.  Close it when done.

    Args:
        limit: experts to predict.
    """

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
        norms = [_affine(norm) for norm in model.norms]
        scale, shift = norms[0]
        first = model.surroundings
        self._path = model.path.weight * scale
        self._layers = [(first.weight * scale[:, None], first.bias * scale + shift)]
        for layer, (scale, shift) in zip(model.hidden, norms[1:], strict=True):
            assert isinstance(layer, nn.Linear)
            self._layers.append((layer.weight * scale[:, None], layer.bias * scale + shift))
        self._out = model.out.weight.detach().clone(), model.out.bias.detach().clone()

    @torch.no_grad()
    def __call__(self, path: torch.Tensor, surroundings: torch.Tensor) -> torch.Tensor:
        """path: int64 [any], no padding; surroundings: [2E] -> probabilities [E]."""
        (weight, bias), *others = self._layers
        state = torch.addmv(bias, weight, surroundings).add_(self._path[path].sum(0)).relu_()
        for weight, bias in others:
            state = torch.addmv(bias, weight, state).relu_()
        weight, bias = self._out
        return torch.addmv(bias, weight, state).sigmoid_()


def _affine(norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    return scale, norm.bias - norm.running_mean * scale


_LOW_PRIORITY: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "IDLE_PRIORITY_CLASS", 0)} if os.name == "nt" else {}
)
_LEAST_STEPS = 512
"""Decode steps needed for a training, and new steps needed before the next one."""


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


class TrainingState(Enum):
    """State of a training."""

    NONE = "none"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class BackgroundTraining:
    """At most one training at a time, for one model.

    Args:
        path: where the trained predictor is written, atomically.
        widths, epochs, seed: see `engine.experts.prediction.training.train`.
    """

    def __init__(self, path: Path, *, widths: Sequence[int] = WIDTHS, epochs: int = 20, seed: int = 0) -> None:
        self._path = path
        self._options = {"widths": list(widths), "epochs": epochs, "seed": seed}
        self._child: subprocess.Popen[bytes] | None = None
        self._trace: Path | None = None

    @property
    def is_running(self) -> bool:
        """Whether a training was started and `poll` has not seen its end."""
        return self._child is not None

    def start(self, trace: RoutingTrace, distance: int) -> bool:
        """Starts training on these routes; False if that fails or a training is running.

        Args:
            distance: see `engine.experts.prediction.training.train`.
        """
        if self._child is not None:
            return False
        try:
            private_folder(self._path.parent)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=".routes-", suffix=".npz")
            os.close(handle)
            self._trace = Path(name)
            write_trace(trace, self._trace)
            command, variables = python_module("engine.experts.prediction.training_process")
            self._child = subprocess.Popen(
                [*command, str(self._trace), str(self._path), json.dumps({**self._options, "distance": distance})],
                stdin=subprocess.PIPE,  # closed when this process ends, even by a crash, which ends the child
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **variables},
                **_LOW_PRIORITY,
            )
        except OSError as error:
            _log.warning("could not start training the expert predictor: %s", error)
            self._clean_up()
            return False
        return True

    def poll(self) -> TrainingState:
        """The state; `DONE` and `FAILED` are returned once."""
        if self._child is None:
            return TrainingState.NONE
        code = self._child.poll()
        if code is None:
            return TrainingState.RUNNING
        self._end(self._child)
        if code:
            _log.warning("training the expert predictor failed with exit code %d", code)
        return TrainingState.FAILED if code else TrainingState.DONE

    def wait(self) -> None:
        """Blocks until the training has ended; `poll` then returns its result."""
        if self._child is not None:
            self._child.wait()

    def cancel(self) -> None:
        """Kills a running training.  The previous predictor is kept."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._end(self._child)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.stdin is not None:
            child.stdin.close()
        self._child = None
        self._clean_up()

    def _clean_up(self) -> None:
        """Deletes the trace, and files that a killed child has left incomplete."""
        leftovers = [self._trace] if self._trace is not None else []
        leftovers += self._path.parent.glob(f".{self._path.name}-*")
        for leftover in leftovers:
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
        self._trace = None


class Learning:
    """Records routes, trains and loads the predictor for one target's layers.

    Args:
        model_key: see `engine.experts.prediction.training.mlp_file`; names the layers if a model has several targets.
        limit: experts to predict.
        capacity: steps whose routes are kept.
    """

    def __init__(
        self,
        model_key: str,
        *,
        layers: int,
        experts: int,
        per_token: int,
        limit: int,
        capacity: int = 4096,
        least_steps: int = _LEAST_STEPS,
        widths: Sequence[int] = WIDTHS,
        epochs: int = 20,
        seed: int = 0,
    ) -> None:
        self.routes = RecordedRoutes(layers, experts, per_token, capacity)
        self.note: str | None = None
        self._layers, self._experts, self._limit = layers, experts, limit
        self._least_steps = least_steps
        self._trained_steps = 0
        self._path = mlp_file(model_key)
        self._training = BackgroundTraining(self._path, widths=widths, epochs=epochs, seed=seed)
        self._predictors: list[MlpPredictor] = []

    @property
    def is_training(self) -> bool:
        """Whether a training is running."""
        return self._training.is_running

    def load(self) -> MlpPredictor | None:
        """The predictor that was trained last; None if there is none or it is unusable, which `note` then explains."""
        trained, self.note = load_if_usable(self._path, self._layers, self._experts)
        if trained is None:
            return None
        self._predictors.append(MlpPredictor(trained, self._limit))
        return self._predictors[-1]

    def begin(self, ahead: int) -> bool:
        """Starts a training if enough new steps have been recorded since the last; whether it was started.

        Args:
            ahead: prefetch distance in layers.  It is trained for one more, because inference takes time.
        """
        if self._training.is_running or self.routes.steps - self._trained_steps < self._least_steps:
            return False
        trace = self.routes.trace()
        if trace is None or not self._training.start(trace, min(ahead + 1, self._layers - 1)):
            return False
        self._trained_steps = self.routes.steps
        return True

    def finished(self) -> MlpPredictor | None:
        """The new predictor, if a training has succeeded since the last call."""
        if self._training.poll() is not TrainingState.DONE:
            return None
        outdated, self._predictors = self._predictors, []
        trained = self.load()
        for predictor in outdated:
            predictor.close()
        return trained

    def wait(self) -> None:
        """Blocks until no training is running; `finished` then returns its result."""
        self._training.wait()

    def cancel(self) -> None:
        """Kills a running training."""
        self._training.cancel()

    def close(self) -> None:
        """Ends training and threads.  Idempotent."""
        self._training.cancel()
        for predictor in self._predictors:
            predictor.close()
        self._predictors = []
