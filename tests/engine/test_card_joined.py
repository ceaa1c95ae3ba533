"""Linear layers of the same input as one launch of a card, and as they were where they cannot be joined."""

import pytest
import torch

from engine.formats import FORMATS
from engine.formats.tiles import TiledMatrix, dequantise, rows_of
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.linear import CardLinear, JoinedLinears, can_join
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native import linear
from engine.kernels.repack import quantise
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler

pytestmark = needs_compiler
CPU = torch.device("cpu")


def kernels() -> tuple[CardKernels, EmulatedCudaCard]:
    card = EmulatedCudaCard(16)
    products = CudaProducts(card)
    return CardKernels(products, products.most_visits, None), card


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_launch_gives_what_each_gives_alone(precision: str, has_bias: bool) -> None:
    torch.manual_seed(3)
    rows, columns = (96, 32, 64), 75
    matrices = [quantise(torch.randn(n, columns).bfloat16(), FORMATS[precision]) for n in rows]
    biases = [torch.randn(n).bfloat16() if has_bias and n != 32 else None for n in rows]
    assert can_join(matrices)
    on_card, card = kernels()
    joined = JoinedLinears(matrices, biases, CPU, on_card)
    alone = [CardLinear(m, b, CPU, on_card) for m, b in zip(matrices, biases, strict=True)]
    for tokens in (*range(1, 9), 17):
        x = torch.randn(1, tokens, columns).bfloat16()
        wanted = [forward(x) for forward in alone]
        card.launched.clear()
        found = [forward(x) for forward in joined.forwards]
        assert len(card.launched) == (1 if tokens <= 16 else 0)
        for mine, expected in zip(found, wanted, strict=True):
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)
    x = torch.randn(1, columns).bfloat16()
    before = joined.forwards[0](x)
    x.mul_(2)  # another content in the same place: whoever has had an answer gets a new one
    torch.testing.assert_close(
        joined.forwards[0](x).float(), 2 * before.float() - _bias(biases[0]), rtol=0.05, atol=0.2
    )


def _bias(bias: torch.Tensor | None) -> torch.Tensor | float:
    return 0.0 if bias is None else bias.float()


def test_what_cannot_be_joined() -> None:
    def made(rows: int, columns: int, precision: str) -> TiledMatrix:
        return quantise(torch.randn(rows, columns).bfloat16(), FORMATS[precision])

    first = made(64, 64, "int4")
    assert not can_join([first])
    for other in (made(64, 96, "int4"), made(64, 64, "int8"), made(40, 64, "int4")):
        assert not can_join([first, other])
    tables = [made(32, 64, "lut4") for _ in range(2)]
    tables[1].set_table(tuple(range(16)))
    assert not can_join(tables)


@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
def test_rows_of_a_matrix(precision: str) -> None:
    matrix = quantise(torch.randn(100, 70).bfloat16(), FORMATS[precision])
    for begin, end in ((0, 100), (32, 64), (64, 100)):
        assert torch.equal(dequantise(rows_of(matrix, begin, end)), dequantise(matrix)[begin:end])


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            setattr(self, name, torch.nn.Linear(64, rows, bias=False, dtype=torch.bfloat16))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_layers_of_a_model_are_joined_where_a_card_has_kernels(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_card, card = kernels()
    monkeypatch.setattr(linear, "SMALLEST", 256)
    monkeypatch.setattr(dense, "kernels_of", lambda place: on_card if has_kernels else None)
    model = torch.nn.ModuleDict({"0": _Attention(), "1": _Attention()})
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    formats = linear.formats_of_linears(model, "int8")
    assert len(formats) == 8
    modules = dict(model.named_modules())
    dense.quantise_on_cards(
        model, formats, lambda name: quantise(modules[name].weight, formats[name]), lambda name: CPU
    )
    x = torch.randn(1, 1, 64).bfloat16()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            wanted = torch.nn.functional.linear(x.float(), weights[f"{name}.weight"].float())
            torch.testing.assert_close(module(x).float(), wanted, rtol=0.05, atol=0.05)
    assert len(card.launched) == (4 if has_kernels else 0)
    held = sum(buffer.nbytes for buffer in model.buffers())
    assert held <= 2 * (192 * 64 + 192 * 2 * 2) + 4 * 256
