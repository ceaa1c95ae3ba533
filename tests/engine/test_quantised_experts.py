"""Quantised experts against their dequantised weights, natively and in torch: all activations, shapes and routings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from engine.experts.dispatch import StandardExperts
from engine.experts.record import allocate_records
from engine.formats import FORMATS
from engine.formats.layouts import RecordLayout
from engine.formats.tiles import Pairing, dequantise
from engine.kernels import choose_kernel
from engine.kernels.activation import activation_of
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.quantise import quantise_record
from engine.kernels.reference import reference_experts
from tests.combinations import any_two
from tests.engine.native_isas import isas, kernels_of

ISAS = isas()
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=int(isa) % 4 + 1) as held_back:
        yield held_back


class ClampedExperts(StandardExperts):
    """gpt-oss's gate, as its module computes it; by its name and its module's name the kernels recognise it."""

    limit, alpha = 0.8, 1.702


def _gpt_oss_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=self.limit)
    up = up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


_gpt_oss_gate.__module__ = "transformers.models.gpt_oss.modeling_gpt_oss"
ClampedExperts._apply_gate = _gpt_oss_gate

KINDS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2 without gate", "silu without gate", "clamped"]
MIXED = "int4 and int8"
HALF_PLAIN = "int8 and bf16"
"""Of the first matrix and of `down_proj`."""
PRECISIONS = ["bf16", "int8", "int4", MIXED, "lut4"]


def _module(kind: str, experts: int, hidden: int, inner: int, bias: bool) -> StandardExperts:
    if kind == "clamped":
        return ClampedExperts(experts, hidden, inner, torch.nn.SiLU(), has_bias=bias)
    name, _, rest = kind.partition(" ")
    return StandardExperts(experts, hidden, inner, ACT2FN[name], has_gate=not rest, has_bias=bias)


def _layer(module: StandardExperts, precision: str) -> tuple[LayerRecords, dict[str, torch.Tensor]]:
    """Random weights in records of this precision, and what they mean, in fp32."""
    plain = RecordLayout.of(
        {name: (tuple(p.shape[1:]), torch.bfloat16) for name, p in module.named_parameters()}, transposed=False
    )
    source = LayerRecords("experts", plain, allocate_records(module.num_experts, plain, CPU))
    for tensor in source.stacked.values():
        tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)
    if precision == "bf16":
        return source, {name: tensor.float() for name, tensor in source.stacked.items()}
    activation = activation_of(module)
    pairing = activation.pairing if activation is not None and module.has_gate else Pairing.HALVES
    first, _, down = precision.partition(" and ")
    of_first, of_down = FORMATS[first], FORMATS[down or first]
    layout = RecordLayout.in_tiles(plain, lambda name: of_down if name == "down_proj" else of_first, pairing)
    layer = LayerRecords("experts", layout, allocate_records(module.num_experts, layout, CPU))
    for expert in range(module.num_experts):
        quantise_record(layout, source.records[expert], layer.records[expert])
    meant = {}
    for part in plain.parts:
        if layout.is_tiled(part.name):
            matrices = [layout.matrix(layer.rows, part.name, e) for e in range(module.num_experts)]
            meant[part.name] = torch.stack([dequantise(matrix, torch.float32) for matrix in matrices])
        else:
            meant[part.name] = layer.stacked[part.name].float()
    return layer, meant


class ThroughInt8:
    """A module whose experts see their inputs in groups of 32 whole numbers with a scale, as the kernels do."""

    def __init__(self, module: StandardExperts) -> None:
        self._module = module
        self.act_fn = lambda x: _through_int8(module.act_fn(x))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _through_int8(self._module._apply_gate(gate_up))


def _through_int8(x: torch.Tensor) -> torch.Tensor:
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    q = (groups / scale.where(scale > 0, torch.ones(()))).round()
    return (q * scale).flatten(-2)[..., : x.shape[-1]]


class Magnitudes:
    """A module whose activated values are all positive: with positive second matrices nothing cancels in their sums."""

    def __init__(self, module: StandardExperts) -> None:
        self._module = module
        self.act_fn = lambda x: module.act_fn(x).abs()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self._module._apply_gate(gate_up).abs())


def _summed(
    module: StandardExperts, meant: dict[str, torch.Tensor], x: torch.Tensor, index: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """What is added up for each number of the result, as if all of it had one sign: roundings are a part of this."""
    positive = {name: tensor.abs() if name.startswith("down") else tensor for name, tensor in meant.items()}
    return reference_experts(Magnitudes(module), positive, x, index, share)


def _assert_near(got: torch.Tensor, wanted: torch.Tensor, meant: dict[str, torch.Tensor], summed: torch.Tensor) -> None:
    """Up to bf16's roundings, or some of a whole number that fall the other way before the second matrix."""
    through_down = 6e-3 * max(1.0, float(meant["down_proj"].abs().max()))
    allowed = 0.02 * summed + 0.01 * wanted.abs().max() + through_down
    off = (got.float() - wanted).abs()
    assert bool((off <= allowed).all()), (
        f"{float(off.max())} off where {float(allowed[off > allowed].min())} is allowed"
    )


@pytest.mark.every_combination
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=2)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    experts=st.integers(1, 7),
    hidden=st.integers(1, 130),
    inner=st.integers(1, 90),
    tokens=st.sampled_from([1, 1, 2, 3, 5, MAX_TOKENS, MAX_TOKENS + 1, 21]),
    seed=st.integers(0, 2**31),
)
def test_native_experts_are_near_the_exact_result(
    kernels: NativeKernels,
    precision: str,
    kind: str,
    bias: bool,
    experts: int,
    hidden: int,
    inner: int,
    tokens: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module = _module(kind, experts, hidden, inner, bias)
    layer, meant = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert isinstance(kernel, NativeExperts)
    width = int(torch.randint(1, experts + 1, ()))
    # Ids one above the experts belong to nobody, as the interface allows.
    index = torch.stack([torch.randperm(experts + 1)[:width] for _ in range(tokens)])
    share = torch.rand(tokens, width)
    x = torch.randn(tokens, hidden).bfloat16()
    wanted = reference_experts(module, meant, x.float(), index, share)
    summed = _summed(module, meant, x.float(), index, share)
    if precision == "bf16":
        _assert_near(kernel(x, index, share), wanted, meant, summed)
    else:
        seen = reference_experts(ThroughInt8(module), meant, _through_int8(x.float()), index, share)
        _assert_near(kernel(x, index, share), seen, meant, summed)
    in_torch = choose_kernel(module, layer, None)
    assert in_torch is not None
    _assert_near(in_torch(x, index, share), wanted, meant, summed)


@pytest.mark.parametrize("precision", ["int8", "int4", MIXED, "lut4", HALF_PLAIN])
def test_experts_that_many_tokens_want_beside_those_that_few_want(kernels: NativeKernels, precision: str) -> None:
    torch.manual_seed(8)
    module = _module("silu", 6, 70, 40, bias=True)
    layer, meant = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert kernel is not None
    tokens = 96
    index = torch.stack([torch.zeros(tokens, dtype=torch.long), torch.arange(tokens) % 6 + 1], dim=1)  # 6 is nobody
    x, share = torch.randn(tokens, 70).bfloat16(), torch.rand(tokens, 2)
    wanted = reference_experts(module, meant, x.float(), index, share)
    # Some of it through 8-bit activations, some not.
    torch.testing.assert_close(
        kernel(x, index, share).float(), wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max())
    )


@pytest.mark.takes_turns(5)
@any_two({"kernels": ISAS, "precision": PRECISIONS, "value": [float("inf"), float("-inf"), float("nan")]}, ["kernels"])
def test_what_is_no_number_stays_none(kernels: NativeKernels, precision: str, value: float) -> None:
    torch.manual_seed(2)
    module = _module("silu", 2, 64, 48, bias=False)
    layer, _ = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert kernel is not None
    x = torch.randn(2, 64).bfloat16()
    clean = kernel(x, torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2), 0.5))
    x[0, 5] = value
    out = kernel(x, torch.tensor([[0, 1], [1, 0]]), torch.full((2, 2), 0.5))
    assert not out[0].isfinite().any()
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_denormals_are_as_good_as_nothing(kernels: NativeKernels, precision: str) -> None:
    module = _module("silu", 1, 64, 32, bias=False)
    layer, _ = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
    assert kernel is not None
    out = kernel(torch.full((1, 64), 1e-40).bfloat16(), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    assert out.abs().max() < 1e-30


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nobody_wanted_is_nothing(kernels: NativeKernels, precision: str) -> None:
    module = _module("silu", 3, 64, 32, bias=True)
    kernel = choose_kernel(module, _layer(module, precision)[0], kernels)
    assert kernel is not None
    for nobody in (3, 1 << 40, -1):
        index = torch.full((2, 2), nobody)
        if nobody >= 0:
            assert not kernel(torch.randn(2, 64).bfloat16(), index, torch.ones(2, 2)).any()


def test_an_unknown_gate_is_computed_in_torch(kernels: NativeKernels) -> None:
    class OwnGate(StandardExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return gate.sin() * up

    torch.manual_seed(4)
    module = OwnGate(3, 40, 24, torch.nn.SiLU())
    layer, meant = _layer(module, "int8")
    kernel = choose_kernel(module, layer, kernels)
    assert not isinstance(kernel, NativeExperts)
    assert kernel is not None
    x, index, share = torch.randn(11, 40).bfloat16(), torch.randint(0, 3, (11, 2)), torch.rand(11, 2)
    wanted = reference_experts(module, meant, x.float(), index, share)
    _assert_near(kernel(x, index, share), wanted, meant, _summed(module, meant, x.float(), index, share))
    assert ExpertMath.of(module).activation is None


def test_equal_experts_are_equal_bytes() -> None:
    module = _module("silu", 1, 33, 17, bias=True)
    plain = RecordLayout.of(
        {name: (tuple(p.shape[1:]), torch.bfloat16) for name, p in module.named_parameters()}, transposed=False
    )
    layout = RecordLayout.in_tiles(plain, lambda _: FORMATS["int4"], Pairing.HALVES)
    record = torch.zeros(plain.nbytes, dtype=torch.uint8)
    plain.stacked_view(record[None], plain.parts[0]).normal_()
    first, second = torch.randint(0, 256, (2, layout.nbytes), dtype=torch.uint8)
    quantise_record(layout, record, first)
    quantise_record(layout, record, second)
    assert torch.equal(first, second)


def test_a_more_precise_down_projection_has_no_zeros_and_less_error() -> None:
    torch.manual_seed(6)
    module = _module("silu", 2, 70, 40, bias=True)
    layer, _ = _layer(module, MIXED)
    layout = layer.layout
    names = [part.name for part in layout.parts]
    assert "gate_up_proj_zeros" in names
    assert "down_proj_zeros" not in names
    assert (layout.tiled_shape("gate_up_proj").format.name, layout.tiled_shape("down_proj").format.name) == (
        "int4",
        "int8",
    )
    plain = RecordLayout.in_tiles(layout.plain, lambda _: FORMATS["int4"], layout.pairing)
    eight = RecordLayout.in_tiles(layout.plain, lambda _: FORMATS["int8"], layout.pairing)
    assert plain.nbytes <= layout.nbytes <= eight.nbytes
    assert layout != plain
