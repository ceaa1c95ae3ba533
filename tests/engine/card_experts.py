"""Kernels for cards against the plain definition: on a card, and on an emulated one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.activations import ACT2FN

from engine.experts.dispatch import StandardExperts
from engine.experts.record import allocate_records
from engine.formats import FORMATS
from engine.formats.ggml import GGML, BlockType
from engine.formats.tiles import Pairing, RecordLayout, dequantise
from engine.kernels.gpu.experts import CardExperts, can_compute
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.interface import ExpertMath, LayerRecords, activation_of
from engine.kernels.reference import reference_experts
from engine.kernels.repack import quantise_record
from tests.engine.ggml_blocks import made_up_blocks

CPU = torch.device("cpu")
KINDS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2 without gate", "silu without gate", "gpt-oss", "clamped")
PRECISIONS = ("fp32", "bf16", "int8", "int4", "lut4")


class GptOssExperts(StandardExperts):
    """Recognised by where its gate is said to come from."""

    limit, alpha = 0.8, 1.702


def _gpt_oss_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


_gpt_oss_gate.__module__ = "transformers.models.gpt_oss.modeling_gpt_oss"
GptOssExperts._apply_gate = _gpt_oss_gate


class ClampedExperts(StandardExperts):
    """As DeepSeek-V4's."""

    limit = 0.5


def _clamped_gate(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


_clamped_gate.__module__ = "transformers.models.deepseek_v4.modeling_deepseek_v4"
ClampedExperts._apply_gate = _clamped_gate


class OwnGate(StandardExperts):
    """A gate that only the module knows."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gate.sin() * up


@dataclass(frozen=True)
class Cut:
    """Records of one layer in several pieces of memory, as the slots of a cache are."""

    layout: RecordLayout
    pieces: Sequence[torch.Tensor]

    @property
    def num_experts(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device


def module_of(kind: str, experts: int, hidden: int, inner: int, *, bias: bool) -> StandardExperts:
    named = {"gpt-oss": GptOssExperts, "clamped": ClampedExperts, "own": OwnGate}
    if kind in named:
        return named[kind](experts, hidden, inner, torch.nn.SiLU(), has_bias=bias)
    name, _, rest = kind.partition(" ")
    return StandardExperts(experts, hidden, inner, ACT2FN[name], has_gate=not rest, has_bias=bias)


def layer_of(
    module: StandardExperts, precision: str, device: torch.device, pieces: int = 1
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Random weights in records on the device, and what they mean, in fp32 on the host.

    `precision` may be a type of GGUF files, or two for gates and for ups, as in `Q4_K Q6_K`.
    """
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    shapes = {name: (tuple(p.shape[1:]), dtype) for name, p in module.named_parameters()}
    plain = RecordLayout.of(shapes, transposed=False)
    source = LayerRecords("experts", plain, allocate_records(module.num_experts, plain, CPU))
    for tensor in source.stacked.values():
        tensor.copy_(torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5)
    records, layout = source.records, plain
    meant = {name: tensor.float() for name, tensor in source.stacked.items()}
    if precision.split()[0] in GGML:
        layout, records, meant = _in_blocks(module, plain, [GGML[each] for each in precision.split()], meant)
    elif FORMATS[precision].is_tiled:
        activation = activation_of(module)
        pairing = activation.pairing if activation is not None and module.has_gate else Pairing.HALVES
        layout = RecordLayout.in_tiles(plain, lambda _: FORMATS[precision], pairing)
        target = LayerRecords("experts", layout, allocate_records(module.num_experts, layout, CPU))
        for expert in range(module.num_experts):
            quantise_record(layout, source.records[expert], target.records[expert])
        records = target.records
        for name in [name for name, tensor in meant.items() if tensor.dim() == 3]:
            rows = [dequantise(layout.matrix(target.rows, name, e), torch.float32) for e in range(module.num_experts)]
            meant[name] = torch.stack(rows)
    there = []
    for piece in records.tensor_split(min(pieces, len(records))):
        memory = allocate_records(len(piece), layout, device)
        memory.copy_(piece)
        there.append(memory)
    return Cut(layout, there), meant


def _in_blocks(
    module: StandardExperts, plain: RecordLayout, kinds: list[BlockType], meant: dict[str, torch.Tensor]
) -> tuple[RecordLayout, torch.Tensor, dict[str, torch.Tensor]]:
    """Gate rows come first, then those of ups; the module may have them in turn."""
    activation = activation_of(module)
    alternates = activation.pairing is Pairing.ALTERNATING
    first = "gate_up_proj" if module.has_gate else "up_proj"
    gates = [kinds[0], kinds[-1]] if module.has_gate else [kinds[0]]
    layout = RecordLayout.in_blocks(plain, {first: gates, "down_proj": [kinds[0]]}, alternates=alternates)
    target = LayerRecords("experts", layout, allocate_records(module.num_experts, layout, CPU))
    experts, meant = module.num_experts, dict(meant)
    for name in (first, "down_proj"):
        values = []
        for number, (own, kind) in enumerate(layout.blocks_of(name)):
            rows, width = next(part.shape for part in layout.parts if part.name == own)
            blocks = made_up_blocks(kind, experts * rows, width // kind.nbytes, number + 1)
            spread = float(np.std(kind.dequantise(blocks.raw.numpy())))
            for at in kind.halves:  # so that outputs are of the size of inputs
                scales = blocks.raw.view(-1, kind.nbytes)[:, at : at + 2]
                smaller = scales.contiguous().view(torch.float16) * (blocks.columns**-0.5 / spread)
                scales.copy_(smaller.view(torch.uint8))
            target.stacked[own].copy_(blocks.raw.view(experts, rows, width))
            values.append(torch.from_numpy(kind.dequantise(blocks.raw.numpy())).view(experts, rows, -1))
        meant[name] = torch.cat(values, 1)
        if alternates and name == first:
            meant[name] = torch.stack(values, 2).flatten(1, 2)
    if (bias := f"{first}_bias") in meant:
        gate_first = meant[bias].view(experts, -1, 2).mT.flatten(1) if alternates else meant[bias]
        target.stacked[bias].copy_(gate_first)
        target.stacked["down_proj_bias"].copy_(meant["down_proj_bias"])
    return layout, target.records, meant


def check(
    kernels: CardKernels,
    device: torch.device,
    kind: str,
    precision: str,
    *,
    tokens: int,
    width: int,
    experts: int = 5,
    hidden: int = 70,
    inner: int = 40,
    bias: bool = True,
    pieces: int = 2,
    seed: int = 0,
    norm: Any = None,
) -> None:
    """Random experts and routing, nobody among them, against the plain definition in fp32."""
    torch.manual_seed(seed)
    module = module_of(kind, experts, hidden, inner, bias=bias)
    if norm is not None:
        module.has_post_expert_norm, module.post_expert_norm = True, norm
    layer, meant = layer_of(module, precision, device, pieces)
    math = ExpertMath.of(module)
    assert can_compute(layer, math)
    kernel = CardExperts(layer, math, kernels)
    index = torch.stack([torch.randperm(experts + 1)[:width] for _ in range(tokens)])
    share = torch.rand(tokens, width)
    x = torch.randn(tokens, hidden).to(torch.float32 if precision == "fp32" else torch.bfloat16)
    wanted = reference_experts(module, meant, x.float(), index, share)
    with torch.inference_mode():
        result = kernel(x.to(device), index.to(device), share.to(device))
    assert result.dtype == x.dtype
    exact = precision == "fp32"
    tolerance = 1e-4 if exact else 0.03
    largest = max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(result.float().cpu(), wanted, rtol=tolerance, atol=tolerance * largest)


def check_not_numbers(kernels: CardKernels, device: torch.device, precision: str) -> None:
    """What is no number stays none, in its own token alone."""
    torch.manual_seed(2)
    module = module_of("silu", 2, 64, 48, bias=False)
    layer, _ = layer_of(module, precision, device)
    kernel = CardExperts(layer, ExpertMath.of(module), kernels)
    index, share = torch.tensor([[0, 1], [1, 0]], device=device), torch.full((2, 2), 0.5, device=device)
    for tokens in (1, 9):  # one by one, and in blocks
        x = torch.randn(2 * tokens, 64, device=device).bfloat16()
        clean = kernel(x, index.repeat(tokens, 1), share.repeat(tokens, 1))
        for value in (float("inf"), float("-inf"), float("nan")):
            spoilt = x.clone()
            spoilt[0, 5] = value
            out = kernel(spoilt, index.repeat(tokens, 1), share.repeat(tokens, 1))
            assert not out[0].isfinite().any()
            assert torch.equal(out[1:], clean[1:])


def check_nobody(kernels: CardKernels, device: torch.device, precision: str, hidden: int = 64, inner: int = 32) -> None:
    """Ids that are no expert give nothing."""
    torch.manual_seed(3)
    module = module_of("silu", 3, hidden, inner, bias=True)
    layer, _ = layer_of(module, precision, device)
    kernel = CardExperts(layer, ExpertMath.of(module), kernels)
    for nobody in (3, 1 << 40, -1):
        for tokens in (1, 40):
            index = torch.full((tokens, 2), nobody, device=device)
            x = torch.randn(tokens, hidden, device=device).bfloat16()
            assert not kernel(x, index, torch.ones(tokens, 2, device=device)).any()
