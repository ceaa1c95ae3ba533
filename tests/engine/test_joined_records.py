"""A kernel over several pieces of memory computes what it computes over one."""

import pytest
import torch

from engine.devices.emulated import open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.experts.vram_cache import Segment
from engine.hardware.profiles import DeviceProfile
from engine.kernels import choose_kernel
from engine.kernels.interface import LayerRecords
from engine.kernels.native.library import load_kernels
from tests.engine.test_expert_kernels import Experts, layer_of

EXPERTS, HIDDEN, INNER = 7, 64, 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(7,), (3, 4), (1, 2, 4)])
@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("gated", [True, False])
def test_pieces_are_as_one(dtype: torch.dtype, cuts: tuple[int, ...], tokens: int, gated: bool) -> None:
    torch.manual_seed(len(cuts) * 100 + tokens)
    module = Experts(EXPERTS, HIDDEN, INNER, gated, gated, False, False)
    layer = layer_of(module, module.weights(dtype))
    hidden = torch.randn(tokens, HIDDEN).to(dtype)
    index = torch.stack([torch.randperm(EXPERTS + 1)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    kernels = load_kernels(1)
    with open_emulated(DeviceProfile("card", "", 2**24, 10.0, 10.0, 1.0)) as device:
        segments, first = [], 0
        for count in cuts:
            segment = Segment(device, layer.layout, count, first, MemoryCategory.EXPERTS)
            segment.records.records.copy_(layer.records[first : first + count])
            segments.append(segment)
            first += count
        joined = LayerRecords("joined", layer.layout, *(segment.records.records for segment in segments))
        assert joined.num_experts == EXPERTS
        for native in (None, kernels):
            whole, pieces = choose_kernel(module, layer, native), choose_kernel(module, joined, native)
            assert torch.equal(whole(hidden, index, weights), pieces(hidden, index, weights))
        del joined, pieces, whole
        for segment in segments:
            segment.release()
    if kernels is not None:
        kernels.close()
