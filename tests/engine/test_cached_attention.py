"""Attention over caches, pages and prompts: the native kernels against torch, for every instruction set."""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import linear_struct
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
    attend,
    attend_prompt,
)
from engine.kernels.native.structs import AttentionStruct, LatentAttentionStruct, MatrixStruct, PagesStruct, PieceStruct
from engine.kernels.reference import attend_in_torch
from engine.runtime.kv.library_attention import speed_up_prompts
from engine.runtime.kv.paged_cache import narrowed, widened
from tests.engine.int8_ties import without_ties
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
    capacity = -(-(held + 1 + room) // PAGE_TOKENS) * PAGE_TOKENS  # kernels read scales by whole pages
    rows = [torch.empty(groups, capacity, dim, dtype=kv_type.dtype) for _ in range(2)]
    scales = [torch.zeros(groups, capacity) if kv_type is KvType.INT8 else None for _ in range(2)]
    for part, its, states in zip(rows, scales, torch.randn(2, groups, held, dim).bfloat16(), strict=True):
        part.view(torch.uint8).fill_(255)  # what nobody wrote must not be read
        part[:, :held], found = narrowed(states, kv_type)
        if its is not None and found is not None:
            its[:, :held] = found
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
    where = [None if part is None else part.data_ptr() for part in (*rows, *scales)]
    page, piece = PagesStruct(*where, capacity, int(kv_type)), PieceStruct(held=held, tokens=1)
    failed = kernels.attention_step(
        *(kernels.pool, ctypes.addressof(struct), ctypes.addressof(page), ctypes.addressof(piece), 1),
        *(x.data_ptr(), still.data_ptr(), turned.data_ptr(), 1, 0, out.data_ptr()),
    )
    assert not failed

    normed = x * torch.rsqrt(x.square().mean() + 1e-6)
    queries = (q.weight.float() @ normed).view(groups, together, dim)
    held_keys, held_values = (
        widened(part[:, : held + 1], None if its is None else its[:, : held + 1], torch.float32)
        for part, its in zip(rows, scales, strict=True)
    )
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

    def take(self, other: "_Held", page: int, pages: torch.Tensor, tokens: int) -> None:
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
    held = paged.struct(0, *window)
    got = call(held, pieces.address_for(held), len(tokens), 0, len(x))
    begin = 0
    for row, new in enumerate(tokens):
        piece = PieceStruct(held=lengths[row], tokens=new)
        wanted = call(cache.struct(row, *window), ctypes.addressof(piece), 1, begin, begin + new)
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


class _Sequences:
    """Sequences of random lengths whose pages lie anywhere; states come as the caller asks for them."""

    def __init__(self, shape: KvShape, kv_type: KvType, lengths: list[int], dtype: torch.dtype) -> None:
        self.shape, self.lengths, self.dtype = shape, lengths, dtype
        counts = [-(-length // PAGE_TOKENS) for length in lengths]
        order = torch.randperm(sum(counts), dtype=torch.int32)
        self.pages = [pages.contiguous() for pages in order.split(counts)]
        self.native, self.torch = (PagedLayer(shape, kv_type, sum(counts)) for _ in range(2))
        for layer in (self.native, self.torch):  # what nobody wrote must not be read
            for tensor in (layer.keys, layer.values):
                tensor.view(torch.uint8).fill_(255)
        heads = ((shape.heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
        self.states = [[without_ties(torch.randn(length, *of).to(dtype)) for of in heads] for length in lengths]

    def step(self, cut: list[tuple[int, int]]) -> tuple[Pieces, list[torch.Tensor]]:
        """The tokens [begin, end) of each sequence that has any."""
        some = [(i, begin, end) for i, (begin, end) in enumerate(cut) if end > begin]
        pieces = Pieces([Piece(self.pages[i], begin, end - begin) for i, begin, end in some])
        return pieces, [torch.cat([self.states[i][part][begin:end] for i, begin, end in some]) for part in range(3)]


def _tolerance(kv_type: KvType, dtype: torch.dtype) -> float:
    return 0.02 if dtype == torch.bfloat16 else 2e-5 if kv_type is not KvType.INT8 else 2e-4


def assert_as_in_torch(
    kernels: NativeKernels,
    kv_type: KvType,
    dtype: torch.dtype,
    shape: KvShape,
    terms: AttentionTerms,
    held: int,
    tokens: int,
) -> None:
    """A sequence of random states: those held come in one step, the others in a second one."""
    sequences = _Sequences(shape, kv_type, [held + tokens], dtype)
    struct = sequences.native.struct(terms)
    for begin, end in ((0, held), (held, held + tokens)):
        if begin == end:
            continue
        pieces, states = sequences.step([(begin, end)])
        got = attend(kernels, struct, pieces, *states)
        wanted = attend_in_torch(sequences.torch, terms, pieces, *states)
        torch.testing.assert_close(got, wanted, atol=_tolerance(kv_type, dtype), rtol=_tolerance(kv_type, dtype))


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("kv_type", list(KvType))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "terms"),
    [
        (KvShape(9, 3, 64, 64), AttentionTerms(0.125)),
        (KvShape(8, 8, 24, 24), AttentionTerms(0.3, window=40)),
        (KvShape(32, 2, 32, 16), AttentionTerms(0.2, window=7, kept=3)),
        (KvShape(6, 2, 40, 72), AttentionTerms(0.2, softcap=5.0)),
        (KvShape(8, 1, 16, 20), AttentionTerms(0.25, window=33, sinks=torch.linspace(-2, 2, 8))),
    ],
)
def test_every_step_is_as_in_torch(
    kernels: NativeKernels,
    kv_type: KvType,
    dtype: torch.dtype,
    shape: KvShape,
    terms: AttentionTerms,
) -> None:
    lengths = [1, 31, 32, 33, 100]
    sequences = _Sequences(shape, kv_type, lengths, dtype)
    struct = sequences.native.struct(terms)
    at = [0] * len(lengths)
    for _ in range(4):
        until = [random.randint(begin, length) for begin, length in zip(at, lengths, strict=True)]
        if not any(end > begin for begin, end in zip(at, until, strict=True)):
            continue
        pieces, states = sequences.step(list(zip(at, until, strict=True)))
        at = until
        got = attend(kernels, struct, pieces, *states)
        wanted = attend_in_torch(sequences.torch, terms, pieces, *states)
        torch.testing.assert_close(got, wanted, atol=_tolerance(kv_type, dtype), rtol=_tolerance(kv_type, dtype))


@pytest.mark.takes_turns(2)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kv_type=st.sampled_from(list(KvType)),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    kv_heads=st.integers(1, 3),
    together=st.integers(1, 16),
    key_dim=st.one_of(st.integers(1, 80), st.sampled_from([64, 96, 128, 192, 256])),
    value_dim=st.one_of(st.integers(1, 80), st.sampled_from([64, 128, 256])),
    window=st.one_of(st.just(0), st.integers(1, 200)),
    kept=st.integers(0, 40),
    has_sinks=st.booleans(),
    held=st.integers(0, 600),
    tokens=st.integers(1, 40),
)
def test_any_shape_is_as_in_torch(
    kernels: NativeKernels,
    kv_type: KvType,
    dtype: torch.dtype,
    kv_heads: int,
    together: int,
    key_dim: int,
    value_dim: int,
    window: int,
    kept: int,
    has_sinks: bool,
    held: int,
    tokens: int,
) -> None:
    heads = kv_heads * together
    sinks = torch.linspace(-1, 1, heads) if has_sinks else None
    terms = AttentionTerms(key_dim**-0.5, window=window, kept=kept if window else 0, sinks=sinks)
    assert_as_in_torch(kernels, kv_type, dtype, KvShape(heads, kv_heads, key_dim, value_dim), terms, held, tokens)


@pytest.mark.parametrize("kv_type", list(KvType))
def test_a_sequence_gets_the_same_bits_whatever_is_beside_it(kernels: NativeKernels, kv_type: KvType) -> None:
    shape, terms, lengths = KvShape(6, 2, 32, 32), AttentionTerms(0.2, window=50), [70, 3, 40]
    together = _Sequences(shape, kv_type, lengths, torch.float32)
    struct = together.native.struct(terms)
    pieces, states = together.step([(0, length) for length in lengths])
    at_once = attend(kernels, struct, pieces, *states)[: lengths[0]]
    alone = []
    for token in range(lengths[0]):
        pieces, states = together.step([(token, token + 1), (0, 0), (0, 0)])
        alone.append(attend(kernels, struct, pieces, *states))
    assert torch.equal(at_once, torch.cat(alone))


ALL_ISAS = isas()


@pytest.fixture(scope="module", params=ALL_ISAS, ids=lambda isa: isa.name)
def all_kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=int(isa) % 3 + 1) as held_back:
        yield held_back


def _reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sees: torch.Tensor
) -> torch.Tensor:
    group = queries.shape[0] // keys.shape[0]
    keys, values = (each.float().repeat_interleave(group, 0) for each in (keys, values))
    scores = (queries.float() @ keys.transpose(1, 2) * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def _causal(tokens: int, held: int, window: int | None = None) -> torch.Tensor:
    place, key = torch.arange(held - tokens, held)[:, None], torch.arange(held)[None]
    return (key <= place) & (key > place - window if window is not None else key >= 0)


def assert_prompt_as_in_torch(
    all_kernels: NativeKernels,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    before: int,
    window: int | None,
    masked: bool,
) -> None:
    held = before + tokens
    # As caches and projections have them: heads within tokens, and room for more tokens.
    queries = torch.randn(tokens, kv_heads * group, key_dim).bfloat16().transpose(0, 1)
    keys = torch.randn(kv_heads, held + 7, key_dim).bfloat16()[:, :held]
    values = torch.randn(held, kv_heads, value_dim).bfloat16().transpose(0, 1)
    sees = _causal(tokens, held, window)
    scale = key_dim**-0.5
    got = attend_prompt(all_kernels, queries, keys, values, scale, sees if masked or window is not None else None)
    torch.testing.assert_close(got.float(), _reference(queries, keys, values, scale, sees), atol=3e-2, rtol=3e-2)


@settings(max_examples=10)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    key_dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    tokens=st.integers(1, 150),
    before=st.sampled_from([0, 1, 100, 300]),
    window=st.sampled_from([None, 1, 40, 1000]),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_prompts_attend_as_torch_does(
    all_kernels: NativeKernels,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    before: int,
    window: int | None,
    masked: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    assert_prompt_as_in_torch(all_kernels, kv_heads, group, key_dim, value_dim, tokens, before, window, masked)


def test_large_scores_neither_overflow_nor_vanish(all_kernels: NativeKernels) -> None:
    torch.manual_seed(2)
    queries, keys, values = (torch.randn(2, 200, 64).bfloat16() for _ in range(3))
    queries, keys = 30 * queries, 30 * keys
    got = attend_prompt(all_kernels, queries, keys, values, 1.0)
    wanted = _reference(queries, keys, values, 1.0, _causal(200, 200))
    torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)


def test_what_is_no_range_is_left_to_torch(all_kernels: NativeKernels) -> None:
    states = torch.randn(1, 20, 32).bfloat16()
    sees = _causal(20, 20)
    sees[15, 3] = False
    assert attend_prompt(all_kernels, states, states, states, 1.0, sees) is None
    assert attend_prompt(all_kernels, states, states, states, 1.0, torch.zeros(20, 20, dtype=torch.bool)) is None


def test_threads_do_not_matter() -> None:
    torch.manual_seed(3)
    queries, keys, values = (torch.randn(heads, 333, 64).bfloat16() for heads in (8, 2, 2))
    outs = []
    for threads in (1, 2, 5):
        with kernels_of(ALL_ISAS[-1], threads) as these:
            outs.append(attend_prompt(these, queries, keys, values, 0.125))
    assert outs[0] is not None
    for out in outs[1:]:
        assert out is not None
        assert torch.equal(outs[0], out)


@pytest.mark.parametrize("window", [None, 24])
def test_a_model_reads_its_prompt_as_before(all_kernels: NativeKernels, window: int | None) -> None:
    """In one piece and continued, with and without a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    model = MistralForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, 100, (1, 120))
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits.float()
        taken = speed_up_prompts(model, all_kernels)
        assert bool(taken) == (all_kernels.isa is not Isa.PORTABLE)
        # Families of the library look at this name, and leave the masks of sparse attention out under any other.
        assert model.config._attn_implementation == "sdpa"
        whole = model(input_ids=ids).logits.float()
        first = model(input_ids=ids[:, :70], use_cache=True)
        second = model(input_ids=ids[:, 70:], cache=first.cache, use_cache=True)
        pieces = torch.cat([first.logits, second.logits], 1).float()
    torch.testing.assert_close(whole, wanted, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(pieces, wanted, atol=3e-2, rtol=3e-2)
