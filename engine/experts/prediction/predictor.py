"""What a predictor is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Ranked = Sequence[tuple[int, float]]
"""(expert, probability that it will be wanted), most probable first."""

Gate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A layer's router: hidden states [T, H] -> (logits [T, E], chosen experts [T, k])."""


class Predictor(Protocol):
    """Predicts the experts of coming layers from those of the layers so far.  Used from one thread."""

    @property
    def name(self) -> str:
        """As in the engine's configuration."""
        ...

    @property
    def learns(self) -> bool:
        """Whether `observe` teaches it something, so that it should see more steps than it is asked in."""
        ...

    @property
    def beside_s(self) -> float:
        """Seconds that one prediction takes on other threads than the caller's."""
        ...

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """A decode step's layer has been routed.  Layers come in rising order; a lower one begins the next step.

        Steps may be left out between two that are seen, but a step that is begun is seen up to where it ends.

        Args:
            experts: distinct, all that the step's tokens were routed to.
            hidden: [T, H], what enters the experts; it may be written to after this call and the next `predict`.
        """
        ...

    def predict(self, layer: int) -> Ranked:
        """Who will be wanted in this layer, when it comes next.  Empty if it cannot tell."""
        ...
