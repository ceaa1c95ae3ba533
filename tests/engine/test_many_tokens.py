"""Experts of many tokens in native kernels, against torch operators: shapes, routings, values, thread counts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.interface import ExpertMath
from engine.kernels.native.experts import NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.structs import plain_struct
from engine.kernels.torch_experts import TorchExperts
from tests.combinations import any_two
from tests.engine.native_isas import isas, kernels_of
from tests.engine.test_quantised_experts import KINDS, PRECISIONS, _layer, _module

_ISAS = isas()


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=int(isa) % 3 + 1) as held_back:
        yield held_back


def _both(
    kernels: NativeKernels, kind: str, precision: str, sizes: tuple[int, int, int], bias: bool
) -> tuple[NativeExperts, TorchExperts]:
    module = _module(kind, *sizes, bias=bias)
    layer, _ = _layer(module, precision)
    math = ExpertMath.of(module)
    in_torch = TorchExperts(layer, math)
    return NativeExperts(layer, math, kernels, many_tokens=in_torch), in_torch


def _routing(tokens: int, experts: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids one above the experts are nobody."""
    return torch.rand(tokens, experts + 1).argsort(1)[:, :width], torch.rand(tokens, width)


def _assert_near(got: torch.Tensor, wanted: torch.Tensor, precision: str) -> None:
    """bf16 rounds where torch does; few tokens of a quantised expert come as whole numbers in groups of 32."""
    share = 0.02 if precision == "bf16" else 0.06
    torch.testing.assert_close(got.float(), wanted.float(), rtol=share, atol=share * float(wanted.abs().max()))


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=2)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    experts=st.integers(1, 9),
    hidden=st.integers(33, 200),
    inner=st.integers(33, 150),
    tokens=st.integers(9, 150),
    seed=st.integers(0, 2**31),
)
def test_many_tokens_are_near_torch(
    kernels: NativeKernels,
    precision: str,
    kind: str,
    bias: bool,
    experts: int,
    hidden: int,
    inner: int,
    tokens: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    native, in_torch = _both(kernels, kind, precision, (experts, hidden, inner), bias)
    x = torch.randn(tokens, hidden).bfloat16()
    index, share = _routing(tokens, experts, min(experts, 3))
    _assert_near(native(x, index, share), in_torch(x, index, share), precision)


@settings(max_examples=2)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    hidden=st.integers(500, 600),
    inner=st.integers(500, 560),
    tokens=st.integers(9, 60),
    seed=st.integers(0, 2**31),
)
def test_long_rows_are_near_torch(
    kernels: NativeKernels, kind: str, bias: bool, hidden: int, inner: int, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    native, in_torch = _both(kernels, kind, "bf16", (4, hidden, inner), bias)
    x = torch.randn(tokens, hidden).bfloat16()
    index, share = _routing(tokens, 4, 2)
    _assert_near(native(x, index, share), in_torch(x, index, share), "bf16")


@settings(max_examples=20)
@given(rows=st.integers(1, 90), columns=st.integers(1, 1100), tokens=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_linear_rows_are_near_torch(kernels: NativeKernels, rows: int, columns: int, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(rows, columns).bfloat16(), torch.randn(tokens, columns).bfloat16()
    out, struct = torch.full((tokens, rows), torch.nan).bfloat16(), plain_struct(weight)
    places = x.data_ptr(), None, 0, out.data_ptr()
    assert kernels.linear_rows(kernels.pool, ctypes.addressof(struct), tokens, *places) == 0
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), wanted, rtol=0.005, atol=0.002 * columns**0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_4096_tokens_of_which_most_want_one_expert(kernels: NativeKernels, precision: str) -> None:
    torch.manual_seed(3)
    native, in_torch = _both(kernels, "silu", precision, (6, 64, 48), bias=False)
    x = torch.randn(4096, 64).bfloat16()
    index = torch.zeros(4096, 1, dtype=torch.long)
    index[:5] = torch.tensor([[4], [6], [2], [4], [7]])  # 6 and 7 are nobody, 1, 3 and 5 are empty
    share = torch.rand(4096, 1)
    _assert_near(native(x, index, share), in_torch(x, index, share), precision)


def test_nobody_is_wanted(kernels: NativeKernels) -> None:
    native, _ = _both(kernels, "silu", "bf16", (2, 64, 32), bias=True)
    assert not native(torch.ones(20, 64).bfloat16(), torch.full((20, 2), 2), torch.ones(20, 2)).any()


@any_two(
    {"kernels": _ISAS, "precision": PRECISIONS, "value": [float("inf"), float("-inf"), float("nan"), 1e-40]},
    ["kernels"],
)
def test_what_is_not_finite_stays_in_its_token(kernels: NativeKernels, precision: str, value: float) -> None:
    torch.manual_seed(5)
    native, in_torch = _both(kernels, "silu", precision, (2, 96, 64), bias=False)
    x = torch.randn(40, 96).bfloat16()
    index, share = _routing(40, 2, 2)
    clean = native(x, index, share)
    x[7, 5] = value
    got, wanted = native(x, index, share), in_torch(x, index, share)
    others = torch.arange(40) != 7
    assert torch.equal(got[others], clean[others])
    if value != 1e-40:
        assert torch.equal(got[7].isfinite(), wanted[7].isfinite())
    else:
        _assert_near(got, wanted, precision)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_threads_do_not_matter(precision: str) -> None:
    torch.manual_seed(6)
    outs = []
    for threads in (1, 2, 5):
        torch.manual_seed(6)
        with kernels_of(_ISAS[-1], threads) as kernels:
            native, _ = _both(kernels, "silu", precision, (12, 96, 64), bias=True)
            index, share = _routing(400, 12, 4)
            outs.append(native(torch.randn(400, 96).bfloat16(), index, share))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_token_count_makes_a_step(kernels: NativeKernels, precision: str) -> None:
    """One expert of 1 to 70 tokens: the same numbers whichever kernel takes them."""
    torch.manual_seed(7)
    native, _ = _both(kernels, "silu", precision, (1, 128, 64), bias=False)
    x, share = torch.randn(70, 128).bfloat16(), torch.rand(70, 1)
    index = torch.zeros(70, 1, dtype=torch.long)
    whole = native(x, index, share)
    for tokens in (1, 2, 3, 4, 7, 8, 9, 11, 12, 15, 16, 17, 31, 32, 33, 48, 64):
        _assert_near(native(x[:tokens], index[:tokens], share[:tokens]), whole[:tokens], precision)
