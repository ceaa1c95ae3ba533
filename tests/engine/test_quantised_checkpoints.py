"""Checkpoints that other tools quantised, written by plain packers after each format's definition, say the same as
their values do when they are stored plainly.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.checkpoint.headers import TensorEntry
from engine.checkpoint.packed import PackedEntry
from engine.checkpoint.profile import read_profile
from engine.checkpoint.quantised.packings import Affine, fields
from engine.checkpoint.shards import read_tensors
from engine.common.errors import EngineError, ErrorCode
from engine.formats import STORED
from engine.formats.tiles import dequantise
from engine.kernels.native.linear import QuantisedLinear
from engine.runtime.load.tensor_reader import TensorReader
from tests.combinations import some
from tests.engine.loaded_tiny import opened_model
from tests.engine.test_family_parity import greedy, logits
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


KINDS: dict[str, Kind] = {
    "gptq": gptq(4, 32),
    "gptq without g_idx": gptq(4, 64, order="none", symmetric=True),
    "gptq desc_act": gptq(4, 32, order="random"),
    "gptq v2, 8 bits": gptq(8, 32, version=2),
    "gptq, a group per row": gptq(8, -1, bias=True),
    "gptq, 2 bits": gptq(2, 32, version=2),
    "awq": awq(32),
    "pack-quantized": pack_quantized(4, 32),
    "pack-quantized, asymmetric": pack_quantized(4, 32, symmetric=False),
    "pack-quantized, 8 bits per row": pack_quantized(8, 0, symmetric=False),
    "pack-quantized with order": pack_quantized(4, 16, order=True, activations=True),
    "int-quantized": int_quantized(),
    "int-quantized, asymmetric": int_quantized(symmetric=False),
    "float-quantized": float_quantized(),
    "float-quantized in blocks": float_quantized(48),
    "nvfp4": nvfp4("compressed-tensors"),
    "nvfp4 by modelopt": nvfp4("modelopt"),
    "mlx": mlx(4, 64),
    "mlx, 8 bits": mlx(8, 32),
    "mlx, 2 bits": mlx(2, 32),
}
ALIKE = ("gptq without g_idx", "gptq, 2 bits", "pack-quantized", "int-quantized", "awq", "mlx, 8 bits", "mlx, 2 bits")
"""What is unpacked like another, and so is not run in every family."""
CASES = [
    *((kind, "qwen3_moe") for kind in KINDS if kind not in ALIKE),
    *((kind, "mixtral") for kind in ("gptq desc_act", "awq", "nvfp4", "mlx")),
    *((kind, "llama") for kind in ("gptq, a group per row", "awq", "mlx")),
    *((kind, "qwen2") for kind in ("gptq, a group per row", "pack-quantized", "mlx, 8 bits")),
    ("awq", "qwen2_moe"),
    ("mlx", "olmoe"),
    ("mlx", "qwen3"),
    ("mlx", "glm4_moe"),
    *(("mlx", family) for family in ("phimoe", "minimax_m2")),
]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("kind", "family"), some(CASES, every=4))
def test_says_the_same_as_its_values(kind: str, family: str, tmp_path: Path) -> None:
    packed, plain = quantised_pair(KINDS[kind], family, tmp_path)
    with opened_model(packed, "fp32") as ours, torch.no_grad():
        reference = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        torch.testing.assert_close(logits(ours.model), logits(reference), rtol=0, atol=1e-5)
        assert greedy(ours.model, 8).tolist() == greedy(reference, 8).tolist()
        if ours.bank is not None:
            assert_has_experts(ours.bank, reference)
        assert ours.info.parameters == sum(parameter.numel() for parameter in reference.parameters())


def assert_has_experts(bank: Any, reference: Any) -> None:
    """Every expert has its own weights: none has been left as it was made, or got another's."""
    for name, layer in bank.layers.items():
        for part, stack in layer.stacked.items():
            expected = reference.get_parameter(f"{name}.{part}")
            torch.testing.assert_close(stack, expected, rtol=1e-6, atol=1e-7)
            first = stack.flatten(1)
            assert len({tuple(row[:8].tolist()) for row in first}) == len(first)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_in_other_precisions(precision: str, tmp_path: Path) -> None:
    packed, plain = quantised_pair(KINDS["awq"], "qwen3_moe", tmp_path)
    with opened_model(packed, precision) as ours, opened_model(plain, precision) as same:
        torch.testing.assert_close(logits(ours.model).float(), logits(same.model).float(), rtol=0, atol=2e-3)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_mean_the_values(kind: str, tmp_path: Path) -> None:
    """Where a record can hold the codes; and rows unpacked some at a time are those unpacked at once."""
    packed, plain = quantised_pair(KINDS[kind], "qwen3_moe", tmp_path, num_hidden_layers=1)
    expected = load_file(plain / "model.safetensors")
    kept = set()
    for name, entry in read_tensors(packed).items():
        if isinstance(entry, PackedEntry):
            with TensorReader(lambda _done, _total: None, lambda: False, 0) as reader:
                arrays = reader.read_arrays(entry)
            np.testing.assert_allclose(entry.packing.unpack(entry.sources, arrays), expected[name], rtol=1e-6)
            coded = entry.packing.codes(entry.sources, arrays)  # type: ignore[attr-defined]
            kept.add(None if coded is None else coded.format.name)
            if coded is not None:
                np.testing.assert_allclose(coded.values(), expected[name], rtol=1e-4, atol=1e-5)
    if kind in ("gptq", "awq", "pack-quantized", "pack-quantized, asymmetric", "mlx"):
        assert kept == {"int4"}
    if kind in ("int-quantized",):
        assert kept == {"int8"}


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("kind", ["gptq", "awq", "pack-quantized, asymmetric", "int-quantized", "mlx"])
def test_codes_are_kept(kind: str, tmp_path: Path) -> None:
    """By default, in experts and in dense layers: only the scales are rounded."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts_per_tok": 8}
    packed, plain = quantised_pair(KINDS[kind], "qwen3_moe", tmp_path, **sizes)
    with opened_model(plain, "fp32") as exact, opened_model(packed, "auto") as ours, torch.no_grad():
        assert ours.info.precision == STORED
        assert exact.bank is not None
        for name, layer in ours.bank.layers.items():
            layout = layer.layout
            assert layout.tiled
            for part, target in layout.tiled:
                assert target.name == ("int8" if kind == "int-quantized" else "int4")
                for expert in range(layer.num_experts):
                    own = dequantise(layout.matrix(layer.rows, part, expert), torch.float32)
                    assert_scales_are_rounded(own, exact.bank.layers[name].stacked[part][expert])
        linear = ours.model.get_submodule("model.layers.1.self_attn.o_proj").__dict__["forward"]
        assert isinstance(linear, QuantisedLinear)
        weight = exact.model.get_submodule("model.layers.1.self_attn.o_proj").weight
        assert_scales_are_rounded(dequantise(linear.matrix, torch.float32), weight)
        wanted = logits(exact.model)
        assert (logits(ours.model).float() - wanted).norm() < 0.05 * wanted.norm()


def assert_scales_are_rounded(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert (ours - exact).norm() <= 2**-8 * exact.norm()


def test_codes_in_another_order_are_not_kept(tmp_path: Path) -> None:
    packed, _ = quantised_pair(KINDS["gptq desc_act"], "qwen3_moe", tmp_path, moe_intermediate_size=256)
    with opened_model(packed, "auto") as ours:
        assert ours.info.precision != STORED


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 4), st.data())
def test_fields_of_words(bits: int, rows: int, words: int, data: st.DataObject) -> None:
    size = words * 32 // bits
    codes = [data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=size, max_size=size)) for _ in range(rows)]
    assert fields(into_words(torch.tensor(codes), bits).numpy(), bits).tolist() == codes


def test_constant_groups_of_mlx() -> None:
    """Their scale is 0: the bias is all there is."""
    codes = np.arange(128, dtype=np.uint8).reshape(2, 64) % 16
    scales, biases = np.array([[0, 0.5], [0.25, 0]], np.float32), np.array([[3, -2], [1, -5]], np.float32)
    words = into_words(torch.from_numpy(codes), 4).view(torch.uint32).numpy()
    entries = [TensorEntry(Path(), "", dtype, (), 0, 0) for dtype in ("U32", "F32", "F32")]
    packing, arrays = Affine(4), [words, scales, biases]
    coded = packing.codes(entries, arrays)
    np.testing.assert_allclose(coded.values(), packing.unpack(entries, arrays))


def test_zeros_of_the_first_version_that_carry(tmp_path: Path) -> None:
    """A zero of 0 is stored by taking 1 from each of a word's fields at once, which borrows from the next."""
    packed, _ = quantised_pair(gptq(4, 64, version=2, order="none"), "llama", tmp_path)
    expected = _weights(packed)

    def lower(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("qzeros")]:
            lowered = (tensors[name].long() - 0x11111111) & 0xFFFFFFFF
            tensors[name] = torch.where(lowered >= 2**31, lowered - 2**32, lowered).int()

    change(packed, lower)
    say(packed, quantization_config=KINDS["gptq"].config)
    for name, values in _weights(packed).items():
        assert np.array_equal(values, expected[name])


def _weights(folder: Path) -> dict[str, Any]:
    found = {}
    with TensorReader(lambda _done, _total: None, lambda: False, 0, dtype=torch.float32) as reader:
        for name, entry in read_tensors(folder).items():
            if isinstance(entry, PackedEntry):
                found[name] = reader.read(entry).numpy()
    return found


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_what_is_known_without_reading_weights(tmp_path: Path) -> None:
    packed, plain = quantised_pair(KINDS["mlx"], "qwen3_moe", tmp_path)
    ours, same = read_profile(packed), read_profile(plain)
    assert (ours.parameters, ours.expert_parameters) == (same.parameters, same.expert_parameters)
    assert ours.quantization == "mlx"
    assert ours.bytes < same.bytes


def test_mixed_bits(tmp_path: Path) -> None:
    """Modules of the same checkpoint by several groups of the configuration, and some left plain."""
    coarse, fine = pack_quantized(4, 32), pack_quantized(8, 0)

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Any:
        return (coarse if weight.shape[0] == 64 else fine).pack(weight, generator)

    groups = {f"group_{number}": kind.config["config_groups"]["group_0"] for number, kind in enumerate((coarse, fine))}
    packed, plain = quantised_pair(Kind({**coarse.config, "config_groups": groups}, pack), "qwen3_moe", tmp_path)
    with opened_model(packed, "fp32") as ours, opened_model(plain, "fp32") as same:
        torch.testing.assert_close(logits(ours.model), logits(same.model), rtol=0, atol=1e-5)


def test_mlx_with_more_bits_for_some_modules(tmp_path: Path) -> None:
    packed, plain = quantised_pair(KINDS["mlx"], "qwen3_moe", tmp_path)
    weight = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    parts, values = KINDS["mlx, 8 bits"].pack(weight, torch.Generator().manual_seed(1))
    module = "model.embed_tokens"
    change(packed, lambda tensors: tensors.update({f"{module}.{part}": each for part, each in parts.items()}))
    change(plain, lambda tensors: tensors.update({f"{module}.weight": values}))
    own = {module: KINDS["mlx, 8 bits"].config}
    say(packed, quantization={**KINDS["mlx"].config, **own}, quantization_config={**KINDS["mlx"].config, **own})
    with opened_model(packed, "fp32") as ours, opened_model(plain, "fp32") as same:
        torch.testing.assert_close(logits(ours.model), logits(same.model), rtol=0, atol=1e-5)


def test_configuration_in_a_file_beside(tmp_path: Path) -> None:
    packed, _ = quantised_pair(KINDS["gptq"], "llama", tmp_path)
    say(packed, quantization_config=None)
    assert refusal(packed).code is ErrorCode.MODEL_UNSUPPORTED
    (packed / "quantize_config.json").write_text(json.dumps(KINDS["gptq"].config))
    loaded_ones = [entry for entry in read_tensors(packed).values() if isinstance(entry, PackedEntry)]
    assert loaded_ones


def test_over_several_files(tmp_path: Path) -> None:
    """The parts of one weight may be in different files; all of them count as the model's."""
    packed, _ = quantised_pair(KINDS["awq"], "llama", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("scales")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    (packed / "model.safetensors").unlink()
    for number, part in enumerate((rest, scales), 1):
        save_file(part, packed / f"model-{number:05}-of-00002.safetensors")
    assert {file.name for entry in read_tensors(packed).values() for file in entry.files} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def refusal(folder: Path) -> EngineError:
    """Why it is not loaded; what is seen in the headers alone is not looked for in the whole model."""
    with pytest.raises(EngineError) as error, _of_headers_or_all(folder):
        pass
    assert "\n" not in error.value.message
    return error.value


@contextmanager
def _of_headers_or_all(folder: Path) -> Iterator[None]:
    read_tensors(folder)
    with opened_model(folder, "fp32"):
        yield


def _set(
    suffix: str, value: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Changes the tensor of the last such name, or removes it."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = max(name for name in tensors if name.endswith(suffix))
        changed = value(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    return edit


DAMAGE: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None]]] = {
    "no scales": ("gptq", _set("mlp.experts.3.up_proj.scales", lambda _: None)),
    "no zeros": ("awq", _set("qzeros", lambda _: None)),
    "scales of another shape": ("awq", _set("scales", lambda scales: scales[:, :-8])),
    "groups that do not divide": ("gptq without g_idx", _set("self_attn.o_proj.qweight", lambda codes: codes[:-1])),
    "no such group": ("gptq desc_act", _set("g_idx", lambda index: index + 7)),
    "negative group": ("gptq desc_act", _set("g_idx", lambda index: index - 1)),
    "a short g_idx": ("gptq desc_act", _set("g_idx", lambda index: index[:-1])),
    "another shape said": ("pack-quantized", _set("weight_shape", lambda shape: shape * 2)),
    "no zero point": ("pack-quantized, asymmetric", _set("weight_zero_point", lambda _: None)),
    "no scale in all": ("nvfp4", _set("weight_global_scale", lambda _: None)),
    "scales for 32": ("nvfp4", _set("weight_scale", lambda scales: scales[:, : scales.shape[1] // 2])),
    "no biases": ("mlx", _set("biases", lambda _: None)),
    "a short stack": ("mlx", _set("switch_mlp.up_proj.scales", lambda scales: scales[:-1])),
    "an expert too few": ("awq", lambda tensors: [tensors.pop(key) for key in list(tensors) if "experts.5.up" in key]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged(damage: str, tmp_path: Path) -> None:
    kind, edit = DAMAGE[damage]
    packed, _ = quantised_pair(KINDS[kind], "qwen3_moe", tmp_path, num_hidden_layers=1)
    change(packed, edit)
    assert refusal(packed).code is ErrorCode.CHECKPOINT_DAMAGED


CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], ErrorCode]] = {
    "other bits": ("gptq", {"bits": 8}, ErrorCode.CHECKPOINT_DAMAGED),
    "nothing quantised": ("plain", {"quant_method": "gptq", "bits": 4}, ErrorCode.CHECKPOINT_DAMAGED),
    "another size of groups": ("mlx", {"group_size": 32}, ErrorCode.CHECKPOINT_DAMAGED),
    "group size of none": ("mlx", {"group_size": 0}, ErrorCode.CHECKPOINT_DAMAGED),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, ErrorCode.MODEL_UNSUPPORTED),
    "gemv": ("awq", {"version": "gemv"}, ErrorCode.MODEL_UNSUPPORTED),
    "bitsandbytes": ("gptq", {"quant_method": "bitsandbytes"}, ErrorCode.MODEL_UNSUPPORTED),
    "auto-round of its own": ("gptq", {"quant_method": "auto-round"}, ErrorCode.MODEL_UNSUPPORTED),
    "no method": ("gptq", {"quant_method": None, "bits": None}, ErrorCode.MODEL_UNSUPPORTED),
    "sparse": ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ErrorCode.MODEL_UNSUPPORTED),
    "marlin-24": ("pack-quantized", {"format": "marlin-24"}, ErrorCode.MODEL_UNSUPPORTED),
    "no groups": ("pack-quantized", {"config_groups": {}}, ErrorCode.MODEL_UNSUPPORTED),
    "groups of nonsense": ("pack-quantized", {"config_groups": {"a": {"weights": {"num_bits": "4", "group_size": []}}}},
                           ErrorCode.MODEL_UNSUPPORTED),
    "mxfp4 by MLX": ("mlx", {"mode": "mxfp4"}, ErrorCode.MODEL_UNSUPPORTED),
    "3 bits by MLX": ("mlx", {"bits": 3}, ErrorCode.MODEL_UNSUPPORTED),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_configuration_that_is_not_read(case: str, tmp_path: Path) -> None:
    kind, values, code = CONFIGURATIONS[case]
    packed, plain = quantised_pair(KINDS.get(kind, KINDS["gptq"]), "llama", tmp_path, num_hidden_layers=1)
    folder = plain if kind == "plain" else packed
    key = KINDS[kind].key if kind != "plain" else "quantization_config"
    own = {} if kind == "plain" else KINDS[kind].config
    say(folder, **{key: {**own, **values}})
    assert refusal(folder).code is code


def test_gptq_with_three_bits(tmp_path: Path) -> None:
    packed, _ = quantised_pair(KINDS["gptq without g_idx"], "llama", tmp_path)
    change(packed, _set("q_proj.qzeros", lambda zeros: zeros[:, : zeros.shape[1] * 3 // 4]))
    assert refusal(packed).code is ErrorCode.MODEL_UNSUPPORTED


def test_tensors_with_no_known_use(tmp_path: Path) -> None:
    packed, _ = quantised_pair(KINDS["nvfp4 by modelopt"], "llama", tmp_path)
    extra = {"model.layers.0.self_attn.q_proj.pre_quant_scale": torch.ones(64)}
    change(packed, lambda tensors: tensors.update(extra))
    assert refusal(packed).code is ErrorCode.MODEL_UNSUPPORTED


def test_a_bias_that_is_not_zero(tmp_path: Path) -> None:
    """GPTQ's tools store one for every module: it may stand for nothing only if it is nothing."""
    packed, _ = quantised_pair(KINDS["gptq, a group per row"], "llama", tmp_path)
    change(packed, _set("o_proj.bias", lambda bias: bias + 1))
    assert refusal(packed).code is ErrorCode.MODEL_UNSUPPORTED


def test_a_family_that_mlx_stores_otherwise(tmp_path: Path) -> None:
    packed, _ = quantised_pair(KINDS["mlx"], "dots1", tmp_path)
    assert refusal(packed).code is ErrorCode.MODEL_UNSUPPORTED


def test_activations_are_not_quantised_and_it_says_so(tmp_path: Path) -> None:
    notes = []
    for number, kind in enumerate(("pack-quantized", "pack-quantized with order")):
        packed, _ = quantised_pair(KINDS[kind], "llama", tmp_path / str(number))
        with opened_model(packed, "fp32") as ours:
            notes.append(ours.info.device_note)
    assert len(notes[1]) > len(notes[0])
