"""Files are used as they lie, GGUF files and safetensors in the numbers that a model computes with: the same results,
nothing converted, copied or written."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.headers import read_header
from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.experts.file_image import EARLY_READS, FileImage
from engine.formats.ggml import BLOCK_TYPES, GGML, BlockType
from engine.kernels.native import library
from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.linear import (
    BlockEmbedding,
    GroupedLinear,
    LatentHeads,
    MixedRows,
    QuantisedLinear,
    TurnedLinear,
    multiplies_groups,
    route_rows,
)
from engine.kernels.native.structs import ExpertsStruct, RouterStruct, SparseBlockStruct
from engine.kernels.repack import Blocks
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kv.layers import library_cache
from engine.runtime.load import weights
from engine.runtime.load.model import load_model
from engine.runtime.telemetry.model_telemetry import memory_parts
from tests.engine.ggml_blocks import made_up_blocks
from tests.engine.loaded_tiny import opened_model
from tests.engine.native_isas import isas, kernels_of
from tests.engine.single_streams import PagedSequence
from tests.engine.test_disk_backed import on_disk
from tests.engine.test_family_parity import PROMPT, decoded_logits, greedy, logits
from tests.engine.test_gguf_architectures import PROMPT_IDS, rewritten, unpacked
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused
from tests.tiny_gguf import write_model

_ISAS = isas()
_NEAR = 0.03
"""Difference between two of a router's logits, as a share of that between all, which rounding may turn round."""
every_type = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)


def _product(blocks: Blocks, x: torch.Tensor, kernels: NativeKernels) -> torch.Tensor:
    """[tokens, rows] by the kernels of a linear layer."""
    module = torch.nn.Linear(blocks.columns, blocks.rows, bias=False, dtype=torch.bfloat16)
    return QuantisedLinear(module, blocks, kernels)(x)


@pytest.mark.takes_turns(3)
@pytest.mark.every_combination
@every_type
@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
def test_rows_are_multiplied_as_they_lie(kind: BlockType, isa: Isa) -> None:
    columns = 416 if kind.elements <= 32 else 5 * kind.elements  # whose last block is none of 256
    blocks = made_up_blocks(kind, 77, columns // kind.elements, 3)
    order = torch.randperm(77, generator=torch.Generator().manual_seed(1))
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = torch.from_numpy(kind.dequantise(blocks.raw.numpy()))
    wanted = x.float() @ weight.mT
    with kernels_of(isa, threads=2) as kernels:
        found = _product(blocks, x, kernels)
        # Vectors are rounded to 8 bits.
        assert (found - wanted).norm() < 0.01 * wanted.norm()
        alone = torch.cat([_product(blocks, row, kernels) for row in x.split(1)])
        for count in (2, 3, 5, 8):  # the same, bit by bit, however many come together
            assert torch.equal(_product(blocks, x[:count], kernels), alone[:count])
        assert (found.float() - alone.float()).norm() < 0.01 * wanted.norm()
        reordered = Blocks(kind, blocks.raw, order)
        assert torch.equal(_product(reordered, x[:8], kernels), alone[:8, order])
        assert torch.equal(_product(reordered, x, kernels), found[:, order])


@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
def test_a_huge_value_takes_nothing_from_those_beside_it(isa: Isa) -> None:
    """A text's first token has such values; 256 of them share a scale in these types."""
    for kind in (each for each in BLOCK_TYPES.values() if each.elements > 32):
        blocks = made_up_blocks(kind, 40, 512 // kind.elements, 3)
        x = torch.randn(19, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
        huge = torch.zeros_like(x)
        huge[3, 7], huge[12, 300] = 2048, -1024
        weight = torch.from_numpy(kind.dequantise(blocks.raw.numpy()))
        module = torch.nn.Linear(512, 40, bias=False, dtype=torch.bfloat16)
        with kernels_of(isa, threads=2) as kernels:
            multiply = QuantisedLinear(module, blocks, kernels, is_head=True)
            mixed = torch.where(huge == 0, x, huge)
            found = multiply(mixed)
            assert torch.equal(multiply(mixed[:8]), torch.cat([multiply(row) for row in mixed[:8].split(1)]))
        beside = (mixed - huge).float() @ weight.mT
        for row in (3, 12):
            assert (found[row] - huge[row].float() @ weight.mT - beside[row]).norm() < 0.02 * beside[row].norm(), (
                kind.name
            )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
def test_rows_of_numbers_are_not_rounded(name: str, isa: Isa) -> None:
    kind = GGML[name]
    weight = torch.randn(90, 301, generator=torch.Generator().manual_seed(4))
    stored = weight.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name])
    blocks = Blocks(kind, stored.view(torch.uint8).view(90, -1))
    x = torch.randn(70, 301, generator=torch.Generator().manual_seed(5)).bfloat16()
    wanted = x.double() @ stored.double().mT
    module = torch.nn.Linear(301, 90, bias=False, dtype=torch.bfloat16)
    with kernels_of(isa, threads=2) as kernels:
        layer = QuantisedLinear(module, blocks, kernels, is_head=True)
        for count in (1, 8, 9, 70):
            assert (layer(x[:count]) - wanted[:count]).norm() < 2e-6 * wanted[:count].norm()


def test_groups_of_rows_are_multiplied_each_with_values_of_its_own() -> None:
    """As in DeepSeek-V4's output of attention, which is computed where it lies."""
    blocks = made_up_blocks(GGML["Q8_0"], 96, 8, 5)
    module = DeepseekV4GroupedLinear(256, 96, 3).bfloat16()
    module.weight.data = torch.from_numpy(blocks.kind.dequantise(blocks.raw.numpy())).bfloat16()
    x = torch.randn(2, 9, 3, 256, generator=torch.Generator().manual_seed(7)).bfloat16()
    assert multiplies_groups(module)
    with kernels_of(_ISAS[-1], threads=2) as kernels, torch.no_grad():
        wanted = module(x)
        found = GroupedLinear(module, blocks, kernels)(x)
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("isa", _ISAS, ids=lambda isa: isa.name)
def test_routers_in_fp32_are_not_rounded(isa: Isa) -> None:
    generator = torch.Generator().manual_seed(6)
    router, norm = torch.randn(20, 96, generator=generator), torch.ones(96, dtype=torch.bfloat16)
    struct = SparseBlockStruct(norm.data_ptr(), experts=ExpertsStruct(count=20, hidden=96), epsilon=1e-6)
    struct.router = RouterStruct(
        router.data_ptr(), top_k=3, groups=1, kept_groups=1, normalise=1, scale=1.0, is_exact=1
    )
    hidden = torch.randn(50, 96, generator=generator)
    with kernels_of(isa, threads=2) as kernels:
        for count in (1, 50):
            normed, chosen, shares = route_rows(kernels, struct, hidden[:count].contiguous())
            scores = (normed.double() @ router.double().mT).softmax(-1).gather(1, chosen)
            assert torch.allclose(shares.double(), scores / scores.sum(-1, keepdim=True), atol=1e-5)


@every_type
def test_embeddings_are_looked_up_in_blocks(kind: BlockType) -> None:
    blocks = made_up_blocks(kind, 50, 2 if kind.elements > 1 else 64, 5)
    module = torch.nn.Embedding(50, blocks.columns, dtype=torch.bfloat16)
    ids = torch.tensor([[3, 49, 0], [7, 3, 3]])
    with kernels_of(_ISAS[-1], threads=1) as kernels:
        found = BlockEmbedding(module, blocks, kernels)(ids)
    wanted = torch.from_numpy(kind.dequantise(blocks.raw.numpy())).bfloat16()[ids]
    assert torch.equal(found, wanted)


_K_SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}


def _mixed(name: str) -> str:
    """As in Q4_K_M files: the up rows and the values of another type than what is beside them."""
    return "Q6_K" if any(part in name for part in ("ffn_up", "attn_v", "token_embd")) else "Q4_K"


def _half_numbers(name: str) -> str:
    """Beside blocks, matrices that somebody left in fp16, bf16 and fp32, gate and up of two types among them."""
    for part, kind in (("ffn_up", "F16"), ("attn_v", "BF16"), ("attn_k", "F32"), ("ffn_down", "BF16")):
        if part in name:
            return kind
    return "Q8_0"


NEWEST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0")
CASES: list[tuple[str, str, str | Callable[[str], str], dict[str, Any]]] = [
    ("mixtral", "llama", "Q4_0", {"sliding_window": None}),
    ("qwen3_moe", "qwen3moe", "Q8_0", {"use_sliding_window": False, "norm_topk_prob": True}),
    ("qwen3_moe", "qwen3moe", _mixed, {"use_sliding_window": False, "norm_topk_prob": True}),
    ("qwen2_moe", "qwen2moe", "Q5_1", {"use_sliding_window": False}),
    ("llama", "llama", _mixed, {"tie_word_embeddings": True}),
    ("qwen2", "qwen2", "Q5_0", {"use_sliding_window": False}),
    ("mixtral", "llama", "BF16", {"sliding_window": None}),
    ("qwen3_moe", "qwen3moe", "F16", {"use_sliding_window": False, "norm_topk_prob": True}),
    ("qwen2_moe", "qwen2moe", _half_numbers, {"use_sliding_window": False}),
    ("llama", "llama", "F16", {"tie_word_embeddings": True}),
    ("qwen3", "qwen3", "F32", {"use_sliding_window": False}),
]
NAMES = ["Q4_0", "Q8_0", "mixed", "Q5_1", "tied", "Q5_0", "BF16", "F16", "half numbers", "tied F16", "F32"]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("family", "architecture", "types", "options"), CASES, ids=NAMES)
@pytest.mark.parametrize("isa", ["PORTABLE", "AVX2", ""], ids=["portable", "AVX2", "best"])
def test_a_file_gives_the_numbers_of_its_weights(
    family: str,
    architecture: str,
    types: str | Callable[[str], str],
    options: dict[str, Any],
    isa: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWITCHYARD_ISA", isa)
    sizes = _K_SIZES if callable(types) else _SIZES
    folder = tiny_checkpoint(family, tmp_path / "checkpoint", **options, **sizes)
    file = write_model(folder, tmp_path / "model.gguf", architecture, quantised=types)
    with opened_model(file, "auto") as ours, torch.no_grad():
        assert isinstance(ours.model.get_input_embeddings().forward, BlockEmbedding)
        assert isinstance(ours.model.get_output_embeddings().__dict__["forward"], QuantisedLinear)
        if ours.bank is not None:
            assert all(layer.is_in_place for layer in ours.bank.layers.values())
            stacks = [each.nbytes for name, each in read_gguf(file).tensors.items() if "_exps" in name]
            assert ours.info.experts_bytes == sum(stacks)
            held = {part.purpose: part.nbytes for part in memory_parts(ours, 0)}
            assert held["experts"] == sum(stacks)
        assert ours.info.weights_bytes + ours.info.experts_bytes < 1.1 * file.stat().st_size
        assert "became" not in ours.info.device_note
        assert "kept as" not in ours.info.device_note
        assert ours.model(input_ids=PROMPT).logits.dtype == torch.float32
        step = StepModel(ours.model, 64)
        assert step._native._whole is not None  # whatever types are beside one another
        with routes_of(ours.model) as routes:
            found = logits(ours.model)[0].float()
        one_by_one = torch.cat([each[0] for each in decoded_logits(ours.model)]).float()
    wanted = _reference(file, PROMPT, routes)
    bound = 0.08 if types is _mixed else 0.02 if types in ("F16", "BF16", "F32") else 0.04
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < bound
    assert (one_by_one - found[: len(one_by_one)]).norm() < 0.03 * wanted.norm()
    assert len(PROMPT[0]) > 8
    assert not list((tmp_path / "home").rglob("*.gguf"))


def test_a_file_without_the_kernels_that_read_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "not-built.so")
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint", tie_word_embeddings=True, **_SIZES)
    with opened_model(write_model(folder, tmp_path / "model.gguf", "llama", quantised="Q8_0"), "auto") as ours:
        assert "several times slower" in ours.info.device_note


def _reference(file: Path, ids: torch.Tensor, routes: "Routes") -> torch.Tensor:
    """Logits [T, V] of a file's weights in fp32.  Where a router wavers, rounding may choose another expert for a
    token, and so change those that attend to it: there, and only if it was near, it chooses as in `routes`."""
    with opened_model(file, "fp32") as reference, torch.no_grad(), choosing(reference.model, routes) as ties:
        wanted: torch.Tensor = reference.model(input_ids=ids).logits[0]
    assert max(ties, default=0.0) < _NEAR
    return wanted


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("types", NEWEST)
def test_files_of_the_smallest_types(types: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", **CASES[1][3], **_K_SIZES)
    file = write_model(folder, tmp_path / "model.gguf", "qwen3moe", quantised=types)
    with opened_model(file, "auto") as ours, torch.no_grad():
        assert ours.bank is not None
        assert all(layer.is_in_place for layer in ours.bank.layers.values())
        assert isinstance(ours.model.get_input_embeddings().forward, BlockEmbedding)
        stacks = [each.nbytes for name, each in read_gguf(file).tensors.items() if "_exps" in name]
        assert ours.info.experts_bytes == sum(stacks)
        assert not {"became", "kept as"} & set(ours.info.device_note.split())
        with routes_of(ours.model) as routes:
            found = logits(ours.model)[0].float()
        one_by_one = torch.cat([each[0] for each in decoded_logits(ours.model)]).float()
    wanted = _reference(file, PROMPT, routes)
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.06
    assert (one_by_one - found[: len(one_by_one)]).norm() < 0.03 * wanted.norm()


def _wider_keys(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Keys of 32 numbers instead of 16 beside those that are rotated, so that they fill blocks."""
    draw, wide = np.random.default_rng(4), dict(tensors)
    for name, values in tensors.items():
        if "attn_k_b" in name:
            wide[name] = draw.normal(0, 0.1, (*values.shape[:2], 32)).astype(np.float32)
        elif "attn_q_b" in name:
            wide[name] = draw.normal(0, 0.1, (4 * (32 + 16), values.shape[1])).astype(np.float32)
    return wide


@pytest.mark.parametrize("isa", ["AVX2", ""], ids=["AVX2", "best"])
def test_keys_and_values_of_latents_are_made_by_what_the_file_has(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_ISA", isa)
    plain, _ = unpacked("deepseek3", tmp_path)
    file = rewritten(plain, kind="Q8_0", tensors=_wider_keys, attention__key_length_mla=48)
    with opened_model(file, "auto") as ours, torch.no_grad():
        made = [layer.self_attn.kv_b_proj for layer in ours.model.model.layers]
        assert all(isinstance(module.__dict__["forward"], LatentHeads) for module in made)
        assert all(module.weight.numel() == 0 for module in made)
        step = StepModel(ours.model, 64)
        assert step._native._whole is not None  # latent attention and a dense first layer are in the call
        with routes_of(ours.model) as routes:
            found = ours.model(input_ids=PROMPT_IDS).logits[0].float()
        each = PagedSequence(ours.model)
        rows = [step(PROMPT_IDS[:, at : at + 1], each.next(1), at)[0][0].float() for at in range(PROMPT_IDS.shape[1])]
    wanted = _reference(file, PROMPT_IDS, routes)
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.06
    # A row alone may choose as the router in fp32 did not, too.
    assert ((torch.stack(rows) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median() < 0.04


@pytest.mark.parametrize("name", ["qwen35moe", "qwen35", "qwen3next"])
def test_rows_and_columns_lie_in_the_files_order(name: str, tmp_path: Path) -> None:
    """llama.cpp has the value heads of a delta net in another order than the library: its output's columns, too; and
    Qwen3-Next's inputs in two matrices, perhaps of two types."""
    file = rewritten(unpacked(name, tmp_path)[0], kind="Q8_0")
    with opened_model(file, "auto") as ours, torch.no_grad():
        nets = [layer.linear_attn for layer in ours.model.model.layers if hasattr(layer, "linear_attn")]
        assert nets
        if name == "qwen3next":
            assert all(isinstance(net.in_proj_qkvz.__dict__["forward"], MixedRows) for net in nets)
        else:
            assert all(isinstance(net.out_proj.__dict__["forward"], TurnedLinear) for net in nets)
        assert nets[0].num_v_heads > nets[0].num_k_heads > 1 or name == "qwen35"
        step = StepModel(ours.model, 64)
        assert step._native._whole is not None
        ids = PROMPT_IDS
        with routes_of(ours.model) as routes:
            found = ours.model(input_ids=ids, cache=library_cache(ours.model), use_cache=True).logits[0].float()
        each, start = PagedSequence(ours.model), 3
        step(ids[:, :start], each.next(start), 0)
        rows = [step(ids[:, at : at + 1], each.next(1), at)[0][0].float() for at in range(start, ids.shape[1])]
        batched = ours.model(input_ids=ids.expand(2, -1)).logits[1].float()  # by the library's own net
    wanted = _reference(file, ids, routes)
    for each in (found, batched):
        assert ((each - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.06
    assert (torch.stack(rows) - found[start:]).norm() < 0.04 * wanted.norm()


def test_rows_below_one_another_stay_in_blocks(tmp_path: Path) -> None:
    file = rewritten(unpacked("granitehybrid", tmp_path)[0], kind="Q8_0")
    with opened_model(file, "auto") as ours, torch.no_grad():
        shared = [layer.shared_mlp.input_linear for layer in ours.model.model.layers]
        assert all(isinstance(linear.__dict__["forward"], QuantisedLinear) for linear in shared)
        step = StepModel(ours.model, 64)
        assert step._native._whole is not None
        each = PagedSequence(ours.model)
        rows = [step(PROMPT_IDS[:, at : at + 1], each.next(1), at)[0][0].float() for at in range(PROMPT_IDS.shape[1])]
        with routes_of(ours.model) as routes:
            found = ours.model(input_ids=PROMPT_IDS).logits[0].float()
    wanted = _reference(file, PROMPT_IDS, routes)
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.06
    assert (torch.stack(rows) - found).norm() < 0.04 * wanted.norm()


def test_biases_and_alternating_rows(tmp_path: Path) -> None:
    """gpt-oss has biases, and gate and up rows in turn, which its files have apart."""
    plain, _ = unpacked("gpt-oss", tmp_path)
    file = rewritten(plain, kind="MXFP4")
    with opened_model(file, "auto") as ours, torch.no_grad():
        assert ours.bank is not None
        assert all(layer.is_in_place for layer in ours.bank.layers.values())
        with routes_of(ours.model) as routes:
            found = ours.model(input_ids=PROMPT_IDS).logits[0].float()
        single = ours.model(input_ids=PROMPT_IDS[:, :1]).logits[0].float()
    wanted = _reference(file, PROMPT_IDS, routes)
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.05
    assert (single - wanted[:1]).norm() < 0.05 * wanted[:1].norm()


@pytest.mark.parametrize("biased", [False, True], ids=["mixed types", "biases"])
def test_experts_on_disk_are_read_from_the_file_itself(
    biased: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if biased:
        plain, _ = unpacked("gpt-oss", tmp_path)
        file, ids = rewritten(plain, kind="MXFP4"), PROMPT_IDS
    else:
        folder = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", **CASES[1][3], **_K_SIZES)
        file, ids = write_model(folder, tmp_path / "model.gguf", "qwen3moe", quantised=_mixed), PROMPT
    with opened_model(file, "auto") as ours, torch.no_grad():
        wanted = ours.model(input_ids=ids).logits[0].float()
        alone = ours.model(input_ids=ids[:, :1]).logits[0].float()
    with on_disk(monkeypatch, file, "auto") as ours, torch.no_grad():
        assert ours.disk_backed is not None
        # Experts that arrive one by one are summed in another order.
        for found, all_in_ram in ((ours.model(input_ids=ids), wanted), (ours.model(input_ids=ids[:, :1]), alone)):
            errors = (found.logits[0].float() - all_in_ram).norm(dim=-1) / all_in_ram.norm(dim=-1)
            assert errors.median() < 0.05
        assert ours.disk_backed.disk.records_read > 0
    assert not list((tmp_path / "home").rglob("*.gguf"))


Routes = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each experts module in turn: the experts of each token, [T, k], and their shares."""


@contextmanager
def routes_of(model: Any) -> Iterator[Routes]:
    """Collects what the routers of a model choose."""
    routes: Routes = []

    def record(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, index, shares = _arguments(args, kwargs)
        routes.append((index.clone(), shares.clone()))

    with _hooked(model, record):
        yield routes


@contextmanager
def choosing(model: Any, routes: Routes) -> Iterator[list[float]]:
    """Lets tokens go to the experts of these routes, with their shares, where the model's own routers choose others.

    Yields:
        For each such token how near the choice was: the difference of the logits between which the router chose, as a
        share of the difference between its highest and its lowest.
    """
    left, ties, logits = iter(routes), list[float](), list[torch.Tensor]()

    def replace(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden, index, shares = _arguments(args, kwargs)
        wanted, their_shares = (each.to(own.dtype) for each, own in zip(next(left), (index, shares), strict=True))
        differs = (index.sort(-1).values != wanted.sort(-1).values).any(-1)
        of_router = logits.pop().reshape(len(index), -1).float().sort(-1, descending=True).values
        gaps = of_router[:, index.shape[1] - 1] - of_router[:, index.shape[1]]
        ties.extend((gaps / (of_router[:, 0] - of_router[:, -1]))[differs].tolist())
        index = torch.where(differs[:, None], wanted, index)
        return (hidden, index, torch.where(differs[:, None], their_shares, shares)), {}

    def note(_module: Any, _args: Any, output: Any) -> None:
        logits.append(output[0] if isinstance(output, tuple) else output)

    routers = [
        getattr(module, "gate", None) or module.router for module in model.modules() if hasattr(module, "experts")
    ]
    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        with _hooked(model, replace):
            yield ties
    finally:
        for hook in hooks:
            hook.remove()


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    names = ("hidden_states", "top_k_index", "top_k_weights")
    return tuple(args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names))  # type: ignore[return-value]


@contextmanager
def _hooked(model: Any, hook: Any) -> Iterator[None]:
    hooks = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "_is_expert_parallel")
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _load(folder: Path, precision: str) -> tuple[torch.Tensor, list[int], tuple[Path, ...], int]:
    """Logits, tokens, the files that were held as a whole, and the number of places from which parameters lie as in the
    file."""
    with (
        closing(
            load_model(
                EngineConfig(str(folder), device="cpu", precision=precision),
                on_progress=lambda done, total: _told.append((done, total)),
                cancelled=lambda: False,
            )
        ) as loaded,
        torch.no_grad(),
    ):
        own, entries = dict(loaded.model.named_parameters()), read_header(folder / "model.safetensors")
        places = {own[name].data_ptr() - entry.offset for name, entry in entries.items() if name in own}
        return logits(loaded.model), greedy(loaded.model, 8)[0].tolist(), loaded.prepared, len(places)


_told: list[tuple[int, int]] = []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dense_model(family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(family, tmp_path / family, dtype=dtype)
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)  # of a file so small, the header is much
    _told.clear()
    found, tokens, files, places = _load(folder, precision)
    assert files == (folder / "model.safetensors",)
    assert _told[-1][0] == _told[-1][1] > 0
    assert all(done <= total for done, total in _told)
    monkeypatch.setattr(weights, "_MOSTLY", 2.0)
    wanted, same_tokens, files, copies = _load(folder, precision)
    assert files == ()
    assert places == 1 < copies
    assert torch.equal(found, wanted)
    assert tokens == same_tokens


def test_of_other_numbers_files_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.float32)
    monkeypatch.setattr(weights, "_MOSTLY", 0.5)
    assert _load(folder, "bf16")[2] == ()


def test_a_file_that_is_cut_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "llama", dtype=torch.bfloat16)
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with refused(ErrorCode.CHECKPOINT_DAMAGED, match=r"model\.safetensors"):
        _load(folder, "bf16")


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shard", ["1GB", "60KB"], ids=["one file", "many"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "llama"])
def test_numbers_in_16_bits(
    family: str, shard: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside PyTorch's own linear layers in fp32, which are of the same weights: no other copy of those, and no other
    numbers; of experts one by one only those in two files are copied."""
    experts = {
        "mixtral": {"num_local_experts": 16},
        "qwen3_moe": {"num_experts": 16},
        "deepseek_v3": {"n_routed_experts": 16},
    }
    folder = tiny_checkpoint(
        family, tmp_path / family, dtype=dtype, save={"max_shard_size": shard}, **experts.get(family, {})
    )
    files = sorted(folder.glob("*.safetensors"))
    monkeypatch.setattr(weights, "_MOSTLY", 0.0)
    images: list[FileImage] = []
    take = EARLY_READS.take
    monkeypatch.setattr(EARLY_READS, "take", lambda path: images.append(take(path)) or images[-1])
    with opened_model(folder, "bf16") as ours, torch.no_grad():
        assert sorted(ours.prepared) == files
        starts = [(np.frombuffer(image.bytes, np.uint8).ctypes.data, len(image.bytes)) for image in images]
        own = [each for each in (*ours.model.parameters(), *ours.model.buffers()) if each.numel() >= 1024]
        rows = (
            [row for layer in ours.bank.layers.values() for each in layer.rows.values() for row in each]
            if ours.bank
            else []
        )
        copied = [each for each in (*own, *rows) if not any(0 <= each.data_ptr() - at < size for at, size in starts)]
        few = ("gate.weight", "router.weight")
        names = {id(each): name for name, each in ours.model.named_parameters()}
        copied = [each for each in copied if not names.get(id(each), "").endswith(few)]
        assert sum(each.nbytes for each in copied) <= (
            0 if shard == "1GB" else 0.2 * sum(f.stat().st_size for f in files)
        )
        with routes_of(ours.model) as routes:
            found = logits(ours.model)[0].float()
    with opened_model(folder, "fp32") as reference, torch.no_grad(), choosing(reference.model, routes) as ties:
        wanted = logits(reference.model)[0]
    assert max(ties, default=0.0) < 0.03
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() < 0.02
