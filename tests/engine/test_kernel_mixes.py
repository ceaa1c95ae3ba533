"""Kernels of several instruction sets mixed, as a measured choice mixes them, over odd sizes against the reference."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from engine.formats.tiles import dequantise
from engine.kernels.interface import ExpertMath
from engine.kernels.native.choice import FEW, MANY, USES, _Work, apply, choose
from engine.kernels.native.experts import NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import QuantisedLinear, speed_up_linears
from engine.kernels.native.prompt_attention import attend_prompt
from engine.kernels.torch_experts import TorchExperts
from tests.engine.conversions import quantise_linears
from tests.engine.native_isas import isas, kernels_of
from tests.engine.test_quantised_experts import KINDS, PRECISIONS, _layer, _module

_ISAS = isas()
_LINEAR = ("bf16", "int8", "int4", "lut4")


@pytest.fixture(scope="module")
def kernels() -> Iterator[NativeKernels]:
    with kernels_of(_ISAS[-1], threads=2) as newest:
        yield newest


def _mix(draw: random.Random) -> dict[object, Isa]:
    """Each set alone as often as all of them mixed."""
    if draw.random() < 0.5:
        only = draw.choice(_ISAS)
        return dict.fromkeys(USES, only)
    return {use: draw.choice(_ISAS) for use in USES}


def _experts(draw: random.Random, kernels: NativeKernels) -> None:
    precision = draw.choice(PRECISIONS)
    experts, hidden, inner = draw.randint(1, 5), draw.randint(1, 150), draw.randint(1, 100)
    if precision != "bf16":
        hidden, inner = max(hidden, 33), max(inner, 33)
    module = _module(draw.choice(KINDS), experts, hidden, inner, bias=draw.random() < 0.5)
    layer, _ = _layer(module, precision)
    math = ExpertMath.of(module)
    reference = TorchExperts(layer, math)
    tokens = draw.choice([1, 2, 3, 5, 8, 9, 17, 40])
    x = torch.randn(tokens, hidden).bfloat16()
    width = draw.randint(1, experts)
    index, share = torch.rand(tokens, experts + 1).argsort(1)[:, :width], torch.rand(tokens, width)
    got, wanted = (
        NativeExperts(layer, math, kernels, reference)(x, index, share).float(),
        reference(x, index, share).float(),
    )
    near = 0.02 if precision == "bf16" else 0.06
    torch.testing.assert_close(got, wanted, rtol=near, atol=near * max(float(wanted.abs().max()), 1e-3))


def _linear(draw: random.Random, kernels: NativeKernels) -> None:
    precision, columns = draw.choice(_LINEAR), draw.randint(200, 700)
    rows = 64 * 1024 // columns + draw.randint(1, 200)
    bias = draw.random() < 0.5
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)).requires_grad_(False)
    offset = model[0].bias.float() if bias else None
    x = torch.randn(draw.choice([1, 2, 7, 8, 9, 30, 49]), columns).bfloat16()
    if precision == "bf16":
        weight = model[0].weight.float()
        assert speed_up_linears(model, kernels) == 1
    else:
        assert quantise_linears(model, precision, kernels) == 1
        fast_path = model[0].forward
        assert isinstance(fast_path, QuantisedLinear)
        weight = dequantise(fast_path.matrix, torch.float32)
    wanted = torch.nn.functional.linear(x.float(), weight, offset)
    torch.testing.assert_close(model(x).float(), wanted, atol=2e-2, rtol=2e-2)


def _prompt(draw: random.Random, kernels: NativeKernels) -> None:
    kv_heads, group, dim, tokens = (
        draw.randint(1, 2),
        draw.choice([1, 3, 8]),
        draw.randint(1, 130),
        draw.randint(1, 200),
    )
    held = tokens + draw.choice([0, 5, 130])
    queries = torch.randn(kv_heads * group, tokens, dim).bfloat16()
    keys, values = torch.randn(kv_heads, held, dim).bfloat16(), torch.randn(kv_heads, held, dim).bfloat16()
    got = attend_prompt(kernels, queries, keys, values, dim**-0.5)
    assert got is not None
    sees = torch.arange(held)[None] <= torch.arange(held - tokens, held)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries.float(), *(each.float().repeat_interleave(group, 0) for each in (keys, values)), attn_mask=sees
    )
    torch.testing.assert_close(got.float(), wanted.transpose(0, 1), atol=3e-2, rtol=3e-2)


def _case(seed: int, kernels: NativeKernels) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    apply(kernels, _mix(draw), _ISAS)  # type: ignore[arg-type]
    try:
        draw.choice([_experts, _linear, _prompt])(draw, kernels)
    finally:
        kernels.use(kernels.isa)


@pytest.mark.takes_turns(6)
@pytest.mark.parametrize("seed", range(60))
def test_any_mix_is_near_the_reference(kernels: NativeKernels, seed: int) -> None:
    _case(seed, kernels)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hundred", range(100))
def test_many_mixes_over_odd_sizes(kernels: NativeKernels, hundred: int) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        _case(seed, kernels)


def test_the_real_kernels_can_be_measured(kernels: NativeKernels) -> None:
    with _Work(kernels) as work:
        assert work.seconds(USES[0], _ISAS[0]) > 0
        found = choose(_ISAS, work.seconds, rounds=1)
    assert found is None or set(found) <= set(USES)
    assert {use.kind for use in USES} == {FEW, MANY}
