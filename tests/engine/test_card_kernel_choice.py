"""Which kernels a card gets: those that it computes right, the quickest of them for few visits, and else none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.formats.tiles import dequantise
from engine.kernels import card_note
from engine.kernels.cuda.groups import CudaGroups
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.cuda.unpack import CudaUnpacker
from engine.kernels.gpu import proof
from engine.kernels.gpu.proof import UnavailableError, kernels_of, quickest, why_not
from tests.engine.emulated_cuda_card import emulated_kernels, needs_compiler

CARD = torch.device("cuda", 0)


class Made:
    """Products by name; only Triton's know groups."""

    adds_up = False

    def __init__(self, name: str, most_visits: int) -> None:
        self.name, self.most_visits = name, most_visits


TRITON, IN_CUDA = Made("triton", 32), Made("cuda", 1024)


def refuses(words: str) -> Callable[[torch.device], Any]:
    def make(device: torch.device) -> Any:
        raise UnavailableError(words)

    return make


@pytest.fixture(autouse=True)
def chosen_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    proof._chosen.cache_clear()
    monkeypatch.setattr(proof, "triton_products", lambda device: TRITON)
    monkeypatch.setattr(proof, "cuda_products", lambda device: IN_CUDA)
    monkeypatch.setattr(proof, "prove", lambda device, products: None)
    monkeypatch.setattr(proof, "groups_of", lambda in_cuda, device: None)
    monkeypatch.setattr(proof, "unpacker_of", lambda in_cuda, device: dequantise)
    yield
    proof._chosen.cache_clear()


@pytest.mark.parametrize(("seconds_of_triton", "few"), [(1.0, TRITON), (3.0, IN_CUDA)])
def test_the_quicker_one_computes_few_visits(
    seconds_of_triton: float, few: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_seconds", lambda products, device: seconds_of_triton if products is TRITON else 2.0)
    found = kernels_of(CARD)
    assert found is not None
    assert (found.few, found.many) == (few, TRITON)
    assert found.most_few == (32 if few is TRITON else 128)
    assert why_not(CARD) is None
    assert card_note(CARD) == ""


def test_where_nothing_can_be_timed_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(products: Any, device: torch.device) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(proof, "_seconds", no_memory)
    assert quickest([IN_CUDA, TRITON], CARD) is IN_CUDA  # type: ignore[list-item]


@pytest.mark.parametrize(("in_groups", "most_few"), [(None, 1024), (TRITON, 128)])
def test_without_triton_prompts_have_kernels_in_cuda_c_if_they_compute_right(
    monkeypatch: pytest.MonkeyPatch, in_groups: Made | None, most_few: int
) -> None:
    monkeypatch.setattr(proof, "triton_products", refuses("Triton is not installed"))
    monkeypatch.setattr(proof, "groups_of", lambda in_cuda, device: in_groups if in_cuda is IN_CUDA else None)
    found = kernels_of(CARD)
    assert found is not None
    assert (found.few, found.most_few, found.many) == (IN_CUDA, most_few, in_groups)


def test_what_computes_wrongly_or_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove", lambda device, products: "int4" if products is IN_CUDA else None)
    found = kernels_of(CARD)
    assert found is not None
    assert (found.few, found.most_few, found.many) == (TRITON, 32, TRITON)
    proof._chosen.cache_clear()

    def fails(device: torch.device, products: Any) -> str | None:
        if products is TRITON:
            raise RuntimeError("no kernel image")
        return "lut4"

    monkeypatch.setattr(proof, "prove", fails)
    assert kernels_of(CARD) is None
    assert why_not(CARD) == "Triton's kernels failed (RuntimeError), and the kernels in CUDA C compute lut4 wrongly"


def test_without_either_the_user_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "triton_products", refuses("Triton is not installed"))
    monkeypatch.setattr(proof, "cuda_products", refuses("NVIDIA's compiler NVRTC was not found"))
    assert kernels_of(CARD) is None
    assert card_note(CARD) == (
        "The card computes experts with PyTorch's operators, which is slower: "
        "Triton is not installed, and NVIDIA's compiler NVRTC was not found."
    )
    assert kernels_of(torch.device("cpu")) is None


@needs_compiler
def test_a_kernel_that_unpacks_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    products, cpu = emulated_kernels().few, torch.device("cpu")
    assert isinstance(products, CudaProducts)
    assert isinstance(proof.unpacker_of(products, cpu), CudaUnpacker)
    assert proof.unpacker_of(None, cpu) is dequantise
    assert isinstance(proof.groups_of(products, cpu), CudaGroups)
    assert proof.groups_of(None, cpu) is None
    multiply = CudaGroups.multiply_groups
    monkeypatch.setattr(CudaGroups, "multiply_groups", lambda *asked: multiply(*asked) + 1)
    assert proof.groups_of(products, cpu) is None
    monkeypatch.setattr(CudaUnpacker, "__call__", lambda self, matrix: dequantise(matrix) + 1)
    assert proof.unpacker_of(products, cpu) is dequantise
