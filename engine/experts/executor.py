"""The executor of an expert layer: routing, then records, then sums.

A layer whose experts are all in RAM, beside the rest of the model, needs none: its kernel is called directly, which
adds nothing to a decode step.  The others go the same way.  `Routing` says which tokens visit which experts, `Arrivals`
brings the records that are not in RAM while the others are computed, and `PartialSums` adds up what was computed in an
order that depends on neither.  Where the experts are computed is the configuration:

- `ExpertExecutor` by itself has no slots but the source's, in RAM over disk: the CPU computes all experts in place.
- `HybridExperts` (`engine.experts.dispatcher`) has slots on a device over them, and ways to serve what they miss.
- `WholeLayerExperts` (`engine.experts.whole_layer`) copies all experts, whatever the routing says: it needs neither
  routing nor sums, and the host never waits for the device to choose.

The CPU is not a device of the second kind: its streams would add a copy of the hidden states and of the results, and
several events, to each layer of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engine.experts.partial_sums import PartialSums, Routing
from engine.experts.record_source import Arrivals, RecordSource
from engine.experts.recording import FEW_TOKENS, record_uses
from engine.kernels.native.experts import MAX_TOKENS
from engine.telemetry.recorder import RECORDER


class StepObserver(Protocol):
    """Observes which experts decode steps use, to predict later ones."""

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Called once a layer's device work, copies and reads are queued, before the CPU computes its share.

        Args:
            experts: in ascending order.
            hidden: [T, H], input of the experts, where the layer is computed.
        """


class PromptObserver(Protocol):
    """Observes which experts prompts use, to read those of the next layer."""

    def begun(self, layer: int, wanted: int, read: Iterable[int]) -> None:
        """All experts of a layer have been requested: their number, and those that have to be read."""


class ExpertExecutor:
    """An `ExpertKernel` for one layer, computed on the CPU: first the experts in RAM, while the others are read.

    Args:
        source: its records.
        number: of the layer, for the observers.
        observer: observes steps of up to `MAX_TOKENS` tokens; may be set later.
        ahead: observes longer steps.
    """

    records_itself = True

    def __init__(
        self,
        source: RecordSource,
        number: int,
        observer: StepObserver | None = None,
        ahead: PromptObserver | None = None,
    ) -> None:
        self.source = source
        self._number, self.observer = number, observer
        self._ahead = ahead

    def number_in_model(self, number: int) -> None:
        """Sets the number of its decoder layer, for the timeline of copies to a device."""

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `engine.kernels.interface.ExpertKernel`.

        Raises:
            EngineError: an expert could not be read.
        """
        visits = top_k_index.numel()
        if not visits:
            return torch.zeros_like(hidden_states)
        routing = Routing(top_k_index, self.source.num_experts)
        rows = hidden_states.new_empty(visits, hidden_states.shape[1])
        sums = PartialSums(hidden_states, top_k_weights, routing, rows)
        is_short = hidden_states.shape[0] <= MAX_TOKENS
        # How a row is rounded may depend on the rows beside it: in longer steps those of its expert alone, whichever
        # experts happen to be in RAM, so that the same input gives the same bits.
        most = MAX_TOKENS if is_short else 1
        is_observed = False

        def observe() -> None:
            """Lets later layers' experts be read, once all of this step's own reads are queued."""
            nonlocal is_observed
            if is_observed or arrivals.left:
                return
            is_observed = True
            if not is_short:
                if self._ahead is not None:
                    self._ahead.begun(self._number, len(routing.experts), arrivals.read)
            elif self.observer is not None:
                self.observer.observe(self._number, routing.experts, hidden_states)

        arrivals = Arrivals(self.source, routing.experts, observe)
        try:
            for held, there in arrivals:
                if not (is_observed or arrivals.left):
                    observe()
                sums.on_host(self.source.kernel, hidden_states, there, held.rows, most=most)
        except BaseException:
            arrivals.release()
            raise
        if RECORDER.on and hidden_states.shape[0] <= FEW_TOKENS:
            RECORDER.on_cpu += len(routing.experts)
            record_uses(routing.experts, [expert for expert in routing.experts if expert not in arrivals.read])
        sums.finish()()
        return sums.result
