"""Attention over pages: the native kernels against torch, for every instruction set that works here."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
    attend,
)
from engine.kernels.reference import attend_in_torch
from tests.engine.int8_ties import without_ties
from tests.engine.native_isas import isas, kernels_of

ISAS = [isa for isa in isas() if isa in (Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_BF16)] or isas()[:1]
"""The others compute attention as one of these does."""


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=2) as found:
        yield found


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
    kernels: NativeKernels, kv_type: KvType, dtype: torch.dtype, shape: KvShape, terms: AttentionTerms
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
