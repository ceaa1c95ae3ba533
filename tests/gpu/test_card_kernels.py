"""Experts and linear layers on a real card, by its own kernels: what is computed is what the weights mean."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.formats import FORMATS
from engine.formats.lut4 import MXFP4_TABLE
from engine.formats.tiles import Pairing, dequantise
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.proof import kernels_of, why_not
from engine.kernels.gpu.stored import CardKernels, RecordTable, matrix_in, store, stored_matrix
from engine.kernels.interface import ExpertMath
from engine.kernels.repack import quantise
from tests.engine.card_experts import KINDS, PRECISIONS, check, check_nobody, check_not_numbers, layer_of, module_of
from tests.engine.on_devices import MIB, PROMPT, opened
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CARD = torch.device("cuda", 0)


@pytest.fixture
def chosen() -> CardKernels:
    found = kernels_of(CARD)
    assert found is not None, why_not(CARD)
    return found


@pytest.fixture(params=["one by one", "in blocks", "chosen"])
def kernels(request: pytest.FixtureRequest, chosen: CardKernels) -> CardKernels:
    """Each kind of products for any number of visits, and by number as they are used."""
    if request.param == "one by one":
        return replace(chosen, most_few=chosen.few.most_visits, many=None)
    if request.param == "in blocks":
        assert chosen.many is not None
        return replace(chosen, most_few=4)
    return chosen


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_expert(kernels: CardKernels, kind: str, precision: str) -> None:
    check(kernels, CARD, kind, precision, tokens=1, width=3, seed=1)
    check(kernels, CARD, kind, precision, tokens=4, width=2, bias=False, seed=2)
    check(kernels, CARD, kind, precision, tokens=20, width=3, seed=3)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "width"),
    [(128, 2048, 768, 8), (32, 2880, 2880, 4), (8, 1024, 3584, 2), (4, 33, 17, 2)],
)
def test_shapes_of_real_models(
    kernels: CardKernels, precision: str, experts: int, hidden: int, inner: int, width: int
) -> None:
    experts = min(experts, 16)
    width = min(width, experts)
    for tokens in (1, 17, 100):
        check(kernels, CARD, "silu", precision, tokens=tokens, width=width, experts=experts, hidden=hidden, inner=inner)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_what_is_no_number_and_who_is_no_expert(kernels: CardKernels, precision: str) -> None:
    check_not_numbers(kernels, CARD, precision)
    check_nobody(kernels, CARD, precision)


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
def test_linear_layers(kernels: CardKernels, precision: str) -> None:
    torch.manual_seed(4)
    weight, bias = (torch.randn(500, 700) / 26).bfloat16(), torch.randn(500).bfloat16()
    matrix = quantise(weight, FORMATS[precision])
    matrix.set_table(MXFP4_TABLE)  # a matrix has its own, if any
    for used in (kernels, None):
        forward = CardLinear(matrix, bias, CARD, used)
        for tokens in (1, 7, 40):
            x = torch.randn(tokens, 700).bfloat16()
            wanted = torch.nn.functional.linear(x.float(), dequantise(matrix).float(), bias.float())
            torch.testing.assert_close(forward(x.to(CARD)).float().cpu(), wanted, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("config", [{}, {"cache_slots": 4}, {"cache_slots": 4, "misses": "fetch"}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_a_model_on_the_card_is_near_the_same_on_the_cpu(
    precision: str, config: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    found = []
    for device in ({"device": "cpu"}, {"device": "cuda:0", "vram_bytes": 512 * MIB, **config}):
        with opened(folder, precision=precision, **device) as model, torch.inference_mode():
            ids = torch.tensor([PROMPT], device=model.device)
            found.append(model.model(input_ids=ids).logits.float().cpu())
    assert torch.cosine_similarity(*found, dim=-1).mean() > 0.98


def test_nothing_waits_for_the_card(kernels: CardKernels) -> None:
    module = module_of("silu", 6, 64, 64, bias=True)
    layer, _ = layer_of(module, "int4", CARD)
    kernel = CardExperts(layer, ExpertMath.of(module), kernels)
    steps = []
    for tokens in (1, 64):
        index = torch.zeros(tokens, 2, dtype=torch.long, device=CARD)
        steps.append((torch.randn(tokens, 64, device=CARD).bfloat16(), index, torch.ones(tokens, 2, device=CARD)))
    for step in steps:
        kernel(*step)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            kernel(*step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
def test_unpacked_matrices_have_the_same_bits_as_by_operators(chosen: CardKernels, precision: str) -> None:
    matrix = quantise(torch.randn(500, 700).bfloat16(), FORMATS[precision], Pairing.HALVES)
    record, stored = store(matrix, None, CARD)
    there = matrix_in(record[0], stored, matrix)
    assert torch.equal(chosen.unpack(there).cpu(), dequantise(matrix))


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_experts_without_a_slot_are_skipped_and_reported(chosen: CardKernels, precision: str) -> None:
    layer, meant = layer_of(module_of("silu", 4, 96, 1088, bias=True), precision, CARD, pieces=2)
    down = stored_matrix(layer, "down_proj", "down_proj_bias", Pairing.PLAIN)
    slot_of = torch.tensor([2, -1, 0, -1, 3, 1], dtype=torch.int32)
    ids, x = torch.tensor([0, 1, 4, 7, 0, 5]), torch.randn(6, 1088).bfloat16()
    absent = torch.full((6,), 7, dtype=torch.int32, device=CARD)
    table = RecordTable(list(layer.pieces))
    for _ in range(3):  # counters are left as they were found
        out = chosen.few.multiply_visits(
            down, table, x.to(CARD), ids.to(CARD), 1, slot_of=slot_of.to(CARD), absent=absent
        )
        wanted = torch.zeros(6, 96)
        for visit, slot in enumerate((2, -1, 3, -1, 2, 1)):
            if slot >= 0:
                wanted[visit] = x[visit].float() @ meant["down_proj"][slot].T + meant["down_proj_bias"][slot]
        assert absent.tolist() == [0, 1, 0, 0, 0, 0]
        torch.testing.assert_close(out.float().cpu(), wanted, rtol=0.03, atol=0.05)
