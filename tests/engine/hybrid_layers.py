"""Experts on a device over RAM, with the plain definition beside them to compare with."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from engine.devices.device import Device
from engine.experts.activations import Activations
from engine.experts.cache.policies import POLICY_NAMES
from engine.experts.dispatcher import HybridExperts
from engine.experts.executor import StepObserver
from engine.experts.latency import LatencyModel
from engine.experts.misses import MIXED
from engine.experts.record_source import RecordSource
from engine.experts.vram_cache import VramCache
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.reference import reference_experts
from tests.engine.test_expert_kernels import Experts, layer_of

LAYERS, EXPERTS, HIDDEN, INNER = 2, 6, 16, 8

KINDS = {
    "gated": Experts(EXPERTS, HIDDEN, INNER, True, False, False, False),
    "like gpt_oss": Experts(EXPERTS, HIDDEN, INNER, True, True, True, False),
    "no gate": Experts(EXPERTS, HIDDEN, INNER, False, False, False, True),
}
EVERY_POLICY = ["auto", *POLICY_NAMES]
_POPULARITY = {key: float(key % 5) for key in range(LAYERS * EXPERTS)}

# Fetching one miss pays, fetching all does not: a mixture of both.
EVEN = (1e-4, 1e-5, 1e-5, 64, 0.0, 1e-5)


@dataclass
class Layers:
    """A model's experts on one device, layer by layer, with the plain definition beside them."""

    device: Device
    kind: str = "gated"
    dtype: torch.dtype = torch.float32
    slots: int = 4
    ways: int | None = None
    policy: str = "auto"
    mode: str = MIXED
    staging: int = 2
    seed: int = 0
    prefetcher: StepObserver | None = None
    layers: list[HybridExperts] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.module = KINDS[self.kind]
        self.weights = [self.module.weights(self.dtype) for _ in range(LAYERS)]
        self.banks: list[LayerRecords] = [layer_of(self.module, weights) for weights in self.weights]
        layout = self.banks[0].layout
        self.cache = VramCache(
            self.device,
            layout,
            layers=LAYERS,
            experts=EXPERTS,
            slots=self.slots,
            ways=self.ways,
            policy=self.policy,
            popularity=_POPULARITY,
            staging=self.staging,
        )
        self.activations = Activations(self.device)
        latency = LatencyModel("test", layout.nbytes, *EVEN, layout.nbytes / 2e-4)
        self.layers = [
            HybridExperts(
                self.cache,
                index,
                RecordSource(bank, self.kernel(bank)),
                self.kernel,
                latency,
                self.activations,
                self.mode,
            )
            for index, bank in enumerate(self.banks)
        ]
        for layer in self.layers:
            layer.observer = self.prefetcher
        for one, after in pairwise(self.layers):
            one.after, after.prompts = after, one.prompts
        # What nothing was copied to must not matter.
        for segment in [*self.cache._memory.segments, *([self.cache.staging.segment] if self.cache.staging else [])]:
            segment.records.records.fill_(0xFF)

    def kernel(self, records: LayerRecords) -> ExpertKernel:
        kernel = choose_kernel(self.module, records, None)
        assert kernel is not None
        return kernel

    def close(self) -> None:
        self.activations.close()
        self.cache.close()
        assert self.device.memory.use().used == 0

    def __enter__(self) -> "Layers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, layer: int, routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        result = self.layers[layer](*routing)
        wanted = reference_experts(self.module, self.weights[layer], *routing)
        coarse = self.dtype is torch.bfloat16
        torch.testing.assert_close(result, wanted, rtol=4e-2 if coarse else 1e-4, atol=6e-2 if coarse else 1e-4)
        return result


def routing(
    generator: torch.Generator, tokens: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, distinct experts (or none: an id beyond the last) of each token, and weights."""
    hidden = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:width] for _ in range(tokens)])
    weights = torch.rand(tokens, width, generator=generator)
    return hidden, index, weights
