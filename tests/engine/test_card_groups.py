"""Rows sorted by expert, whose numbers the host knows: what a card computes, and in how few launches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.experts.executor import PartialSums, Routing
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.stored import CardKernels, group, known_groups
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.reference import reference_experts
from engine.kernels.torch_experts import TorchExperts
from tests.engine.card_experts import KINDS, PRECISIONS, check, check_nobody, check_not_numbers, layer_of, module_of
from tests.engine.emulated_cuda_card import emulated_kernels, needs_compiler

CPU = torch.device("cpu")
_VIEWS = {"view", "_unsafe_view", "slice", "select", "split", "split_with_sizes", "unbind", "t", "detach", "expand"}
_VIEWS |= {"unsqueeze", "transpose", "as_strided", "reshape", "empty", "empty_like", "new_empty", "alias"}


class Launches(TorchDispatchMode):
    """Counts operators that would start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_groups_that_are_known_are_those_that_a_card_finds() -> None:
    generator = torch.Generator().manual_seed(1)
    for block in (4, 16):
        for experts in (1, 5, 12):
            ids = torch.randint(0, experts, (70,), generator=generator).sort().values
            found, counts = ids.unique_consecutive(return_counts=True)
            known, wanted = known_groups(found.tolist(), counts.tolist(), experts, block), group(ids, experts, block)
            real = wanted.block_expert < experts
            assert torch.equal(known.order, wanted.order)
            assert torch.equal(known.ends[found], wanted.ends[found])
            assert torch.equal(known.block_expert, wanted.block_expert[real])
            assert torch.equal(known.block_begin, wanted.block_begin[real])


def test_visits_without_an_expert_come_last() -> None:
    ids = torch.tensor([4, 2, 2, 7, 0, 2, 4])
    groups = group(ids, 7, 2)
    assert ids[groups.order].tolist() == [0, 2, 2, 2, 4, 4, 7]
    blocks = list(zip(groups.block_expert.tolist(), groups.block_begin.tolist(), strict=True))
    assert [block for block in blocks if block[0] < 7] == [(0, 0), (2, 1), (2, 3), (4, 4)]
    assert [groups.ends.tolist()[expert] for expert in (0, 2, 4)] == [1, 4, 6]


IN_BLOCKS = replace(emulated_kernels(), most_few=4)
"""Prompts have more visits."""


@pytest.mark.takes_turns(4)
@needs_compiler
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, PRECISIONS[number % len(PRECISIONS)]) for number, kind in enumerate(KINDS)),
        *((kind, precision) for kind in ("gpt-oss", "relu2 without gate") for precision in PRECISIONS),
    ],
)
def test_experts_that_the_card_sorts(kind: str, precision: str) -> None:
    check(IN_BLOCKS, CPU, kind, precision, tokens=17, width=2, experts=3, seed=3)


@needs_compiler
@pytest.mark.parametrize("precision", ["int8", "int4", "lut4"])
def test_shapes_that_are_no_multiples(precision: str) -> None:
    for hidden, inner in ((1, 1), (33, 17), (31, 65)):
        check(IN_BLOCKS, CPU, "silu", precision, tokens=33, width=1, experts=2, hidden=hidden, inner=inner, seed=inner)


@pytest.mark.takes_turns(3)
@needs_compiler
@pytest.mark.parametrize("precision", ["bf16", "int4", "lut4"])
def test_prompts_in_big_blocks_and_in_pieces(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.gpu.experts._MANY_VISITS", 40)
    check(IN_BLOCKS, CPU, "silu", precision, tokens=70, width=1, experts=2)
    monkeypatch.setattr("engine.kernels.gpu.experts._INNER_BYTES", 0)
    check(IN_BLOCKS, CPU, "silu", precision, tokens=260, width=1, experts=2)


@needs_compiler
def test_norms_and_gates_that_only_the_module_knows() -> None:
    def norm(out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(out, dim=-1)

    check(IN_BLOCKS, CPU, "silu", "int4", tokens=20, width=2, norm=norm)
    check(IN_BLOCKS, CPU, "own", "bf16", tokens=20, width=2)


@needs_compiler
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "lut4"])
def test_what_is_no_number_and_who_is_no_expert(precision: str) -> None:
    check_not_numbers(IN_BLOCKS, CPU, precision)
    check_nobody(IN_BLOCKS, CPU, precision)


def card_kernel(kind: str, precision: str, kernels: CardKernels, experts: int = 5) -> tuple[CardExperts, Any, Any]:
    torch.manual_seed(len(kind))
    module = module_of(kind, experts, 70, 40, bias=True)
    layer, meant = layer_of(module, precision, CPU, 1)
    math = ExpertMath.of(module)
    bank = LayerRecords("experts", layer.layout, torch.cat(list(layer.pieces)))
    in_torch = TorchExperts(bank, math, None, kernels.unpack)
    return CardExperts(layer, math, kernels, in_torch), module, meant


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "precision"), [(kind, PRECISIONS[number % len(PRECISIONS)]) for number, kind in enumerate(KINDS)]
)
def test_every_kind_of_expert(kind: str, precision: str) -> None:
    kernels = emulated_kernels()
    kernel, module, meant = card_kernel(kind, precision, CardKernels(kernels.few, 4, kernels.many, kernels.unpack))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    hidden, weights = torch.randn(40, 70).to(dtype), torch.rand(40, 2)
    index = torch.stack([torch.randperm(6)[:2] for _ in range(40)])
    routing = Routing(index, 5)
    sums = PartialSums(hidden, weights, routing, torch.full((80, 70), torch.nan, dtype=dtype))
    sums.on_device(kernel, {expert: expert for expert in (3, 0, 4)})()
    sums.on_device(kernel, {expert: expert for expert in (1, 2)})()
    sums.finish()()
    wanted = reference_experts(module, meant, hidden.float(), index, weights)
    tolerance = 1e-4 if precision == "fp32" else 0.03
    torch.testing.assert_close(
        sums.result.float(), wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().max()))
    )


def launches_of(kernels: CardKernels, precision: str, fetched: int) -> float:
    """Of each of so many experts of a prompt that came over the link together."""
    kernel, _, _ = card_kernel("silu", precision, kernels, experts=fetched)
    tokens = 12 * fetched
    hidden = torch.randn(tokens, 70).bfloat16()
    index = torch.randint(0, fetched, (tokens, 1))
    sums = PartialSums(hidden, torch.rand(tokens, 1), Routing(index, fetched), torch.empty(tokens, 70).bfloat16())
    work = sums.on_device(kernel, {expert: expert for expert in range(fetched)})
    with Launches() as counted:
        work()
    return len(counted.names) / fetched


@needs_compiler
@pytest.mark.parametrize("precision", ["int4", "bf16"])
def test_a_fetched_expert_takes_few_launches(precision: str) -> None:
    """A launch of the emulated card is an operator, too."""
    kernels = emulated_kernels()
    few = CardKernels(kernels.few, 16, kernels.many, kernels.unpack)
    assert launches_of(few, precision, 8) < 4
    assert launches_of(few, precision, 16) < 4 if precision == "bf16" else launches_of(few, precision, 16) < 1
