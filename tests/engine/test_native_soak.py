"""Ten thousand random cases of each kind of work, by every kernel set, against the reference.

Sizes are odd, or beside the multiples that vectors, tiles and pages have. What fails names its seed.
"""

import ctypes
import random
from collections.abc import Callable

import pytest
import torch

from engine.formats import FORMATS, GROUP, TiledFormat
from engine.formats.tiles import dequantise
from engine.kernels import choose_kernel
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.paged_attention import AttentionTerms, KvShape, KvType
from engine.kernels.native.structs import matrix_struct, plain_struct
from engine.kernels.reference import reference_experts
from engine.kernels.repack import quantise
from tests.engine.int8_ties import without_ties
from tests.engine.native_isas import isas, kernels_of
from tests.engine.test_cached_attention import ISAS as OF_ATTENTION
from tests.engine.test_cached_attention import assert_as_in_torch, assert_prompt_as_in_torch, assert_step_as_in_torch
from tests.engine.test_quantised_experts import (
    HALF_PLAIN,
    KINDS,
    PRECISIONS,
    ThroughInt8,
    _assert_near,
    _layer,
    _module,
    _summed,
    _through_int8,
)

_CASES, _CASES_OF_A_SEED = 10_000, 10
_ALL = isas()


def try_experts(kernels: NativeKernels, draw: random.Random) -> None:
    """A layer of experts: any activation, format, routing and number of tokens."""
    kind, precision = draw.choice(KINDS), draw.choice([*PRECISIONS, HALF_PLAIN])
    most = draw.choice([40, 130, 400])
    experts, hidden, inner = draw.randint(1, 7), _size(draw, most), _size(draw, most)
    module = _module(kind, experts, hidden, inner, bias=draw.random() < 0.5)
    layer, meant = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert isinstance(kernel, NativeExperts)
    for _ in range(_CASES_OF_A_SEED):
        # Few tokens are multiplied one by one, four together, or in matrices.
        tokens = draw.choice([1, 1, draw.randint(2, MAX_TOKENS), draw.randint(MAX_TOKENS + 1, 40)])
        width = draw.randint(1, experts)
        # Ids one above the experts belong to nobody.
        index = torch.rand(tokens, experts + 1).argsort(1)[:, :width]
        share, x = torch.rand(tokens, width), torch.randn(tokens, hidden).bfloat16()
        summed = _summed(module, meant, x.float(), index, share)
        got = kernel(x, index, share)
        if precision == "bf16":
            wanted = reference_experts(module, meant, x.float(), index, share)
        else:
            wanted = reference_experts(ThroughInt8(module), meant, _through_int8(x.float()), index, share)
        _assert_near(got, wanted, meant, summed)


def try_matrix(kernels: NativeKernels, draw: random.Random) -> None:
    """A matrix of any format times one token, few and many, with a bias or without."""
    most = draw.choice([40, 130, 700])
    rows, columns = _size(draw, most), _size(draw, most)
    weight, bias = torch.randn(rows, columns).bfloat16(), torch.randn(rows).bfloat16()
    tiled = draw.choice([None, *(each for each in FORMATS.values() if isinstance(each, TiledFormat))])
    if tiled is None or tiled.native is None:
        matrix, meant = None, weight.float()
    else:
        matrix = quantise(weight, tiled, kernels=kernels)
        meant = dequantise(matrix, torch.float32)
    struct = plain_struct(weight) if matrix is None else matrix_struct(matrix)
    for _ in range(_CASES_OF_A_SEED):
        tokens = draw.choice([1, 1, draw.randint(2, 8), draw.randint(9, 90)])
        multiply = kernels.linear if tokens <= draw.choice([8, 90]) else kernels.linear_rows
        adds = draw.random() < 0.5
        x = without_ties(torch.randn(tokens, columns).bfloat16(), GROUP)
        out = torch.empty(tokens, rows, dtype=torch.bfloat16)
        added = bias.data_ptr() if adds else None
        assert not multiply(kernels.pool, ctypes.addressof(struct), tokens, x.data_ptr(), added, 0, out.data_ptr())
        seen = x.float() if matrix is None else _through_int8(x.float())
        offset = bias.float() if adds else torch.zeros(rows)
        wanted = torch.nn.functional.linear(seen, meant, offset)
        added_up = torch.nn.functional.linear(seen.abs(), meant.abs(), offset.abs())
        allowed = 0.005 * wanted.abs() + 1e-3 * added_up  # roundings of the result and of sums
        off = (out.float() - wanted).abs()
        worst = float((off / allowed.clamp(min=1e-30)).max())
        assert worst <= 1, f"{worst} times what is allowed, {rows} x {columns}, {tokens} tokens, {tiled}"


def try_pages(kernels: NativeKernels, draw: random.Random) -> None:
    """Attention over pages: any heads, windows, sinks and types of what is held."""
    for _ in range(_CASES_OF_A_SEED):
        kv_heads = draw.randint(1, 3)
        heads = kv_heads * draw.choice([1, 2, draw.randint(1, 16)])
        key_dim, value_dim = _size(draw, draw.choice([20, 40, 80])), _size(draw, draw.choice([20, 40, 140]))
        window, sinks = draw.choice([0, draw.randint(1, 200)]), torch.randn(heads) if draw.random() < 0.5 else None
        softcap, kept = draw.choice([0.0, 0.0, 5.0]), draw.randint(0, 40) if window else 0
        terms = AttentionTerms(key_dim**-0.5, softcap=softcap, window=window, kept=kept, sinks=sinks)
        kv_type, dtype = draw.choice(list(KvType)), draw.choice([torch.bfloat16, torch.float32])
        held, tokens = (
            draw.choice([0, _size(draw, 70), _size(draw, 200)]),
            draw.choice([1, 1, 2, _size(draw, 12), _size(draw, 40)]),
        )
        assert_as_in_torch(kernels, kv_type, dtype, KvShape(heads, kv_heads, key_dim, value_dim), terms, held, tokens)


def try_step(kernels: NativeKernels, draw: random.Random) -> None:
    """A token's attention over its cache."""
    for _ in range(_CASES_OF_A_SEED):
        assert_step_as_in_torch(
            kernels,
            groups=draw.randint(1, 3),
            together=draw.randint(1, 19),
            dim=2 * _size(draw, draw.choice([16, 80])),
            held=draw.choice([0, _size(draw, 100), _size(draw, 100), _size(draw, 1300)]),
            sharpness=draw.choice([0.2, 3.0, 40.0]),
            has_sinks=draw.random() < 0.5,
            kv_type=draw.choice([KvType.BF16, KvType.FP16, KvType.INT8]),
            room=draw.randint(0, 2),
        )


def try_prompt(kernels: NativeKernels, draw: random.Random) -> None:
    """A prompt's attention, with what came before it."""
    for _ in range(_CASES_OF_A_SEED):
        assert_prompt_as_in_torch(
            kernels,
            kv_heads=draw.randint(1, 3),
            group=draw.choice([1, 2, 3, 8]),
            key_dim=_size(draw, draw.choice([40, 140])),
            value_dim=_size(draw, draw.choice([40, 140])),
            tokens=_size(draw, draw.choice([10, 150])),
            before=draw.choice([0, 1, _size(draw, 300)]),
            window=draw.choice([None, 1, draw.randint(2, 200)]),
            masked=draw.random() < 0.5,
        )


def _size(draw: random.Random, most: int) -> int:
    """Any, or one beside a multiple of what the kernels take at once."""
    beside = draw.choice([4, 16, 32, 64]) * draw.randint(1, 8) + draw.choice([-1, 0, 1])
    return draw.randint(1, most) if beside > most or draw.random() < 0.5 else beside


Work = Callable[[NativeKernels, random.Random], None]
SETS: dict[Work, list[Isa]] = {
    try_experts: _ALL,
    try_matrix: _ALL,
    try_prompt: _ALL,
    try_pages: OF_ATTENTION,
    try_step: OF_ATTENTION,
}
"""Which sets compute each kind of work in a way of their own."""


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("work", "isa"),
    [(work, isa) for work, sets in SETS.items() for isa in sets],
    ids=lambda each: each.name.lower() if isinstance(each, Isa) else each.__name__.removeprefix("try_"),
)
def test_ten_thousand_cases_are_near_the_reference(work: Work, isa: Isa) -> None:
    draw = random.SystemRandom()
    for _ in range(_CASES // _CASES_OF_A_SEED):
        try_seed(work, isa, draw.randrange(2**31))


def try_seed(work: Work, isa: Isa, seed: int) -> None:
    """The cases of one seed.

    Raises:
        AssertionError: one is not near the reference.
    """
    torch.manual_seed(seed)
    with kernels_of(isa, threads=(1, 1, 2, 2, 4)[seed % 5]) as kernels, torch.no_grad():
        try:
            work(kernels, random.Random(seed))
        except AssertionError as wrong:
            wrong.add_note(f"{work.__name__} by {isa.name}, seed {seed}")
            raise
