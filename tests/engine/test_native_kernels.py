"""The native kernels against the torch reference: random shapes, routings and values, every instruction set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.dispatch import StandardExperts
from engine.experts.record import ExpertBank
from engine.formats.layouts import RecordLayout
from engine.formats.tiles import dequantise
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts, can_compute
from engine.kernels.native.library import Isa, NativeKernels, load_kernels
from engine.kernels.native.linear import QuantisedLinear, speed_up_linears
from engine.kernels.reference import reference_experts
from engine.kernels.torch_experts import TorchExperts
from tests.engine.conversions import quantise_linears
from tests.engine.native_isas import isas, kernels_of

_ISAS = isas()


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=3) as held_back:
        yield held_back


class SiluExperts(StandardExperts):
    """The library's default gate, by the name that the kernels recognise it by."""


def _default_apply_gate(self: SiluExperts, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


SiluExperts._apply_gate = _default_apply_gate


def _layer(experts: int, hidden: int, inner: int) -> tuple[SiluExperts, LayerRecords, dict[str, torch.Tensor]]:
    module = SiluExperts(experts, hidden, inner, torch.nn.SiLU())
    weights = {name: (torch.randn(p.shape) * p.shape[-1] ** -0.5).bfloat16() for name, p in module.named_parameters()}
    shapes = {name: (tuple(w.shape[1:]), torch.bfloat16) for name, w in weights.items()}
    layer = ExpertBank(torch.device("cpu")).add_layer("experts", experts, RecordLayout.of(shapes, transposed=False))
    for name, weight in weights.items():
        layer.stacked[name].copy_(weight)
    return module, layer, weights


@settings(max_examples=13)
@given(
    experts=st.integers(1, 9),
    hidden=st.integers(1, 200),
    inner=st.integers(1, 100),
    tokens=st.integers(1, MAX_TOKENS),
    seed=st.integers(0, 2**31),
)
def test_experts_equal_the_reference(
    kernels: NativeKernels, experts: int, hidden: int, inner: int, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module, layer, weights = _layer(experts, hidden, inner)
    math = ExpertMath.of(module)
    assert can_compute(layer, math)
    compute = NativeExperts(layer, math, kernels, many_tokens=TorchExperts(layer, math))
    width = int(torch.randint(1, experts + 1, ()))
    # Ids one above the experts belong to nobody, as the interface allows.
    index = torch.stack([torch.randperm(experts + 1)[:width] for _ in range(tokens)])
    share = torch.rand(tokens, width)
    x = torch.randn(tokens, hidden).bfloat16()
    got = compute(x, index, share)
    wanted = reference_experts(module, weights, x, index, share)
    torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


def test_more_tokens_equal_the_reference(kernels: NativeKernels) -> None:
    module, layer, weights = _layer(4, 64, 32)
    compute = NativeExperts(layer, ExpertMath.of(module), kernels, TorchExperts(layer, ExpertMath.of(module)))
    x = torch.randn(MAX_TOKENS + 3, 64).bfloat16()
    index = torch.randint(0, 4, (MAX_TOKENS + 3, 2))
    share = torch.rand(MAX_TOKENS + 3, 2)
    wanted = reference_experts(module, weights, x, index, share)
    torch.testing.assert_close(compute(x, index, share).float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e-40])
def test_infinities_and_denormals_stay_where_the_reference_has_them(kernels: NativeKernels, value: float) -> None:
    torch.manual_seed(1)
    module, layer, weights = _layer(2, 64, 32)
    compute = NativeExperts(layer, ExpertMath.of(module), kernels, TorchExperts(layer, ExpertMath.of(module)))
    x = torch.randn(1, 64).bfloat16()
    x[0, 5] = value
    index, share = torch.tensor([[1, 0]]), torch.tensor([[0.5, 0.5]])
    wanted = reference_experts(module, weights, x, index, share).float()
    torch.testing.assert_close(compute(x, index, share).float(), wanted, atol=2e-2, rtol=2e-2, equal_nan=True)


@settings(max_examples=10)
@given(rows=st.integers(1, 900), columns=st.integers(1, 700), bias=st.booleans(), seed=st.integers(0, 2**31))
def test_linear_equals_torch(kernels: NativeKernels, rows: int, columns: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16))
    for tokens in (1, 2):
        x = torch.randn(1, tokens, columns).bfloat16()
        with torch.no_grad():
            wanted = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
            taken = speed_up_linears(model, kernels)
            got = model(x)
        assert taken == (rows * columns >= 64 * 1024)
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@given(numbers=st.integers(0, 2**17), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_memory_is_read_once_and_whole(kernels: NativeKernels, numbers: int, seed: int) -> None:
    memory = np.random.default_rng(seed).integers(0, 2**64, numbers, dtype=np.uint64)
    assert kernels.read_memory(kernels.pool, memory.ctypes.data, memory.nbytes) == int(memory.sum(dtype=np.uint64))


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
@settings(max_examples=3)
@given(
    rows=st.integers(100, 700),
    columns=st.integers(700, 900),
    bias=st.booleans(),
    tokens=st.sampled_from([1, 2, 8, 9, 49]),
    seed=st.integers(0, 2**31),
)
def test_quantised_linear_is_near_what_its_weights_mean(
    kernels: NativeKernels, precision: str, rows: int, columns: int, bias: bool, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16))
    model.requires_grad_(False)
    assert quantise_linears(model, precision, kernels) == 1
    fast_path = model[0].forward
    assert isinstance(fast_path, QuantisedLinear)
    x = torch.randn(1, tokens, columns).bfloat16()
    offset = model[0].bias.float() if bias else None
    wanted = torch.nn.functional.linear(x.float(), dequantise(fast_path.matrix, torch.float32), offset)
    torch.testing.assert_close(model(x).float(), wanted, atol=2e-2, rtol=2e-2)
    assert model[0].weight.numel() == 0
    assert sum(buffer.nbytes for buffer in model.buffers()) == fast_path.matrix.nbytes


def test_routers_and_small_layers_are_not_quantised(kernels: NativeKernels) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16)
            self.small = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
            self.up_proj = torch.nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16)

    block = Block()
    assert quantise_linears(block, "int8", kernels) == 1
    assert [layer.weight.numel() > 0 for layer in (block.gate, block.small, block.up_proj)] == [True, True, False]


def test_a_closed_pool_leaves_no_thread() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        pytest.skip("threads are counted in /proc")
    before = {*os.listdir(tasks)}
    kernels = load_kernels(threads=4)
    assert kernels is not None
    assert len({*os.listdir(tasks)} - before) == 3
    kernels.close()
    assert {*os.listdir(tasks)} <= before


def test_the_environment_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    assert load_kernels(threads=2) is None
