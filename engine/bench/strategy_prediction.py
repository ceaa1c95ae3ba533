"""Predicted time of each strategy for misses by the latency model, on the routing of a measured run.

A layer's experts run on two sides concurrently: the device (hits, then fetched experts as they arrive) and the CPU. The
later one ends the layer. Nothing is fitted to the run's times: the constants are measured separately; routing and hits
are the run's.
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
        rest_s: a decode step without its expert layers.
        layer_s: an expert layer without experts: copying the routing to the CPU, and the sum.
        hits_s, cpu_side_s, fetches_s: fixed cost of having any hits, CPU experts or fetched experts, in addition to the
            cost of each.
        post_fetch_s: extra cost of an expert on the CPU for sending it to the cache.
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
        latency: of one expert, not corrected by the predicted run.
        experts: of each layer.
    """

    latency: LatencyModel
    costs: StepCosts
    experts: int

    def seconds_per_token(self, misses: Misses, steps: Iterable[LayerStep], layers: int) -> float:
        """Mean over the recorded steps.

        Args:
            misses: the strategy; the recorded hits count for `mixed` only, the others have no cache.
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
