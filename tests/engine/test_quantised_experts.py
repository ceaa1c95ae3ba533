"""Quantised experts against their dequantised weights, natively and in torch: all activations, shapes and routings, few
tokens and many, kernels of one instruction set and of several."""

import ctypes
import random
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
from engine.formats.tiles import Pairing, RecordLayout, dequantise
from engine.kernels import choose_kernel
from engine.kernels.interface import ExpertMath, LayerRecords, activation_of
from engine.kernels.native.choice import FEW, MANY, USES, _Work, apply, choose
from engine.kernels.native.experts import MAX_TOKENS, NativeExperts
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import QuantisedLinear, speed_up_linears
from engine.kernels.native.paged_attention import attend_prompt
from engine.kernels.native.structs import plain_struct
from engine.kernels.reference import reference_experts
from engine.kernels.repack import quantise_record
from engine.kernels.torch_experts import TorchExperts
from tests.combinations import any_two
from tests.engine.conversions import quantise_linears
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
    _assert_near(in_torch(x, index, share), wanted, meant, summed)


@pytest.mark.parametrize("precision", ["int8", "int4", MIXED, "lut4", HALF_PLAIN])
def test_experts_that_many_tokens_want_beside_those_that_few_want(kernels: NativeKernels, precision: str) -> None:
    torch.manual_seed(8)
    module = _module("silu", 6, 70, 40, bias=True)
    layer, meant = _layer(module, precision)
    kernel = choose_kernel(module, layer, kernels)
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


_LINEAR = ("bf16", "int8", "int4", "lut4")


@pytest.fixture(scope="module")
def newest() -> Iterator[NativeKernels]:
    with kernels_of(ISAS[-1], threads=2) as held_back:
        yield held_back


def _mix(draw: random.Random) -> dict[object, Isa]:
    """Each set alone as often as all of them mixed."""
    if draw.random() < 0.5:
        only = draw.choice(ISAS)
        return dict.fromkeys(USES, only)
    return {use: draw.choice(ISAS) for use in USES}


def _experts(draw: random.Random, newest: NativeKernels) -> None:
    precision = draw.choice(PRECISIONS)
    experts, hidden, inner = draw.randint(1, 5), draw.randint(1, 150), draw.randint(1, 100)
    if precision != "bf16":
        hidden, inner = max(hidden, 33), max(inner, 33)
    module = _module(draw.choice(KINDS), experts, hidden, inner, bias=draw.random() < 0.5)
    layer, _ = _layer(module, precision)
    math = ExpertMath.of(module)
    reference = TorchExperts(layer, math)
    tokens = draw.choice([1, 2, 3, 5, 8, 9, 17, 40])
    x = torch.randn(tokens, hidden).bfloat16()
    width = draw.randint(1, experts)
    index, share = torch.rand(tokens, experts + 1).argsort(1)[:, :width], torch.rand(tokens, width)
    got, wanted = (
        NativeExperts(layer, math, newest, reference)(x, index, share).float(),
        reference(x, index, share).float(),
    )
    near = 0.02 if precision == "bf16" else 0.06
    torch.testing.assert_close(got, wanted, rtol=near, atol=near * max(float(wanted.abs().max()), 1e-3))


def _linear(draw: random.Random, newest: NativeKernels) -> None:
    precision, columns = draw.choice(_LINEAR), draw.randint(200, 700)
    rows = 64 * 1024 // columns + draw.randint(1, 200)
    bias = draw.random() < 0.5
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=bias, dtype=torch.bfloat16)).requires_grad_(False)
    offset = model[0].bias.float() if bias else None
    x = torch.randn(draw.choice([1, 2, 7, 8, 9, 30, 49]), columns).bfloat16()
    if precision == "bf16":
        weight = model[0].weight.float()
        assert speed_up_linears(model, newest) == 1
    else:
        assert quantise_linears(model, precision, newest) == 1
        fast_path = model[0].forward
        assert isinstance(fast_path, QuantisedLinear)
        weight = dequantise(fast_path.matrix, torch.float32)
    wanted = torch.nn.functional.linear(x.float(), weight, offset)
    torch.testing.assert_close(model(x).float(), wanted, atol=2e-2, rtol=2e-2)


def _prompt(draw: random.Random, newest: NativeKernels) -> None:
    kv_heads, group, dim, tokens = (
        draw.randint(1, 2),
        draw.choice([1, 3, 8]),
        draw.randint(1, 130),
        draw.randint(1, 200),
    )
    held = tokens + draw.choice([0, 5, 130])
    queries = torch.randn(kv_heads * group, tokens, dim).bfloat16()
    keys, values = torch.randn(kv_heads, held, dim).bfloat16(), torch.randn(kv_heads, held, dim).bfloat16()
    got = attend_prompt(newest, queries, keys, values, dim**-0.5)
    sees = torch.arange(held)[None] <= torch.arange(held - tokens, held)[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries.float(), *(each.float().repeat_interleave(group, 0) for each in (keys, values)), attn_mask=sees
    )
    torch.testing.assert_close(got.float(), wanted.transpose(0, 1), atol=3e-2, rtol=3e-2)


def _case(seed: int, newest: NativeKernels) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    apply(newest, _mix(draw), ISAS)  # type: ignore[arg-type]
    try:
        draw.choice([_experts, _linear, _prompt])(draw, newest)
    finally:
        newest.use(newest.isa)


@pytest.mark.takes_turns(6)
@pytest.mark.parametrize("seed", range(60))
def test_any_mix_is_near_the_reference(newest: NativeKernels, seed: int) -> None:
    _case(seed, newest)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hundred", range(100))
def test_many_mixes_over_odd_sizes(newest: NativeKernels, hundred: int) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        _case(seed, newest)


def test_the_real_kernels_can_be_measured(newest: NativeKernels) -> None:
    with _Work(newest) as work:
        assert work.seconds(USES[0], ISAS[0]) > 0
        found = choose(ISAS, work.seconds, rounds=1)
    assert found is None or set(found) <= set(USES)
    assert {use.kind for use in USES} == {FEW, MANY}


def _both(
    kernels: NativeKernels, kind: str, precision: str, sizes: tuple[int, int, int], bias: bool
) -> tuple[NativeExperts, TorchExperts]:
    module = _module(kind, *sizes, bias=bias)
    layer, _ = _layer(module, precision)
    math = ExpertMath.of(module)
    in_torch = TorchExperts(layer, math)
    return NativeExperts(layer, math, kernels, many_tokens=in_torch), in_torch


def _routing(tokens: int, experts: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids one above the experts are nobody."""
    return torch.rand(tokens, experts + 1).argsort(1)[:, :width], torch.rand(tokens, width)


def _assert_as_in_torch(got: torch.Tensor, wanted: torch.Tensor, precision: str) -> None:
    """bf16 rounds where torch does; few tokens of a quantised expert come as whole numbers in groups of 32."""
    share = 0.02 if precision == "bf16" else 0.06
    torch.testing.assert_close(got.float(), wanted.float(), rtol=share, atol=share * float(wanted.abs().max()))


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@settings(max_examples=2)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    experts=st.integers(1, 9),
    hidden=st.integers(33, 200),
    inner=st.integers(33, 150),
    tokens=st.integers(9, 150),
    seed=st.integers(0, 2**31),
)
def test_many_tokens_are_near_torch(
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
    native, in_torch = _both(kernels, kind, precision, (experts, hidden, inner), bias)
    x = torch.randn(tokens, hidden).bfloat16()
    index, share = _routing(tokens, experts, min(experts, 3))
    _assert_as_in_torch(native(x, index, share), in_torch(x, index, share), precision)


@settings(max_examples=2)
@given(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    hidden=st.integers(500, 600),
    inner=st.integers(500, 560),
    tokens=st.integers(9, 60),
    seed=st.integers(0, 2**31),
)
def test_long_rows_are_near_torch(
    kernels: NativeKernels, kind: str, bias: bool, hidden: int, inner: int, tokens: int, seed: int
) -> None:
    torch.manual_seed(seed)
    native, in_torch = _both(kernels, kind, "bf16", (4, hidden, inner), bias)
    x = torch.randn(tokens, hidden).bfloat16()
    index, share = _routing(tokens, 4, 2)
    _assert_as_in_torch(native(x, index, share), in_torch(x, index, share), "bf16")


@settings(max_examples=20)
@given(rows=st.integers(1, 90), columns=st.integers(1, 1100), tokens=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_linear_rows_are_near_torch(kernels: NativeKernels, rows: int, columns: int, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(rows, columns).bfloat16(), torch.randn(tokens, columns).bfloat16()
    out, struct = torch.full((tokens, rows), torch.nan).bfloat16(), plain_struct(weight)
    places = x.data_ptr(), None, 0, out.data_ptr()
    assert kernels.linear_rows(kernels.pool, ctypes.addressof(struct), tokens, *places) == 0
    wanted = x.double() @ weight.double().T
    torch.testing.assert_close(out.double(), wanted, rtol=0.005, atol=0.002 * columns**0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_4096_tokens_of_which_most_want_one_expert(kernels: NativeKernels, precision: str) -> None:
    torch.manual_seed(3)
    native, in_torch = _both(kernels, "silu", precision, (6, 64, 48), bias=False)
    x = torch.randn(4096, 64).bfloat16()
    index = torch.zeros(4096, 1, dtype=torch.long)
    index[:5] = torch.tensor([[4], [6], [2], [4], [7]])  # 6 and 7 are nobody, 1, 3 and 5 are empty
    share = torch.rand(4096, 1)
    _assert_as_in_torch(native(x, index, share), in_torch(x, index, share), precision)


def test_nobody_is_wanted(kernels: NativeKernels) -> None:
    native, _ = _both(kernels, "silu", "bf16", (2, 64, 32), bias=True)
    assert not native(torch.ones(20, 64).bfloat16(), torch.full((20, 2), 2), torch.ones(20, 2)).any()


@any_two(
    {"kernels": ISAS, "precision": PRECISIONS, "value": [float("inf"), float("-inf"), float("nan"), 1e-40]},
    ["kernels"],
)
def test_what_is_not_finite_stays_in_its_token(kernels: NativeKernels, precision: str, value: float) -> None:
    torch.manual_seed(5)
    native, in_torch = _both(kernels, "silu", precision, (2, 96, 64), bias=False)
    x = torch.randn(40, 96).bfloat16()
    index, share = _routing(40, 2, 2)
    clean = native(x, index, share)
    x[7, 5] = value
    got, wanted = native(x, index, share), in_torch(x, index, share)
    others = torch.arange(40) != 7
    assert torch.equal(got[others], clean[others])
    if value != 1e-40:
        assert torch.equal(got[7].isfinite(), wanted[7].isfinite())
    else:
        _assert_as_in_torch(got, wanted, precision)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_threads_do_not_matter(precision: str) -> None:
    torch.manual_seed(6)
    outs = []
    for threads in (1, 2, 5):
        torch.manual_seed(6)
        with kernels_of(ISAS[-1], threads) as these:
            native, _ = _both(these, "silu", precision, (12, 96, 64), bias=True)
            index, share = _routing(400, 12, 4)
            outs.append(native(torch.randn(400, 96).bfloat16(), index, share))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_token_count_makes_a_step(kernels: NativeKernels, precision: str) -> None:
    """One expert of 1 to 70 tokens: the same numbers whichever kernel takes them."""
    torch.manual_seed(7)
    native, _ = _both(kernels, "silu", precision, (1, 128, 64), bias=False)
    x, share = torch.randn(70, 128).bfloat16(), torch.rand(70, 1)
    index = torch.zeros(70, 1, dtype=torch.long)
    whole = native(x, index, share)
    for tokens in (1, 2, 3, 4, 7, 8, 9, 11, 12, 15, 16, 17, 31, 32, 33, 48, 64):
        _assert_as_in_torch(native(x[:tokens], index[:tokens], share[:tokens]), whole[:tokens], precision)
