"""Attention over pages: the native kernels against torch, for every instruction set that works here."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

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
from tests.engine.native_isas import isas, kernels_of

_ISAS = [isa for isa in isas() if isa in (Isa.PORTABLE, Isa.AVX2, Isa.AVX512)] or isas()[:1]
"""The others compute attention as one of these does."""


@pytest.fixture(params=_ISAS, ids=lambda isa: isa.name)
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
        self.states = [[torch.randn(length, *of).to(dtype) for of in heads] for length in lengths]

    def step(self, cut: list[tuple[int, int]]) -> tuple[Pieces, list[torch.Tensor]]:
        """The tokens [begin, end) of each sequence that has any."""
        some = [(i, begin, end) for i, (begin, end) in enumerate(cut) if end > begin]
        pieces = Pieces([Piece(self.pages[i], begin, end - begin) for i, begin, end in some])
        return pieces, [torch.cat([self.states[i][part][begin:end] for i, begin, end in some]) for part in range(3)]


def _tolerance(kv_type: KvType, dtype: torch.dtype) -> float:
    return 0.02 if dtype == torch.bfloat16 else 2e-5 if kv_type is not KvType.INT8 else 2e-4


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
