"""Whole-layer prefetch: every layer in time and in its place, whatever is called when and whatever fails."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError, MemoryCategory
from engine.experts.record_source import RecordSource
from engine.experts.whole_layer import LayerBuffers, WholeLayerExperts
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.reference import reference_experts
from tests.engine.hybrid_layers import EXPERTS, HIDDEN, KINDS, routing
from tests.engine.test_expert_kernels import Experts, layer_of

LAYERS = 3


class Layers:
    def __init__(self, device: Device, module: Experts) -> None:
        self.module = module
        self.weights = [module.weights(torch.float32) for _ in range(LAYERS)]
        banks = [layer_of(module, weights) for weights in self.weights]
        self.buffers = LayerBuffers(device, banks[0].layout, [RecordSource(one, self.kernel(one)) for one in banks])
        self.layers = [WholeLayerExperts(self.buffers, layer, self.kernel) for layer in range(LAYERS)]

    def kernel(self, records: LayerRecords) -> ExpertKernel:
        kernel = choose_kernel(self.module, records, None)
        assert kernel is not None
        return kernel

    def check(self, layer: int, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        wanted = reference_experts(self.module, self.weights[layer], *inputs)
        torch.testing.assert_close(self.layers[layer](*inputs), wanted, rtol=1e-4, atol=1e-4)


@given(
    kind=st.sampled_from(sorted(KINDS)),
    calls=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.sampled_from([1, 1, 5])), max_size=8),
    width=st.integers(1, EXPERTS),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_the_reference_in_any_order(
    device: Device, kind: str, calls: list[tuple[int, int]], width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    layers = Layers(device, KINDS[kind])
    try:
        for layer, tokens in [*((layer, 2) for layer in range(LAYERS)), *calls]:
            layers.check(layer, routing(generator, tokens, width))
        assert layers.layers[0](*(each[:0] for each in routing(generator, 1, 1))).shape == (0, HIDDEN)
        assert device.memory.use().used == layers.buffers.nbytes
    finally:
        layers.buffers.close()
    layers.buffers.close()
    assert device.memory.use().used == 0


@pytest.mark.parametrize("which", ["compute", "h2d"])
def test_a_failure_is_one_error_and_the_next_step_works(device: Device, which: str) -> None:
    def fail() -> None:
        raise RuntimeError("injected")

    generator = torch.Generator().manual_seed(4)
    layers = Layers(device, KINDS["gated"])
    for layer in (0, 1, 2, 0):
        layers.check(layer, routing(generator, 1, 3))
        (device.compute_stream if which == "compute" else device.h2d_stream).submit(fail)
        with pytest.raises(EngineError, match="injected"):  # noqa: PT012  (the copies that fail are for the next layer)
            for after in (layer + 1, layer + 2):
                layers.layers[after % LAYERS](*routing(generator, 1, 3))
        layers.check(layer, routing(generator, 1, 3))
    layers.buffers.close()


def test_two_layers_that_do_not_fit_are_refused_and_leave_nothing_behind(device: Device) -> None:
    taken = device.memory.allocate(device.memory.free - 8 * 4096, MemoryCategory.KV)
    with pytest.raises(DeviceMemoryError):
        Layers(device, KINDS["gated"])
    device.memory.release(taken)
    assert device.memory.use().used == 0
