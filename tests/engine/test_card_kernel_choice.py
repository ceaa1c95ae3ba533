"""Which kernels a card gets: those that it computes right, and else none, and the user is told why."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.kernels import card_note
from engine.kernels.cuda.compiled import CompileError
from engine.kernels.cuda.driver import DriverError
from engine.kernels.cuda.products import CudaGroups, CudaProducts, CudaUnpacker
from engine.kernels.gpu import proof
from engine.kernels.gpu.proof import kernels_of, why_not
from engine.kernels.repack import unpacked
from tests.engine.emulated_cuda_card import EmulatedCudaCard, emulated_kernels, needs_compiler

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")


class PreparedCard(EmulatedCudaCard):
    def __init__(self) -> None:
        super().__init__(16)
        self.prepared: list[Any] = []

    def prepare(self, kernels: list[Any]) -> None:
        self.prepared = list(kernels)


PRODUCTS = CudaProducts(PreparedCard())
GROUPS = CudaGroups(PRODUCTS.card)


@pytest.fixture(autouse=True)
def chosen_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    proof._chosen.cache_clear()
    monkeypatch.setattr(proof, "cuda_products", lambda device: PRODUCTS)
    monkeypatch.setattr(proof, "prove", lambda device, products: None)
    monkeypatch.setattr(proof, "groups_of", lambda products, device: GROUPS)
    monkeypatch.setattr(proof, "unpacker_of", lambda products, device: unpacked)
    yield
    proof._chosen.cache_clear()


@pytest.mark.parametrize(("in_groups", "most_few"), [(None, 1024), (GROUPS, 128)])
def test_prompts_have_kernels_of_their_own_if_these_compute_right(
    monkeypatch: pytest.MonkeyPatch, in_groups: CudaGroups | None, most_few: int
) -> None:
    monkeypatch.setattr(proof, "groups_of", lambda products, device: in_groups if products is PRODUCTS else None)
    found = kernels_of(CARD)
    assert (found.few, found.most_few, found.many) == (PRODUCTS, most_few, in_groups)
    assert why_not(CARD) is None
    assert card_note(CARD) == ""
    assert kernels_of(CPU) is None


def test_what_computes_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove", lambda device, products: "lut4")
    assert kernels_of(CARD) is None
    assert card_note(CARD) == (
        "The card computes experts with PyTorch's operators, which is slower: its kernels compute lut4 wrongly."
    )


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (CompileError("NVIDIA's compiler NVRTC was not found"), "NVIDIA's compiler NVRTC was not found"),
        (DriverError("The card's driver could not start norm"), "The card's driver could not start norm"),
        (RuntimeError("CUDA error: no kernel image\nmore"), "its kernels failed (RuntimeError)"),
    ],
)
@pytest.mark.parametrize("step", ["cuda_products", "prove"])
def test_what_fails_is_not_used(monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, why: str) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(proof, step, fails)
    assert kernels_of(CARD) is None
    assert why_not(CARD) == why


@needs_compiler
def test_all_that_is_tried_has_been_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    card = PreparedCard()
    monkeypatch.setattr(proof, "open_card", lambda index: card)
    products = proof.cuda_products(CARD)
    assert proof.prove(CPU, products) is None
    assert proof.groups_of(products, CPU) is not None
    assert proof.unpacker_of(products, CPU) is not unpacked
    assert {kernel for kernel, _ in card.launched} <= set(card.prepared)
    assert len(card.prepared) == len(set(card.prepared))


@needs_compiler
def test_kernels_that_compute_wrongly_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    products = emulated_kernels().few
    assert isinstance(proof.unpacker_of(products, CPU), CudaUnpacker)
    assert isinstance(proof.groups_of(products, CPU), CudaGroups)
    assert proof.prove(CPU, products) is None
    one_by_one, in_blocks = CudaProducts.multiply_visits, CudaGroups.multiply_groups

    def wrong_for_int4(self: CudaProducts, matrix: Any, *asked: Any) -> torch.Tensor:
        is_int4 = matrix.format is not None and matrix.format.name == "int4"
        return one_by_one(self, matrix, *asked) + is_int4

    monkeypatch.setattr(CudaProducts, "multiply_visits", wrong_for_int4)
    assert proof.prove(CPU, products) == "int4"
    monkeypatch.setattr(CudaGroups, "multiply_groups", lambda *asked: in_blocks(*asked) + 1)
    assert proof.groups_of(products, CPU) is None
    monkeypatch.setattr(CudaUnpacker, "__call__", lambda self, matrix: unpacked(matrix) + 1)
    assert proof.unpacker_of(products, CPU) is unpacked
