"""Checkpoints written in the formats of tools that quantise, by plain packers after each format's definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_families import tiny_checkpoint

Tensors = dict[str, torch.Tensor]
SIZES = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_PLAIN = ("embed", "norm", "lm_head", "mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Kind:
    """A format: what config.json says, and a matrix -> (the tensors it is stored as, by last part, and its values)."""

    config: dict[str, Any]
    pack: Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
    key: str = "quantization_config"


def into_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] of codes -> int32 [rows, n * bits / 32], the first code lowest."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per))
    words = torch.zeros(len(codes), padded.shape[1] // per, dtype=torch.long)
    for place in range(per):
        words |= padded[:, place::per] << (bits * place)
    return words.to(torch.int32) if words.max() < 2**31 else torch.where(words >= 2**31, words - 2**32, words).int()


def drawn(
    weight: torch.Tensor, bits: int, groups: int, generator: torch.Generator, *, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes [rows, columns], scales and zeros [rows, groups], with values of about the weight's size."""
    rows, columns = weight.shape
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    spread = 0.5 + torch.rand(rows, groups, generator=generator)
    scales = (spread * weight.std() * 4 / 2**bits).half().float()
    low, high = 2**bits // 4, 2**bits * 3 // 4
    zeros = torch.randint(low, high, (rows, groups), generator=generator)
    return codes, scales, torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros


def values_of(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor | None = None
) -> torch.Tensor:
    columns, groups = codes.shape[1], scales.shape[1]
    of = torch.arange(columns) // (columns // groups) if group_of is None else group_of
    return (codes - zeros[:, of]).float() * scales[:, of]


def gptq(
    bits: int, size: int, *, version: int = 1, order: str = "trivial", symmetric: bool = False, bias: bool = False
) -> Kind:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        groups = columns // size if size > 0 else 1
        codes, scales, zeros = drawn(weight, bits, groups, generator, symmetric=symmetric)
        index = torch.arange(columns) // (columns // groups)
        if order == "random":
            index = torch.randint(0, groups, (columns,), generator=generator)
        stored = {
            "qweight": into_words(codes, bits).T.contiguous(),
            "qzeros": into_words(zeros.T - int(version == 1), bits),
            "scales": scales.T.contiguous().half(),
        }
        if order != "none":
            stored["g_idx"] = index.int()
        if bias:
            stored["bias"] = torch.zeros(len(weight), dtype=torch.half)
        return stored, values_of(codes, scales, zeros, index)

    said = {"bits": bits, "group_size": size, "desc_act": order == "random", "sym": symmetric}
    return Kind({"quant_method": "gptq", **said, **({"checkpoint_format": "gptq_v2"} if version == 2 else {})}, pack)


def awq(size: int) -> Kind:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = drawn(weight, 4, weight.shape[1] // size, generator)
        chosen = [8 * block + place for block in range(len(weight) // 8) for place in AWQ_ORDER]
        stored = {
            "qweight": into_words(codes.T[:, chosen], 4),
            "qzeros": into_words(zeros.T[:, chosen], 4),
            "scales": scales.T.contiguous().half(),
        }
        return stored, values_of(codes, scales, zeros)

    return Kind({"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}, pack)


def _compressed(kind: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **others}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": []}


def pack_quantized(
    bits: int, size: int, *, symmetric: bool = True, order: bool = False, activations: bool = False
) -> Kind:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        groups = columns // size if size else 1
        codes, scales, zeros = drawn(weight, bits, groups, generator, symmetric=symmetric)
        index = torch.arange(columns) // (columns // groups)
        stored = {
            "weight_packed": into_words(codes, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = into_words(zeros.T, bits).T.contiguous()
        if order:
            index = index[torch.randperm(columns, generator=generator)]
            stored["weight_g_idx"] = index.int()
        return stored, values_of(codes, scales, zeros, index)

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if size else "channel",
        "group_size": size or None,
        "symmetric": symmetric,
    }
    more = {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}} if activations else {}
    return Kind(_compressed("pack-quantized", weights, **more), pack)


def int_quantized(*, symmetric: bool = True) -> Kind:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = drawn(weight, 8, 1, generator, symmetric=symmetric)
        stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales.bfloat16()}
        if not symmetric:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, values_of(codes, scales.bfloat16().float(), zeros)

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric}
    return Kind(_compressed("int-quantized", weights), pack)


def float_quantized(block: int = 0) -> Kind:
    def pack(weight: torch.Tensor, _generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        if block:
            tall, wide = -(-rows // block), -(-columns // block)
            scales = 0.001 * torch.arange(1, 1 + tall * wide).reshape(tall, wide).sqrt()
            spread = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        else:
            scales = weight.abs().amax(1, keepdim=True) / 448
            spread = scales
        stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scales}, stored.float() * spread

    weights = {"num_bits": 8, "type": "float", "strategy": "block" if block else "channel"}
    own = {"block_structure": [block, block]} if block else {}
    return Kind(_compressed("float-quantized", {**weights, **own}), pack)


def nvfp4(tool: str) -> Kind:
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = torch.tensor([*table, *(-value for value in table)])

    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        codes = torch.randint(0, 16, weight.shape, generator=generator)
        scales = (100 + 300 * torch.rand(rows, columns // 16, generator=generator)).to(torch.float8_e4m3fn)
        whole = (weight.std() / 800).float()
        values = numbers[codes] * scales.float().repeat_interleave(16, 1) * whole
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if tool == "modelopt":
            return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole,
                    "input_scale": torch.ones(())}, values  # fmt: skip
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": 1 / whole[None],
                "input_global_scale": torch.ones(1)}, values  # fmt: skip

    if tool == "modelopt":
        return Kind({"quant_method": "modelopt", "quant_algo": "NVFP4"}, pack)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Kind(_compressed("nvfp4-pack-quantized", weights), pack)


def mlx(bits: int, size: int) -> Kind:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = drawn(weight, bits, weight.shape[1] // size, generator)
        biases = (-zeros * scales).half()
        values = codes.float() * scales.repeat_interleave(size, 1) + biases.float().repeat_interleave(size, 1)
        return {"weight": into_words(codes, bits).view(torch.uint32), "scales": scales.half(), "biases": biases}, values

    return Kind({"group_size": size, "bits": bits}, pack, "quantization")


def quantised_pair(kind: Kind, family: str, folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """A tiny checkpoint in this format, and the same values as plain float32."""
    packed, plain = folder / "packed", folder / "plain"
    generator = torch.Generator().manual_seed(5)
    tiny_checkpoint(family, plain, **{**SIZES, **overrides})
    shutil.copytree(plain, packed)
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in _PLAIN):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = kind.pack(tensor, generator)
        module = name.removesuffix(".weight")
        for part, value in parts.items():
            if part != "bias" or f"{module}.bias" not in meant:
                stored[f"{module}.{part}"] = value.contiguous()
    if kind.key == "quantization":
        stored = dict(_stacked(stored))
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    say(packed, **{kind.key: kind.config})
    return packed, plain


def say(folder: Path, **values: Any) -> None:
    """Changes config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _stacked(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts as MLX stores them: a stack, by names of its own."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, found, rest = name.partition(".experts.")
        if not found:
            yield name, tensor
            continue
        expert, matrix, part = rest.split(".")
        stacks.setdefault(f"{before}.switch_mlp.{names.get(matrix, matrix)}.{part}", {})[int(expert)] = tensor
    for name, experts in stacks.items():
        yield name, torch.stack([experts[expert] for expert in range(len(experts))])
