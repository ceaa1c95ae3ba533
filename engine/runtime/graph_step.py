"""One decode step of a model as graphs with the experts between them.

A model's forward is captured as it runs: at each call of experts that have to know the routing the piece under way
ends, the experts are computed, and with their result in a buffer that stays the next piece begins.  Repeating a step is
then to launch the pieces and to call the experts in between: the library's Python does not run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.devices.graphs import Capture, Graph
from engine.experts.dispatch import bound_kernel, compute_experts, interrupted_by_experts
from engine.kernels.interface import is_capturable


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
        self._kernels: list[tuple[Any, object]] = []
        try:
            with interrupted_by_experts(self._between):
                capture.begin()
                self.logits = forward()
                self._pieces.append(capture.end())
        except BaseException:
            self.close()
            raise

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

    def replay(self) -> torch.Tensor:
        """The step again, with what its tensors hold now.

        Raises:
            EngineError: experts failed.
        """
        for piece in self._pieces:
            piece.replay()
        return self.logits

    def close(self) -> None:
        """Frees what it holds.  Harmless if repeated."""
        self._capture.close()
        self._pieces, self._kernels = [], []

    def _between(self, module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer, kernel = bound_kernel(module)
        self._kernels.append((module, kernel))
        if is_capturable(kernel) and layer.device == hidden.device:
            return kernel(hidden, index, weights)  # nobody can look on while it is repeated
        self._pieces.append(self._capture.end())
        try:
            result = compute_experts(module, hidden.clone(), index, weights).clone()
        except BaseException as error:
            raise ExpertsFailedError(error) from error
        self._pieces.append(_Experts(module, hidden, index, weights, result))
        self._capture.begin()
        return result
