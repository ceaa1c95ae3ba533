"""What each way of meeting misses should take by the latency model, for the very routing of a measured run.

A layer's experts are computed on two sides that work at once: the device (hits, then what was fetched, as it arrives)
and the CPU.  The later of the two ends the layer.  Nothing is fitted to the times of the run: the constants are
measured apart from it, the routing and the hits are those of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.bench.step_records import LayerStep
from engine.common.config import Misses
from engine.experts.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured constants of one model on one device, in seconds.

    Attributes:
        rest_s: all of a decode step but its expert layers.
        layer_s: an expert layer that needs no expert: its routing brought to the CPU, its sum made.
        hits_s, cpu_side_s, fetches_s: what it costs that there are any hits, experts for the CPU or fetched ones,
            besides what each of them costs.
        post_fetch_s: what it costs each expert that the CPU computes that it is sent to the cache for later.
    """

    rest_s: float
    layer_s: float
    hits_s: float
    cpu_side_s: float
    fetches_s: float
    post_fetch_s: float


@dataclass(frozen=True, slots=True)
class StrategyModel:
    """Predicts seconds per token.

    Attributes:
        latency: of one expert, not corrected by the run that is predicted.
        experts: of each layer.
    """

    latency: LatencyModel
    costs: StepCosts
    experts: int

    def seconds_per_token(self, misses: Misses, steps: Iterable[LayerStep], layers: int) -> float:
        """Mean over the recorded steps.

        Args:
            misses: the strategy; the recorded hits count for `mixed` only, the others keep nothing.
            layers: expert layers of one token.
        """
        layer_s = {"mixed": self._mixed, "cpu": self._cpu, "fetch": self._fetch, "off": self._off, "layer": self._layer}
        spans = [layer_s[misses](step) for step in steps]
        return self.costs.rest_s + layers * sum(spans) / max(len(spans), 1)

    def _mixed(self, step: LayerStep) -> float:
        return self._two_sides(step.hits, step.on_cpu, step.fetched, step.backlog, self.costs.post_fetch_s)

    def _cpu(self, step: LayerStep) -> float:
        return self._two_sides(0, step.needed, 0, 0)

    def _fetch(self, step: LayerStep) -> float:
        return self._two_sides(0, 0, step.needed, 0)

    def _off(self, step: LayerStep) -> float:
        on_cpu, fetched = self.latency.split([(expert, 1) for expert in range(step.needed)])
        return self._two_sides(0, len(on_cpu), len(fetched), 0)

    def _layer(self, step: LayerStep) -> float:
        """All experts of the next layer arrive while this one is computed."""
        return max(self._two_sides(step.needed, 0, 0, 0), self.experts * self.latency.transfer_s)

    def _two_sides(self, hits: int, on_cpu: int, fetched: int, backlog: int, later_s: float = 0.0) -> float:
        latency, costs = self.latency, self.costs
        device_s = costs.hits_s + hits * latency.gpu_s(1) if hits else 0.0
        arrived_s = backlog * latency.transfer_s
        for _ in range(fetched):
            arrived_s += latency.transfer_s
            device_s = max(device_s, arrived_s) + latency.gpu_s(1)
        device_s += costs.fetches_s if fetched else 0.0
        cpu_s = costs.cpu_side_s + on_cpu * (latency.cpu_s(1) + later_s) if on_cpu else 0.0
        return costs.layer_s + max(device_s, cpu_s)
