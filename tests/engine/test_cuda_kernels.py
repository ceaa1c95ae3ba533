"""The kernels in CUDA C on an emulated card: what they compute is what the weights mean, alone and in whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import kernels
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.formats import FORMATS
from engine.formats.lut4 import MXFP4_TABLE
from engine.formats.tiles import Pairing, dequantise
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.gpu.proof import prove
from engine.kernels.gpu.stored import CardKernels, RecordTable, StoredMatrix, store, stored_matrix
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native import linear as native_linear
from engine.kernels.repack import quantise
from engine.kernels.torch_experts import TorchExperts
from engine.runtime.loaded_model import LoadedModel
from tests.engine.card_experts import KINDS, PRECISIONS, check, check_nobody, check_not_numbers, layer_of, module_of
from tests.engine.emulated_cuda_card import EmulatedCudaCard, emulated_kernels, needs_compiler
from tests.engine.on_devices import MIB, PROMPT, opened, share_misses
from tests.engine.tiny_families import tiny_checkpoint

CPU = torch.device("cpu")
KERNELS = emulated_kernels()
FEW_PROCESSORS = emulated_kernels(1)
"""So few that columns are not split."""


pytestmark = needs_compiler


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("kind", "precision"), [(kind, PRECISIONS[number % len(PRECISIONS)]) for number, kind in enumerate(KINDS)]
)
def test_every_kind_of_expert(kind: str, precision: str) -> None:
    check(KERNELS, CPU, kind, precision, tokens=1, width=3, seed=1)
    check(FEW_PROCESSORS, CPU, kind, precision, tokens=8, width=2, bias=False, seed=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_one_to_eight_tokens(precision: str, tokens: int) -> None:
    check(KERNELS, CPU, "gpt-oss", precision, tokens=tokens, width=2, experts=2 + tokens % 3, seed=tokens)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_shapes_that_are_no_multiples(precision: str) -> None:
    for hidden, inner in ((1, 1), (33, 17), (31, 65)):
        check(KERNELS, CPU, "silu", precision, tokens=1, width=1, hidden=hidden, inner=inner, seed=hidden)
        check(KERNELS, CPU, "silu", precision, tokens=9, width=1, experts=2, hidden=hidden, inner=inner, seed=inner)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_columns_in_parts_and_in_stages(precision: str) -> None:
    for each in (KERNELS, FEW_PROCESSORS):
        check(each, CPU, "silu", precision, tokens=3, width=1, experts=1, hidden=2176, inner=24)


def test_norms_and_gates_that_only_the_module_knows() -> None:
    check(KERNELS, CPU, "silu", "int4", tokens=2, width=2, norm=lambda out: torch.nn.functional.normalize(out, dim=-1))
    check(KERNELS, CPU, "own", "bf16", tokens=2, width=2)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_what_is_no_number_and_who_is_no_expert(precision: str) -> None:
    check_not_numbers(KERNELS, CPU, precision)
    check_nobody(KERNELS, CPU, precision)


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
def test_linear_layers(precision: str) -> None:
    torch.manual_seed(4)
    weight, bias = (torch.randn(50, 1100) / 33).bfloat16(), torch.randn(50).bfloat16()
    matrix = quantise(weight, FORMATS[precision])
    matrix.set_table(MXFP4_TABLE)  # a matrix has its own, if any
    for of_layer in (bias, None):
        forward = CardLinear(matrix, of_layer, CPU, KERNELS)
        for shape in ((1, 1, 1100), (3, 1100), (2, 5, 1100), (20, 1100), (0, 1100)):
            x = torch.randn(shape).bfloat16()
            wanted = torch.nn.functional.linear(x.float(), dequantise(matrix).float())
            wanted = wanted + bias.float() if of_layer is not None else wanted
            torch.testing.assert_close(forward(x).float(), wanted, rtol=0.03, atol=0.05)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_experts_without_a_slot_are_skipped_and_reported(precision: str) -> None:
    generator = torch.Generator().manual_seed(7)
    module = module_of("silu", 4, 40, 1056, bias=True)
    layer, meant = layer_of(module, precision, CPU, pieces=2)
    table = RecordTable(list(layer.pieces))
    down = stored_matrix(layer, "down_proj", "down_proj_bias", Pairing.PLAIN)
    slot_of = torch.tensor([2, -1, 0, -1, 3, 1, 9], dtype=torch.int32)  # the last is beyond all slots
    for tokens, multiprocessors in ((1, 200), (8, 1)):
        products = CudaProducts(EmulatedCudaCard(multiprocessors))
        ids = torch.stack([torch.randperm(9, generator=generator)[:3] - 1 for _ in range(tokens)])
        x = torch.randn(tokens * 3, 1056, generator=generator).to(down.dtype)
        shares = torch.rand(tokens, 3, generator=generator)
        absent = torch.full((tokens * 3,), 7, dtype=torch.int32)
        call: dict[str, Any] = {"slot_of": slot_of, "absent": absent}
        apart = products.multiply_visits(down, table, x, ids.flatten(), 1, **call)
        together = products.multiply_visits(down, table, x, ids.flatten(), 1, shares=shares, **call)
        wanted = torch.zeros(tokens * 3, 40)
        for visit, expert in enumerate(ids.flatten().tolist()):
            is_expert = 0 <= expert < 7
            slot = int(slot_of[expert]) if is_expert else -1
            assert bool(absent[visit]) == (is_expert and not 0 <= slot < 4)
            if 0 <= slot < 4:
                wanted[visit] = x[visit].float() @ meant["down_proj"][slot].T + meant["down_proj_bias"][slot]
        exact = precision == "fp32"
        rounding = {"rtol": 1e-4, "atol": 1e-4} if exact else {"rtol": 0.03, "atol": 0.05}
        torch.testing.assert_close(apart.float(), wanted, **rounding)
        summed = (wanted.view(tokens, 3, -1) * shares[..., None]).sum(1)
        torch.testing.assert_close(together.float(), summed, **rounding)


def test_results_do_not_depend_on_the_order_of_blocks_and_counters_are_left_at_zero() -> None:
    torch.manual_seed(1)
    card = EmulatedCudaCard(64)
    products = CudaProducts(card)
    record, matrix = store(quantise(torch.randn(64, 2048).bfloat16(), FORMATS["int4"]), None, CPU)
    table, x = RecordTable([record]), torch.randn(3, 2048).bfloat16()
    found = [products.multiply_visits(matrix, table, x, None, 1) for _ in range(5)]
    assert card.launched[0][1][2] > 1  # in parts
    assert all(torch.equal(each, found[0]) for each in found)
    assert not products._counters(table, 1).any()


def test_a_step_of_experts_is_two_launches() -> None:
    module = module_of("silu", 6, 64, 64, bias=True)
    layer, _ = layer_of(module, "int4", CPU)
    card = EmulatedCudaCard(16)
    kernel = CardExperts(layer, ExpertMath.of(module), CardKernels(CudaProducts(card), 64, None))
    kernel(torch.randn(1, 64).bfloat16(), torch.tensor([[0, 3]]), torch.ones(1, 2))
    assert len(card.launched) == 2


def test_half_precision() -> None:
    weight, x = torch.randn(24, 40).half(), torch.randn(4, 40).half()
    weight[0, :4] = torch.tensor([6e-8, 3e-5, 65504.0, -0.0])  # subnormal and largest numbers
    record = weight.view(torch.uint8).reshape(1, -1)
    matrix = StoredMatrix(24, 40, torch.float16, None, Pairing.PLAIN, 0)
    out = CudaProducts(EmulatedCudaCard(1)).multiply_visits(matrix, RecordTable([record]), x, None, 1)
    wanted = (x.float() @ weight.float().T).half()
    torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)


def test_the_proof_that_a_card_is_asked_for() -> None:
    assert prove(CPU, KERNELS.few) is None


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
@pytest.mark.parametrize("pairing", list(Pairing))
def test_unpacked_matrices_have_the_same_bits_as_by_operators(precision: str, pairing: Pairing) -> None:
    torch.manual_seed(int(pairing))
    for rows, columns in ((2, 1), (70, 100), (64, 131)):
        matrix = quantise(torch.randn(rows, columns).bfloat16(), FORMATS[precision], pairing)
        matrix.set_table(MXFP4_TABLE)
        assert torch.equal(KERNELS.unpack(matrix), dequantise(matrix))
    matrix.scales[0, 0, 0] = float("nan")
    assert KERNELS.unpack(matrix).isnan().sum() == dequantise(matrix).isnan().sum() > 0


def test_prompts_by_operators_with_unpacked_weights_are_the_same() -> None:
    torch.manual_seed(5)
    module = module_of("silu", 3, 64, 96, bias=True)
    layer, _ = layer_of(module, "int4", CPU)
    bank = LayerRecords("experts", layer.layout, torch.cat(list(layer.pieces)))
    x, index, share = torch.randn(7, 64).bfloat16(), torch.randint(0, 3, (7, 2)), torch.rand(7, 2)
    by_operators, unpacked = (TorchExperts(bank, ExpertMath.of(module), *more) for more in ((), (None, KERNELS.unpack)))
    assert torch.equal(by_operators(x, index, share), unpacked(x, index, share))


@torch.inference_mode()
def logits(model: LoadedModel, tokens: int) -> torch.Tensor:
    result: torch.Tensor = model.model(input_ids=torch.tensor([PROMPT[:tokens]])).logits
    return result.float()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "precision", "slots"),
    [("qwen3_moe", "int4", 3), ("mixtral", "bf16", None), ("gpt_oss", "lut4", 3), ("gpt_oss", "int8", None)],
)
def test_logits_are_those_of_torch(
    family: str, precision: str, slots: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    share_misses(monkeypatch)
    # The emulated device is taken for one that holds linear layers quantised; tiny layers are taken for large ones.
    monkeypatch.setattr("engine.runtime.load.forms.is_held_quantised", lambda place: True)
    monkeypatch.setattr(native_linear, "SMALLEST", 256)
    folder = tiny_checkpoint(family, tmp_path / family)
    options = {"precision": precision, "cache_slots": slots, "vram_bytes": 64 * MIB}
    with opened(folder, **options) as model:
        wanted = [logits(model, tokens) for tokens in (1, 5)]
    found_here = replace(emulated_kernels(), most_few=4)  # five tokens have more visits
    monkeypatch.setattr(kernels, "kernels_of", lambda place: found_here)
    monkeypatch.setattr(dense, "kernels_of", lambda place: found_here)
    with opened(folder, **options) as model:
        bound = [m.__dict__[BANK_LAYER][1] for m in model.model.modules() if BANK_LAYER in m.__dict__]
        assert bound
        assert all(isinstance(kernel, CardExperts if slots is None else HybridExperts) for kernel in bound)
        linear = [m for m in model.model.modules() if isinstance(m.__dict__.get("forward"), CardLinear)]
        assert bool(linear) == (precision != "bf16")
        for expected in wanted:
            found = logits(model, expected.shape[1])
            assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.98
