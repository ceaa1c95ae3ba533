"""A way to meet a miss that is registered is used where it is the fastest, and the answers stay what they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.common.costs import CostModel
from engine.devices.device import Device
from engine.experts import misses
from engine.experts.latency import LatencyModel
from engine.experts.misses import CACHE_OFF, MIXED, WAYS, Fetched, OnCpu, Step, Way, modes
from engine.experts.record_source import Held
from engine.experts.shares import Estimate
from tests.engine.hybrid_layers import Layers, routing


def toy(base: type[Way], seconds: float) -> tuple[type[Way], list[int]]:
    """A way that meets one expert after the other and says that each takes so long; what it has met."""
    met: list[int] = []

    class OneByOne(base):  # type: ignore[misc, valid-type]
        name = "one by one"

        def estimate(self, step: Step, busy_s: float) -> Estimate:
            del step, busy_s
            return Estimate(lambda _tokens: seconds, keeps_caller=self.keeps_caller)

        def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
            met.extend(experts)
            for expert in experts:
                super().serve(step, [expert], held)

    return OneByOne, met


@pytest.mark.parametrize("base", [OnCpu, Fetched])
@pytest.mark.parametrize("seconds", [0.0, 1e3])
def test_a_new_way_is_used_where_it_is_the_fastest(
    device: Device, monkeypatch: pytest.MonkeyPatch, base: type[Way], seconds: float
) -> None:
    # How long anything took here and now must not decide.
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)
    monkeypatch.setattr(LatencyModel, "observe_gpu", lambda *_: None)
    monkeypatch.setattr(LatencyModel, "sides", lambda *_: {})
    way, met = toy(base, seconds)
    monkeypatch.setattr(misses, "WAYS", [*WAYS, way])
    assert modes() == [MIXED, "cpu", "fetch", "one by one", CACHE_OFF]
    answers = []
    for mode in modes():
        generator = torch.Generator().manual_seed(7)
        met.clear()
        with Layers(device, slots=4, mode=mode, policy="lru") as layers:
            results = []
            for count in (1, 1, 4, 1, 70):
                results.append(layers.check(0, routing(generator, count, 3)))
                layers.cache.wait()
            answers.append(torch.cat(results))
            counters = layers.cache.counters
            missed = counters.misses + counters.prefill_lookups - counters.prefill_hits
            if mode == "one by one" or (mode == MIXED and not seconds):
                assert len(met) == missed > 0
                counted = counters.on_cpu + counters.prefill_on_cpu
                assert counted == (missed if base.keeps_caller else 0)
            elif mode != CACHE_OFF or seconds:
                assert met == []
            assert layers.cache.resize(0) == 0
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_an_unknown_way_is_an_error(device: Device) -> None:
    with Layers(device) as layers, pytest.raises(ValueError, match="by magic"):
        layers.layers[0].serve_by("by magic")
