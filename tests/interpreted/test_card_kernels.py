"""The card's kernels in Triton's interpreter: what they compute, on any machine.  `test_interpreter.py` runs this."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("only under Triton's interpreter", allow_module_level=True)

from engine.formats import FORMATS
from engine.formats.lut4 import MXFP4_TABLE
from engine.formats.tiles import dequantise
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.products import TritonProducts
from engine.kernels.gpu.proof import prove
from engine.kernels.gpu.stored import CardKernels, group
from engine.kernels.quantise import quantise
from tests.engine.card_experts import KINDS, PRECISIONS, check, check_nobody, check_not_numbers

CPU = torch.device("cpu")
TRITON = CardKernels(TritonProducts(), TritonProducts.most_visits, TritonProducts())
EVERY_KIND = [(kind, PRECISIONS[number % len(PRECISIONS)]) for number, kind in enumerate(KINDS)]
EVERY_PRECISION = [(kind, precision) for kind in ("gpt-oss", "relu2 without gate") for precision in PRECISIONS]


@pytest.mark.parametrize(("kind", "precision"), [*EVERY_KIND, *EVERY_PRECISION])
def test_experts_of_few_visits(kind: str, precision: str) -> None:
    check(TRITON, CPU, kind, precision, tokens=2, width=2, bias=False, seed=2)


@pytest.mark.parametrize(("kind", "precision"), [*EVERY_KIND, *EVERY_PRECISION])
def test_experts_of_many_visits(kind: str, precision: str) -> None:
    check(TRITON, CPU, kind, precision, tokens=17, width=2, experts=3, seed=3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_shapes_that_are_no_multiples(precision: str) -> None:
    for hidden, inner in ((1, 1), (33, 17), (31, 65)):
        check(TRITON, CPU, "silu", precision, tokens=1, width=1, hidden=hidden, inner=inner, seed=hidden)
        check(TRITON, CPU, "silu", precision, tokens=33, width=1, experts=2, hidden=hidden, inner=inner, seed=inner)


@pytest.mark.parametrize("precision", ["bf16", "int4", "lut4"])
def test_prompts_in_big_blocks_and_in_pieces(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.gpu.experts._MANY_VISITS", 40)
    check(TRITON, CPU, "silu", precision, tokens=70, width=1, experts=2)
    monkeypatch.setattr("engine.kernels.gpu.experts._INNER_BYTES", 0)
    check(TRITON, CPU, "silu", precision, tokens=260, width=1, experts=2)


@pytest.mark.parametrize("tokens", [1, 20])
def test_norms_and_gates_that_only_the_module_knows(tokens: int) -> None:
    check(
        TRITON, CPU, "silu", "bf16", tokens=tokens, width=2, norm=lambda out: torch.nn.functional.normalize(out, dim=-1)
    )
    check(TRITON, CPU, "own", "bf16", tokens=tokens, width=2)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_what_is_no_number_and_who_is_no_expert(precision: str) -> None:
    check_not_numbers(TRITON, CPU, precision)
    check_nobody(TRITON, CPU, precision)


def test_groups() -> None:
    ids = torch.tensor([4, 2, 2, 7, 0, 2, 4])
    groups = group(ids, 7, 2)
    assert ids[groups.order].tolist() == [0, 2, 2, 2, 4, 4, 7]
    blocks = list(zip(groups.block_expert.tolist(), groups.block_begin.tolist(), strict=True))
    assert [block for block in blocks if block[0] < 7] == [(0, 0), (2, 1), (2, 3), (4, 4)]
    assert [groups.ends.tolist()[expert] for expert in (0, 2, 4)] == [1, 4, 6]


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_linear_layers(precision: str, with_kernels: bool) -> None:
    torch.manual_seed(4)
    weight, bias = torch.randn(50, 70).bfloat16(), torch.randn(50).bfloat16()
    matrix = quantise(weight, FORMATS[precision])
    matrix.set_table(MXFP4_TABLE)  # a matrix has its own, if any
    for of_layer in (bias, None):
        forward = CardLinear(matrix, of_layer, CPU, TRITON if with_kernels else None)
        for shape in ((1, 1, 70), (3, 70), (2, 40, 70), (0, 70)):
            x = torch.randn(shape).bfloat16()
            wanted = torch.nn.functional.linear(x.float(), dequantise(matrix).float())
            wanted = wanted + bias.float() if of_layer is not None else wanted
            torch.testing.assert_close(forward(x).float(), wanted, rtol=0.03, atol=0.1)


def test_the_proof_that_a_card_is_asked_for() -> None:
    assert prove(CPU, TritonProducts()) is None
