"""Ten thousand random cases of every kernel set against the reference: odd sizes, routings, activations."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels import choose_kernel
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.reference import reference_experts
from tests.engine.native_isas import isas, kernels_of
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

_ISAS = isas()
_CASES, _CASES_OF_A_LAYER = 10_000, 25


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name.lower())
def test_ten_thousand_cases_are_near_the_reference(isa: Isa) -> None:
    seed = random.SystemRandom().randrange(2**31)
    draw = random.Random(seed)
    for number in range(_CASES // _CASES_OF_A_LAYER):
        of_this = draw.randrange(2**31)
        with kernels_of(isa, threads=number % 4 + 1) as kernels, torch.no_grad():
            _try_layer(kernels, of_this)


def _try_layer(kernels: NativeKernels, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind, precision = draw.choice(KINDS), draw.choice([*PRECISIONS, HALF_PLAIN])
    experts, most = draw.randint(1, 7), draw.choice([40, 130, 400])
    hidden, inner = draw.randint(1, most), draw.randint(1, most)
    module = _module(kind, experts, hidden, inner, bias=draw.random() < 0.5)
    layer, meant = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert isinstance(kernel, NativeExperts)
    for case in range(_CASES_OF_A_LAYER):
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
        try:
            _assert_near(got, wanted, meant, summed)
        except AssertionError as wrong:
            what = f"{precision} {kind}, {experts} x {hidden} x {inner}, {tokens} tokens"
            raise AssertionError(f"case {case} of seed {seed} ({what}): {wrong}") from wrong
