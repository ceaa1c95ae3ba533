"""Blocks of GGUF files on a card, as they lie: every type is what ggml says, and few and many visits are right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.formats.ggml import BLOCK_TYPES, GGML, BlockType
from engine.kernels import choose_kernel
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.linear import CardEmbedding, CardLinear, JoinedLinears, can_join
from engine.kernels.gpu.proof import prove_blocks
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native import linear
from engine.kernels.repack import Blocks, unpacked
from engine.kernels.torch_experts import TorchExperts
from engine.runtime.load import binding as device_binding
from engine.runtime.load import forms
from tests.combinations import some
from tests.engine.card_experts import KINDS, check, check_nobody, layer_of, module_of
from tests.engine.emulated_cuda_card import IN_BLOCKS, emulated_kernels, needs_compiler
from tests.engine.ggml_blocks import made_up_blocks
from tests.engine.loaded_tiny import opened_model
from tests.engine.on_devices import MIB, PROMPT, opened, share_misses
from tests.engine.test_disk_backed import least_budget
from tests.engine.test_gguf_architectures import PROMPT_IDS, rewritten
from tests.engine.test_gguf_architectures import unpacked as unpacked_file
from tests.engine.tiny_families import tiny_checkpoint
from tests.tiny_gguf import write_model

pytestmark = needs_compiler
CPU = torch.device("cpu")
KERNELS = emulated_kernels()
IN_GROUPS = CardKernels(KERNELS.few, 4, KERNELS.many, KERNELS.unpack)
TYPES = [kind for kind in BLOCK_TYPES.values() if kind.is_blocks]
COMPILED = (*IN_BLOCKS, "Q4_K Q6_K")
"""What the emulated card multiplies."""


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("strange", [0.0, 0.3])
def test_unpacked_blocks_have_the_same_bits_as_the_reference(kind: BlockType, strange: float) -> None:
    blocks = made_up_blocks(kind, 37, 3, 1, strange)
    found, wanted = KERNELS.unpack(blocks), unpacked(blocks)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("types", COMPILED)
def test_the_proof_that_a_card_is_asked_for(types: str) -> None:
    gate, up = GGML[types.split()[0]], GGML[types.split()[-1]]
    assert prove_blocks(CPU, KERNELS, gate, up)
    wrong = CardKernels(KERNELS.few, 4, KERNELS.many, lambda matrix: KERNELS.unpack(matrix) + 1)
    assert not prove_blocks(CPU, wrong, gate, up)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("kind", "types"),
    some(
        [
            ("relu2 without gate", "Q4_K"),
            *((kind, COMPILED[at % len(COMPILED)]) for at, kind in enumerate(KINDS) if "without" not in kind),
        ],
        every=4,
    ),
)
def test_every_kind_of_expert(kind: str, types: str) -> None:
    sizes = {"hidden": 512, "inner": 256}
    for kernels in (KERNELS, emulated_kernels(1)):
        check(kernels, CPU, kind, types, tokens=3, width=2, experts=4, seed=1, **sizes)
    check(IN_GROUPS, CPU, kind, types, tokens=20, width=2, experts=3, bias=False, seed=2, **sizes)
    check(IN_GROUPS, CPU, kind, types, tokens=70, width=1, experts=2, seed=3, **sizes)


@pytest.mark.parametrize("types", ["Q8_0", "Q4_K Q6_K"])
def test_columns_in_parts_and_in_stages_and_rows_that_are_no_multiples(types: str) -> None:
    for kernels in (KERNELS, emulated_kernels(1)):
        check(kernels, CPU, "silu", types, tokens=2, width=1, experts=1, hidden=2304, inner=256)
    if types == "Q8_0":
        for tokens in (1, 9, 40):
            check(IN_GROUPS, CPU, "silu", types, tokens=tokens, width=1, experts=2, hidden=96, inner=32)


def test_who_is_no_expert() -> None:
    check_nobody(KERNELS, CPU, "Q4_K", hidden=256, inner=256)


def test_prompts_by_operators_where_no_kernel_groups() -> None:
    torch.manual_seed(5)
    for kind in ("silu", "gpt-oss"):
        module = module_of(kind, 3, 256, 256, bias=True)
        layer, _ = layer_of(module, "Q4_K Q6_K", CPU)
        bank = LayerRecords("experts", layer.layout, torch.cat(list(layer.pieces)))
        by_operators = TorchExperts(bank, ExpertMath.of(module), None, KERNELS.unpack)
        few_only = CardKernels(KERNELS.few, 4, None, KERNELS.unpack)
        kernel = CardExperts(layer, ExpertMath.of(module), few_only, by_operators)
        x, index, share = torch.randn(9, 256).bfloat16(), torch.randint(0, 3, (9, 2)), torch.rand(9, 2)
        found = kernel(x, index, share)
        wanted = CardExperts(layer, ExpertMath.of(module), KERNELS)(x, index, share)
        assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


def test_linear_layers_and_embeddings() -> None:
    torch.manual_seed(4)
    for name in ("Q4_K", "Q8_0"):
        blocks = made_up_blocks(GGML[name], 50, 4, 2)
        order = torch.randperm(50)
        permuted = Blocks(blocks.kind, blocks.raw, order)
        for matrix, bias in ((blocks, torch.randn(50).bfloat16()), (permuted, None)):
            forward, meant = CardLinear(matrix, bias, CPU, KERNELS), unpacked(matrix).float()
            for tokens in (1, 3, 20):
                x = torch.randn(tokens, matrix.columns).bfloat16()
                wanted = x.float() @ meant.mT + (0 if bias is None else bias.float())
                assert (forward(x).float() - wanted).norm() < 0.02 * wanted.norm()
        ids = torch.tensor([[3, 49, 0], [7, 3, 3]])
        assert torch.equal(CardEmbedding(blocks, KERNELS)(ids), unpacked(blocks)[ids])


def test_layers_of_one_type_are_one_product() -> None:
    queries, keys = made_up_blocks(GGML["Q4_K"], 64, 2, 1), made_up_blocks(GGML["Q4_K"], 16, 2, 2)
    values = made_up_blocks(GGML["Q6_K"], 16, 2, 3)
    assert not can_join([queries, keys, values])
    pair = [queries, keys]
    assert can_join(pair)
    joined = JoinedLinears(pair, [None, torch.ones(16).bfloat16()], CPU, KERNELS)
    for tokens in (1, 20):
        x = torch.randn(tokens, 512).bfloat16()
        for forward, matrix, bias in zip(joined.forwards, pair, (0, 1), strict=True):
            wanted = x.float() @ unpacked(matrix).float().mT + bias
            assert (forward(x).float() - wanted).norm() < 0.02 * wanted.norm()


def _mixed(name: str) -> str:
    """As in Q4_K_M files: the up rows and the values of another type than what is beside them."""
    return "Q6_K" if any(part in name for part in ("ffn_up", "attn_v", "token_embd")) else "Q4_K"


@pytest.fixture(params=["its kernels", "PyTorch's"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CardKernels | None:
    """The kernels of the emulated device, which then holds linear layers and embeddings; or it has none."""
    share_misses(monkeypatch)
    if request.param != "its kernels":
        return None
    monkeypatch.setattr("engine.runtime.load.forms.is_held_quantised", lambda place: True)
    monkeypatch.setattr(linear, "SMALLEST", 256)
    found = replace(emulated_kernels(), most_few=4)
    # The CPU's experts, which lie in RAM of their own, are computed as before.
    in_ram = lambda layer: getattr(layer, "name", "slots") != "slots"  # noqa: E731
    for module in (dense, forms):
        monkeypatch.setattr(module, "kernels_of", lambda place: found)
    monkeypatch.setattr(
        device_binding,
        "choose_kernel",
        lambda module, layer, native: (
            choose_kernel(module, layer, native) if in_ram(layer) else CardExperts(layer, ExpertMath.of(module), found)
        ),
    )
    return found


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("family", "architecture", "types", "slots"),
    [
        ("qwen3_moe", "qwen3moe", _mixed, 3),
        ("qwen3_moe", "qwen3moe", "Q8_0", None),
        ("llama", "llama", _mixed, None),
    ],
    ids=["mixed", "Q8_0", "dense"],
)
def test_a_file_on_a_card(
    family: str,
    architecture: str,
    types: Any,
    slots: int | None,
    card: CardKernels | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
    more = {"tie_word_embeddings": True} if family == "llama" else {"norm_topk_prob": True, "use_sliding_window": False}
    folder = tiny_checkpoint(family, tmp_path / "checkpoint", **more, **sizes)
    file = write_model(folder, tmp_path / "model.gguf", architecture, quantised=types)
    ids = torch.tensor([PROMPT])
    with opened_model(file, "fp32") as reference, torch.inference_mode():
        wanted = reference.model(input_ids=ids).logits[0]
    with opened(file, precision="auto", cache_slots=slots, vram_bytes=64 * MIB) as ours, torch.inference_mode():
        assert ours.info.precision == "stored"
        assert "became" not in ours.info.device_note
        found, one = (ours.model(input_ids=some).logits[0] for some in (ids, ids[:, :1]))
        assert found.dtype == one.dtype == (torch.bfloat16 if card is None else torch.float32)
        held = ours.info.weights_bytes + ours.info.experts_bytes
        tables = [m for m in ours.model.modules() if isinstance(m.__dict__.get("forward"), CardEmbedding)]
        assert bool(tables) == (card is not None)
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() < 0.05  # where a router wavers, rounding may choose another expert
    assert (one - wanted[:1]).norm() < 0.05 * wanted[:1].norm()
    if card is not None:
        assert held < 1.15 * file.stat().st_size
        multiplied = {value for kernel, _ in card.few.card.launched for _, value in kernel.defines}  # type: ignore[attr-defined]
        assert ("Blocks<Q4_K,Q6_K>" in multiplied) == (slots is not None)  # experts in slots: gates and ups
    assert not list((tmp_path / "home").rglob("*.bank"))


@pytest.mark.parametrize("card", ["its kernels"], indirect=True)
def test_a_card_holds_what_ram_could_not(card: CardKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks pass through RAM a few at a time."""
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path / "home"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 16}
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint", **sizes)
    file = write_model(folder, tmp_path / "model.gguf", "llama", quantised="Q8_0")
    with opened(file, precision="auto", vram_bytes=64 * MIB, ram_bytes=file.stat().st_size // 2) as ours:
        assert ours.info.precision == "stored"
        assert any(isinstance(m.__dict__.get("forward"), CardLinear) for m in ours.model.modules())


def test_biases_and_alternating_rows_in_slots_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss, its experts read from the file into slots in RAM, and from there into slots of a card."""
    share_misses(monkeypatch)
    plain, _ = unpacked_file("gpt-oss", tmp_path)
    file = rewritten(plain, kind="MXFP4")
    with opened_model(file, "fp32") as reference, torch.inference_mode():
        wanted = reference.model(input_ids=PROMPT_IDS).logits[0]
    for options in ({}, {"ram_bytes": least_budget(file, "auto")}):
        config = {"precision": "auto", "cache_slots": 2, "vram_bytes": 64 * MIB, **options}
        with opened(file, **config) as ours, torch.inference_mode():
            assert ours.info.precision == "stored"
            assert (ours.disk_backed is not None) == bool(options)
            found = ours.model(input_ids=PROMPT_IDS).logits[0].float()
        errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert errors.median() < 0.05
    assert not list(tmp_path.rglob("*.bank"))


def test_over_two_cards(card: CardKernels | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "checkpoint", tie_word_embeddings=True, hidden_size=64)
    file = write_model(folder, tmp_path / "model.gguf", "llama", quantised="Q8_0")
    ids = torch.tensor([PROMPT])
    with opened(file, precision="auto", vram_bytes=64 * MIB) as ours, torch.inference_mode():
        wanted = ours.model(input_ids=ids).logits[0].float()
    with opened(file, 2, precision="auto", vram_bytes=64 * MIB) as ours, torch.inference_mode():
        assert (ours.model(input_ids=ids).logits[0].float() - wanted).norm() < 0.02 * wanted.norm()
