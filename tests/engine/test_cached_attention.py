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
from engine.kernels.native.paged_attention import KvType
from engine.kernels.native.structs import AttentionStruct
from engine.runtime.kv.narrow import NarrowLayer
from tests.engine.native_isas import isas, kernels_of

ISAS = [isa for isa in isas() if isa in (Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_BF16)] or isas()[:1]
"""The others compute it as one of these does."""


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=2) as found:
        yield found


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
    return layer


def assert_step_as_in_torch(
    kernels: NativeKernels,
    groups: int,
    together: int,
    dim: int,
    held: int,
    sharpness: float,
    has_sinks: bool,
    kv_type: KvType,
    room: int,
) -> None:
    """`room` is that for more tokens than the one that comes."""
    heads, hidden = groups * together, 16
    q, k, v = (_linear(torch.randn(count * dim, hidden) / 4) for count in (heads, groups, groups))
    o = _linear(torch.randn(hidden, heads * dim))
    sinks = torch.randn(heads).bfloat16() if has_sinks else None
    layer = NarrowLayer(kv_type, held + 1 + room)
    layer.update(*torch.randn(2, 1, groups, held, dim).bfloat16())
    rows = layer.claim_rows(1)
    assert rows is not None
    for rest in rows[:2]:  # what nobody wrote must not be read
        rest[:, :, held:].view(torch.uint8).fill_(255)
    x, norm = torch.randn(hidden), torch.ones(hidden, dtype=torch.bfloat16)
    scale = sharpness * dim**-0.5
    struct = AttentionStruct(
        norm.data_ptr(),
        *([None] * 6),
        None if sinks is None else sinks.data_ptr(),
        None,
        *(linear_struct(p) for p in (q, k, v, o)),
        *(1e-6, scale, hidden, heads, groups, dim, False, False, dim),
    )
    still, turned = torch.ones(dim // 2), torch.zeros(dim // 2)
    out = torch.empty_like(x)
    failed = kernels.attention_step(
        *(kernels.pool, ctypes.addressof(struct), 1, x.data_ptr(), still.data_ptr(), turned.data_ptr(), 1, 0),
        *(int(kv_type), rows[0].data_ptr(), rows[1].data_ptr(), *layer.scales, rows[0].shape[2], held, out.data_ptr()),
    )
    assert not failed

    normed = x * torch.rsqrt(x.square().mean() + 1e-6)
    queries = (q.weight.float() @ normed).view(groups, together, dim)
    layer.dtype = torch.float32  # what is held, not rounded to bf16
    held_keys, held_values = (states[0].float() for states in (layer.keys, layer.values))
    near = 0.03 if kv_type is KvType.INT8 else 0.01
    torch.testing.assert_close(held_keys[:, held].flatten(), k.weight.float() @ normed, rtol=near, atol=near)
    scores = queries @ held_keys.mT * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(groups, together, 1)], -1)
    wanted = scores.softmax(-1)[..., : held + 1] @ held_values
    change = o.weight.float() @ wanted.flatten()
    assert (out - x - change).norm() < 0.02 * change.norm() + 1e-3


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 3),
    together=st.integers(1, 19),
    dim=st.integers(1, 80).map(lambda half: 2 * half),
    held=st.one_of(st.integers(0, 100), st.integers(200, 1300)),
    sharpness=st.sampled_from([0.2, 3.0, 40.0]),
    has_sinks=st.booleans(),
    kv_type=st.sampled_from([KvType.BF16, KvType.FP16, KvType.INT8]),
    seed=st.integers(0, 2**31),
)
@example(
    groups=1, together=8, dim=128, held=9000, sharpness=3.0, has_sinks=False, kv_type=KvType.BF16, seed=1
)  # as many chunks as there are
@example(
    groups=1, together=9, dim=2, held=256, sharpness=0.2, has_sinks=True, kv_type=KvType.INT8, seed=1
)  # a chunk of one token
def test_it_is_that_of_torch(
    kernels: NativeKernels,
    groups: int,
    together: int,
    dim: int,
    held: int,
    sharpness: float,
    has_sinks: bool,
    kv_type: KvType,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    assert_step_as_in_torch(kernels, groups, together, dim, held, sharpness, has_sinks, kv_type, room=seed % 3)
