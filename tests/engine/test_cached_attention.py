"""A few tokens' attention over what is held: the native kernels against torch, and pages against a cache.

For every instruction set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, Piece, Pieces
from engine.kernels.native.structs import AttentionStruct, LatentAttentionStruct, MatrixStruct, PagesStruct
from engine.runtime.fast_path.native_attention import ClaimedPage
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
    page = ClaimedPage.apart()
    place = (rows[0].data_ptr(), rows[1].data_ptr(), *layer.scales, rows[0].shape[2], int(kv_type), None)
    failed = kernels.attention_step(
        *(kernels.pool, ctypes.addressof(struct), *page.take((place, held), 1)),
        *(x.data_ptr(), still.data_ptr(), turned.data_ptr(), 1, 0, out.data_ptr()),
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


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


class _Held:
    """Keys and values in pages, or in one page for each sequence."""

    def __init__(self, kv_type: KvType, heads: int, dims: tuple[int, int], pages: int, page_tokens: int) -> None:
        self.kv_type, self.page_tokens = kv_type, page_tokens
        shape = (pages, heads, page_tokens)
        states = [torch.empty(*shape, dim, dtype=kv_type.dtype) for dim in dims]
        for tensor in states:  # what nobody wrote must not be read
            tensor.view(torch.uint8).fill_(255)
        scales = [torch.full(shape, torch.nan) for _ in dims] if kv_type is KvType.INT8 else []
        self.parts = [*states, *scales]

    def struct(self, page: int = 0, window: int = 0, kept: int = 0) -> PagesStruct:
        places = [part[page].data_ptr() for part in self.parts]
        scales = places[2:] or [None, None]
        return PagesStruct(*places[:2], *scales, self.page_tokens, int(self.kv_type), window, kept)

    def take(self, other: _Held, page: int, pages: torch.Tensor, tokens: int) -> None:
        """The first tokens of another's page, in these pages."""
        for mine, its in zip(self.parts, other.parts, strict=True):
            for token in range(tokens):
                place, slot = divmod(token, self.page_tokens)
                mine[int(pages[place]), :, slot] = its[page, :, token]

    def tokens(self, pages: torch.Tensor, begin: int, end: int) -> list[torch.Tensor]:
        """What was written of these tokens."""
        return [
            torch.stack(
                [part[int(pages[at // self.page_tokens]), :, at % self.page_tokens] for at in range(begin, end)]
            )
            for part in self.parts
        ]


def _filled(kv_type: KvType, heads: int, dims: tuple[int, int], lengths: list[int], room: int) -> _Held:
    held = _Held(kv_type, heads, dims, len(lengths), room)
    for page, length in enumerate(lengths):
        for part in held.parts[:2]:
            random = torch.randn(part[page, :, :length].shape)
            part[page, :, :length] = (random * 40 if kv_type is KvType.INT8 else random).to(part.dtype)
        for part in held.parts[2:]:
            part[page, :, :length] = torch.rand(heads, length) / 40
    return held


def _assert_pages_are_as_a_cache(
    kernels: NativeKernels,
    step: Any,
    address: int,
    cache: _Held,
    lengths: list[int],
    tokens: list[int],
    hidden: int,
    angles: int,
    window: tuple[int, int] = (0, 0),
) -> None:
    """Tokens of several sequences in one call over pages, against a call for each sequence over its cache."""
    counts = [-(-(length + new) // PAGE_TOKENS) for length, new in zip(lengths, tokens, strict=True)]
    order = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    pages = [places.contiguous() for places in order]
    heads, dims = cache.parts[0].shape[1], (cache.parts[0].shape[-1], cache.parts[1].shape[-1])
    paged = _Held(cache.kv_type, heads, dims, sum(counts), PAGE_TOKENS)
    for row, length in enumerate(lengths):
        paged.take(cache, row, pages[row], length)
    x = torch.randn(sum(tokens), hidden)
    cos, sin = torch.randn(2, sum(tokens), angles)

    def call(held: PagesStruct, piece: int, count: int, begin: int, end: int) -> torch.Tensor:
        out = torch.empty(end - begin, hidden)
        states = [x[begin:end].data_ptr(), cos[begin:end].data_ptr(), sin[begin:end].data_ptr()]
        where = (ctypes.addressof(held), piece, count)
        assert not step(kernels.pool, address, *where, *states, 1, angles, out.data_ptr())
        return out

    pieces = Pieces([Piece(*each) for each in zip(pages, lengths, tokens, strict=True)])
    got = call(paged.struct(0, *window), pieces.address, len(tokens), 0, len(x))
    begin = 0
    for row, new in enumerate(tokens):
        one, its = ClaimedPage.apart(), cache.struct(row, *window)
        _, piece, count = one.take(((0, 0, None, None, 0, 0, None), lengths[row]), new)
        wanted = call(its, piece, count, begin, begin + new)
        assert torch.equal(got[begin : begin + new], wanted)
        written = lengths[row], lengths[row] + new
        mine, theirs = paged.tokens(pages[row], *written), cache.tokens(torch.tensor([row]), *written)
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
        begin += new


_LENGTHS = st.lists(
    st.tuples(st.one_of(st.integers(0, 70), st.integers(250, 1300)), st.integers(1, 3)), min_size=1, max_size=4
).filter(lambda rows: sum(new for _, new in rows) <= MAX_TOKENS)


@pytest.mark.takes_turns(2)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 3),
    together=st.integers(1, 9),
    dim=st.integers(1, 40).map(lambda half: 2 * half),
    rows=_LENGTHS,
    window=st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 400), st.integers(0, 40))),
    kv_type=st.sampled_from([KvType.BF16, KvType.FP16, KvType.INT8]),
    seed=st.integers(0, 2**31),
)
def test_pages_anywhere_give_the_bits_of_a_cache(
    kernels: NativeKernels,
    groups: int,
    together: int,
    dim: int,
    rows: list[tuple[int, int]],
    window: tuple[int, int],
    kv_type: KvType,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, hidden = groups * together, 16
    q, k, v = (_linear(torch.randn(count * dim, hidden) / 4) for count in (heads, groups, groups))
    o, norm = _linear(torch.randn(hidden, heads * dim)), torch.ones(hidden, dtype=torch.bfloat16)
    struct = AttentionStruct(
        norm.data_ptr(),
        *([None] * 8),
        *(linear_struct(p) for p in (q, k, v, o)),
        *(1e-6, dim**-0.5, hidden, heads, groups, dim, False, False, dim),
    )
    lengths, tokens = [length for length, _ in rows], [new for _, new in rows]
    room = -(-(max(lengths) + MAX_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
    cache = _filled(kv_type, groups, (dim, dim), lengths, room)
    _assert_pages_are_as_a_cache(
        *(kernels, kernels.attention_step, ctypes.addressof(struct), cache, lengths, tokens, hidden, dim // 2, window)
    )


@pytest.mark.takes_turns(2)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.integers(1, 9),
    nope=st.integers(1, 30),
    rope=st.integers(1, 12).map(lambda half: 2 * half),
    rank=st.integers(1, 90),
    rows=_LENGTHS,
    seed=st.integers(0, 2**31),
)
def test_latents_in_pages_anywhere_give_the_bits_of_a_cache(
    kernels: NativeKernels, heads: int, nope: int, rope: int, rank: int, rows: list[tuple[int, int]], seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, value_dim = 16, 12
    q, kv_a = _linear(torch.randn(heads * (nope + rope), hidden) / 4), _linear(torch.randn(rank + rope, hidden) / 4)
    kv_b, o = _linear(torch.randn(heads * (nope + value_dim), rank)), _linear(torch.randn(hidden, heads * value_dim))
    norms = [torch.ones(width, dtype=torch.bfloat16) for width in (hidden, rank)]
    none = MatrixStruct()
    struct = LatentAttentionStruct(
        *(norms[0].data_ptr(), None, norms[1].data_ptr(), None, None, None),
        *(none, linear_struct(q), linear_struct(kv_a), linear_struct(kv_b), none, none, linear_struct(o)),
        *(1e-6, 1e-6, 1e-6, (nope + rope) ** -0.5, hidden, heads, nope, rope, rank, value_dim, 0),
    )
    lengths, tokens = [length for length, _ in rows], [new for _, new in rows]
    cache = _filled(KvType.BF16, 1, (rank, rope), lengths, max(lengths) + MAX_TOKENS)
    _assert_pages_are_as_a_cache(
        *(kernels, kernels.latent_step, ctypes.addressof(struct), cache, lengths, tokens, hidden, rope // 2)
    )
