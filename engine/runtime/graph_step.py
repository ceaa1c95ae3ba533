"""One decode step of a model as graphs with the experts between them.

A model's forward is captured as it runs: at each call of experts that have to know the routing the piece under way
ends, the experts are computed, and with their result in a buffer that stays the next piece begins.  Repeating a step is
then to launch the pieces and to call the experts in between: the library's Python does not run at all.

A timeline sees by the device's clock when a piece began and ended, and which layers are in it; nothing of its inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from engine.devices.graphs import Capture, Graph
from engine.experts.dispatch import bound_kernel, compute_experts, interrupted_by_experts
from engine.experts.recording import LAYER_NUMBER
from engine.kernels.interface import is_capturable
from engine.telemetry.lanes import DENSE, GRAPH, HEAD
from engine.telemetry.recorder import RECORDER


@dataclass(frozen=True)
class _Experts:
    """A call of experts between two pieces: what it is given and where its result goes, all in memory that stays."""

    module: Any
    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    result: torch.Tensor

    def replay(self) -> None:
        # A copy, for whoever learns from hidden states looks at them when the next token's are there already.
        self.result.copy_(compute_experts(self.module, self.hidden.clone(), self.index, self.weights))


class ExpertsFailedError(Exception):
    """Experts that were computed between two pieces failed; it is not the capture's fault.

    Attributes:
        reason: how they did.
    """

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


class GraphStep:
    """A captured step.

    Args:
        capture: of the device, with nothing in it.
        forward: computes the step from tensors that stay, and returns logits; it is called once, now.

    Attributes:
        logits: of the step, which every repetition overwrites.

    Raises:
        ExpertsFailedError: experts failed.
        Exception: whatever cannot be captured raises; nothing of it was done but for what writes the same again.
    """

    def __init__(self, capture: Capture, forward: Callable[[], torch.Tensor]) -> None:
        self._capture = capture
        self._pieces: list[Graph | _Experts] = []
        self._inside: list[list[Any]] = [[]]  # of each graph the modules of experts that are part of it
        self._kernels: list[tuple[Any, object]] = []
        try:
            with interrupted_by_experts(self._between):
                capture.begin()
                self.logits = forward()
                self._pieces.append(capture.end())
        except BaseException:
            self.close()
            raise
        if RECORDER.on:
            RECORDER.piece = self.spans[-1]  # for the head, which is in it

    @property
    def nbytes(self) -> int:
        """Device memory that it holds on to."""
        return self._capture.nbytes

    @property
    def is_current(self) -> bool:
        """Whether experts are computed by whoever computed them then."""
        return all(bound_kernel(module)[1] is kernel for module, kernel in self._kernels)

    @property
    def pieces(self) -> int:
        """Graphs that a step is made of."""
        return sum(not isinstance(piece, _Experts) for piece in self._pieces)

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """(name, first layer, layers) of each graph, for a timeline; the layer is -1 where modules have no numbers.

        A graph is `dense` if all that it holds comes before the experts of one layer, and `head` behind the last.
        """
        spans = []
        between = [piece.module for piece in self._pieces if isinstance(piece, _Experts)]
        last = -1
        for inside, behind in zip(self._inside, [*between, None], strict=True):
            modules = inside if behind is None else [*inside, behind]
            numbers = [module.__dict__.get(LAYER_NUMBER, -1) for module in modules]
            if not modules:
                spans.append((HEAD, -1, 1))
                continue
            known = min(numbers) > last
            count = max(numbers) - last if known else len(modules)
            name = DENSE if not inside and count == 1 else GRAPH
            spans.append((name, last + 1 if known else -1, count))
            last = max(last, *numbers)
        return spans

    def replay(self) -> torch.Tensor:
        """The step again, with what its tensors hold now.

        Raises:
            EngineError: experts failed.
        """
        spans = iter(self.spans) if RECORDER.on else None
        for piece in self._pieces:
            if spans is not None and not isinstance(piece, _Experts):
                RECORDER.piece = next(spans)  # whatever comes next marks where it ends
            piece.replay()
        return self.logits

    def close(self) -> None:
        """Frees what it holds.  Harmless if repeated."""
        self._capture.close()
        self._pieces, self._inside, self._kernels = [], [], []

    def _between(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer, kernel = bound_kernel(module)
        self._kernels.append((module, kernel))
        if is_capturable(kernel) and layer.device == hidden.device:
            self._inside[-1].append(module)
            return kernel(hidden, index, weights)  # nobody can look on while it is repeated
        self._pieces.append(self._capture.end())
        try:
            result = compute_experts(module, hidden.clone(), index, weights).clone()
        except BaseException as error:
            raise ExpertsFailedError(error) from error
        self._pieces.append(_Experts(module, hidden, index, weights, result))
        self._inside.append([])
        self._capture.begin()
        return result
