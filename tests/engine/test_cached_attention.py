"""One token's attention over cached keys and values: the native kernels against torch, for every instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.structs import AttentionStruct
from tests.engine.native_isas import isas, kernels_of

_ISAS = [isa for isa in isas() if isa in (Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_BF16)] or isas()[:1]
"""The others compute it as one of these does."""


@pytest.fixture(scope="module", params=_ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=2) as found:
        yield found


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    return layer


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 3),
    together=st.integers(1, 19),
    dim=st.integers(1, 80).map(lambda half: 2 * half),
    held=st.one_of(st.integers(0, 100), st.integers(200, 1300)),
    sharpness=st.sampled_from([0.2, 3.0, 40.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(
    groups=1, together=8, dim=128, held=9000, sharpness=3.0, has_sinks=False, seed=1
)  # as many chunks as there are
@example(groups=1, together=9, dim=2, held=256, sharpness=0.2, has_sinks=True, seed=1)  # a chunk of one token
def test_it_is_that_of_torch(
    kernels: NativeKernels,
    groups: int,
    together: int,
    dim: int,
    held: int,
    sharpness: float,
    has_sinks: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, hidden, room = groups * together, 16, held + 1 + seed % 3
    q, k, v = (_linear(torch.randn(count * dim, hidden) / 4) for count in (heads, groups, groups))
    o = _linear(torch.randn(hidden, heads * dim))
    sinks = torch.randn(heads).bfloat16() if has_sinks else None
    keys, values = (torch.full((groups, room, dim), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    keys[:, :held], values[:, :held] = torch.randn(2, groups, held, dim).bfloat16()
    x, norm = torch.randn(hidden).bfloat16(), torch.ones(hidden, dtype=torch.bfloat16)
    scale = sharpness * dim**-0.5
    struct = AttentionStruct(
        norm.data_ptr(),
        *([None] * 6),
        None if sinks is None else sinks.data_ptr(),
        *(linear_struct(p) for p in (q, k, v, o)),
        *(1e-6, scale, hidden, heads, groups, dim, False, False),
    )
    still, turned = torch.ones(dim // 2).bfloat16(), torch.zeros(dim // 2).bfloat16()
    out = torch.empty_like(x)
    failed = kernels.attention_step(
        *(kernels.pool, ctypes.addressof(struct), 1, x.data_ptr(), still.data_ptr(), turned.data_ptr(), 0),
        *(keys.data_ptr(), values.data_ptr(), room, held, out.data_ptr()),
    )
    assert not failed

    normed = (x.float() * torch.rsqrt(x.float().square().mean() + 1e-6)).bfloat16()
    queries = q(normed).float().view(groups, together, dim)
    held_keys, held_values = (t[:, : held + 1].float() for t in (keys, values))
    torch.testing.assert_close(held_keys[:, held].flatten(), k(normed).float(), rtol=0.01, atol=0.01)
    scores = queries @ held_keys.mT * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(groups, together, 1)], -1)
    wanted = scores.softmax(-1)[..., : held + 1] @ held_values
    change = o(wanted.flatten().bfloat16()).float()
    assert (out.float() - x.float() - change).norm() < 0.02 * (change.norm() + x.float().norm())
