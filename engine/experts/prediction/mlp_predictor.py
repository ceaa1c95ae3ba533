"""Runs the trained network on its own thread, in parallel with the step (DuoServe's prediction stream, section 5.3)."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import torch
from torch import nn

from engine.experts.prediction.mlp import ExpertMlp
from engine.experts.prediction.predictors import Ranked
from engine.experts.prediction.training import TrainedMlp

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
