"""The fast paths against the plain definition, over shapes, kinds of experts and routings."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.record import allocate_records
from engine.formats.tiles import RecordLayout
from engine.kernels import choose_kernel
from engine.kernels.interface import LayerRecords
from engine.kernels.reference import reference_experts

CPU = torch.device("cpu")


@dataclass
class Experts:
    """An experts module as the interface sees it, with its weights beside it."""

    num_experts: int
    hidden: int
    inner: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    has_post_expert_norm: bool

    def __post_init__(self) -> None:
        self.act_fn = torch.nn.SiLU() if self.has_gate else torch.nn.ReLU()

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up[..., ::2].clamp(max=1.0) * gate_up[..., 1::2].sigmoid()

    def post_expert_norm(self, out: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(out, dim=-1)

    def weights(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        width = 2 * self.inner if self.has_gate else self.inner
        first = "gate_up_proj" if self.has_gate else "up_proj"
        shapes: dict[str, tuple[int, ...]] = {first: (width, self.hidden), "down_proj": (self.hidden, self.inner)}
        if self.is_transposed:
            shapes = {name: shape[::-1] for name, shape in shapes.items()}
        if self.has_bias:
            shapes |= {f"{first}_bias": (width,), "down_proj_bias": (self.hidden,)}
        return {name: torch.randn(self.num_experts, *shape).mul_(0.3).to(dtype) for name, shape in shapes.items()}


def layer_of(module: Any, weights: dict[str, torch.Tensor]) -> LayerRecords:
    shapes = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in weights.items()}
    layout = RecordLayout.of(shapes, transposed=module.is_transposed)
    layer = LayerRecords("experts", layout, allocate_records(module.num_experts, layout, CPU))
    for part in layout.parts:
        tensor = weights[part.name]
        layer.stacked[part.name].copy_(tensor.transpose(-1, -2) if part.transposed else tensor)
    return layer


@given(
    experts=st.integers(1, 9),
    hidden=st.sampled_from([8, 24, 33]),
    inner=st.sampled_from([8, 17]),
    gate=st.booleans(),
    bias=st.booleans(),
    transposed=st.booleans(),
    norm=st.booleans(),
    tokens=st.sampled_from([1, 1, 2, 7, 20]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_equals_the_reference(
    experts: int,
    hidden: int,
    inner: int,
    gate: bool,
    bias: bool,
    transposed: bool,
    norm: bool,
    tokens: int,
    seed: int,
    data: st.DataObject,
) -> None:
    width = data.draw(st.integers(1, experts))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Experts(experts, hidden, inner, gate, bias, transposed, norm)
        weights = module.weights(torch.float32)
        states = torch.randn(tokens, hidden)
        # One id more than there are experts: some families send tokens to nobody.
        index = torch.stack([torch.randperm(experts + 1)[:width] for _ in range(tokens)])
        shares = torch.rand(tokens, width)
    kernel = choose_kernel(module, layer_of(module, weights), None)
    expected = reference_experts(module, weights, states, index, shares)
    torch.testing.assert_close(kernel(states, index, shares), expected, rtol=1e-4, atol=1e-5)
    # Twice, for what it keeps between calls.
    torch.testing.assert_close(kernel(states, index, shares), expected, rtol=1e-4, atol=1e-5)


@given(tokens=st.sampled_from([1, 5]), width=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_bf16_stays_near_the_reference(tokens: int, width: int, seed: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Experts(8, 64, 32, True, False, False, False)
        weights = module.weights(torch.bfloat16)
        states = torch.randn(tokens, 64).bfloat16()
        index = torch.stack([torch.randperm(8)[:width] for _ in range(tokens)])
        shares = torch.rand(tokens, width).softmax(-1)
    kernel = choose_kernel(module, layer_of(module, weights), None)
    exact = reference_experts(
        module, {name: tensor.float() for name, tensor in weights.items()}, states.float(), index, shares
    )
    result = kernel(states, index, shares)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, rtol=0.03, atol=0.03 * float(exact.abs().max()))
