"""How many kernels a card would start for a token, counted operator by operator in the step that is captured."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.card_kernels import FUSED_OF_TOKEN, FUSED_OTHERS, QWEN3_30B_A3B, products
from engine import kernels
from engine.kernels.cuda import driver
from engine.kernels.cuda.attention import CudaAttention
from engine.kernels.cuda.products import CudaProducts
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.proof import ProvenAttention
from engine.kernels.gpu.stored import CardKernels
from engine.kernels.native import linear
from engine.planner.costs import STEP_LAUNCHES
from engine.runtime.decode import tabled_attention
from engine.runtime.decode.graphs import GraphedSteps
from tests.combinations import some
from tests.engine.emulated_cuda_card import EmulatedCudaCard, _kernels, needs_compiler
from tests.engine.on_devices import MIB, PROMPT, answer, chatting, opened
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = needs_compiler

_PRODUCTS = sum(times // QWEN3_30B_A3B.layers for *_, times in products(QWEN3_30B_A3B))
"""Of a layer."""
_NO_LAUNCH = (
    "aten.empty",
    "aten._unsafe_view",
    "aten.new_empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.detach",
)


class _Counted(TorchDispatchMode):
    """Counts what writes to memory: no views, and nothing that is only allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("switchyard_tests"):
            name = list(_kernels)[args[1]].name
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        is_view = isinstance(result, torch.Tensor) and first is not None and _memory(result) == _memory(first)
        writes = func._schema.is_mutable or func.namespace == "switchyard_tests"
        if writes or not (is_view or name.startswith(_NO_LAUNCH)):
            self.found[name] += 1
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def on_emulated_cards(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    """The emulated device has every kernel, and holds linear layers quantised, however small they are."""
    card = EmulatedCudaCard(8)
    products = CudaProducts(card)
    found = CardKernels(products, products.most_visits, None)
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    monkeypatch.setattr("engine.runtime.load.forms.is_held_quantised", lambda place: True)
    monkeypatch.setattr(linear, "SMALLEST", 256)
    for module in (kernels, dense):
        monkeypatch.setattr(module, "kernels_of", lambda place: found)
    attention = CudaAttention(card)
    monkeypatch.setattr(tabled_attention, "attention_of", lambda device: ProvenAttention(attention))
    monkeypatch.setattr(driver, "card_of", lambda device: card)
    return card


def launches(family: str, layers: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Counter[str]:
    """Of the step of one token that is captured."""
    checkpoint = tiny_checkpoint(family, folder / f"{family}-{layers}", num_hidden_layers=layers, **config)
    found: list[Counter[str]] = []
    forward, capture = GraphedSteps._forward, GraphedSteps._capture

    def counted(self: GraphedSteps, cache: Any) -> torch.Tensor:
        with _Counted() as counter:
            logits = forward(self, cache)
        found.append(counter.found)
        return logits

    def captured(self: GraphedSteps, cache: Any) -> torch.Tensor | None:
        with monkeypatch.context() as patch:
            patch.setattr(GraphedSteps, "_forward", counted)
            return capture(self, cache)

    options = {"precision": "int4", "cache_slots": None, "vram_bytes": 64 * MIB, "graphs": "on", "speculation": "off"}
    with monkeypatch.context() as patch, opened(checkpoint, **options) as model, chatting(model) as session:
        patch.setattr(GraphedSteps, "_capture", captured)
        answer(session, PROMPT[:4], 4)  # one more, should its attention be left to operators
    assert found
    return found[0]


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""Whose projections end where a block of rows does, as those of real models."""


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_launches_of_a_layer(
    family: str, tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (launches(family, layers, tmp_path, monkeypatch, **_HEADS) for layers in (2, 3))
    of_layer = Counter(name.partition("-")[0] for name in (more - few).elements())
    assert of_layer == {"products": 4, "norm": 2, "rotary": 1, "attention": 1, "router": 1}
    assert of_layer.total() == FUSED_OTHERS + _PRODUCTS
    assert of_layer.total() == STEP_LAUNCHES.layer + STEP_LAUNCHES.experts
    # Embedding, angles, a norm and the head.
    of_token = few.total() - 2 * of_layer.total()
    assert of_token <= STEP_LAUNCHES.token
    if family == "qwen3_moe":
        assert of_token == FUSED_OF_TOKEN + 1


_LATENTS = {"num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32}


@pytest.mark.parametrize("family", some(["deepseek_v3", "deepseek_v2", "glm4_moe_lite"]))
def test_launches_of_a_layer_with_latent_attention(
    family: str, tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (launches(family, layers, tmp_path, monkeypatch, **_LATENTS) for layers in (2, 3))
    of_layer = Counter(name.partition("-")[0] for name in (more - few).elements())
    of_latents = {"latent_queries": 1, "latent_attention": 1, "latent_values": 1}
    # The first projections of queries and latents are one; a shared expert of this size is three, and has operators.
    of_kernels = {"products": 8, "norm": 3, "router": 1, **of_latents}
    assert {name: count for name, count in of_layer.items() if not name.startswith("aten")} == of_kernels
    assert of_layer.total() - sum(of_kernels.values()) == 3


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(("family", "operators"), [("minimax_m2", 0), ("ernie4_5_moe", 3)])
def test_a_router_with_a_correction_is_one_launch(
    family: str, operators: int, tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (launches(family, layers, tmp_path, monkeypatch, **_HEADS) for layers in (2, 3))
    of_layer = Counter(name.partition("-")[0] for name in (more - few).elements())
    products = 7 if operators else 4  # those of a shared expert, which has operators between them
    of_kernels = {"products": products, "norm": 2, "rotary": 1, "attention": 1, "router": 1}
    assert {name: count for name, count in of_layer.items() if not name.startswith("aten")} == of_kernels
    assert of_layer.total() - sum(of_kernels.values()) == operators


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "of_kernels", "operators"),
    some(
        [
            ("granitemoe", {"products": 4, "norm": 2, "rotary": 1, "attention": 1, "router": 1}, 0),
            # Norms of its heads follow the rotation; a shared expert of this size is three, and has operators.
            ("hunyuan_v1_moe", {"products": 7, "norm": 4, "rotary": 1, "attention": 1, "router": 1}, 3),
            # Its norms subtract the mean.
            ("phimoe", {"products": 4, "rotary": 1, "attention": 1, "router": 1}, 4),
        ],
        every=4,
    ),
)
def test_sums_with_a_multiple_and_routers_of_their_own(
    family: str,
    of_kernels: dict[str, int],
    operators: int,
    tmp_path: Path,
    on_emulated_cards: EmulatedCudaCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, more = (launches(family, layers, tmp_path, monkeypatch, **_HEADS) for layers in (2, 3))
    of_layer = Counter(name.partition("-")[0] for name in (more - few).elements())
    assert {name: count for name, count in of_layer.items() if not name.startswith("aten")} == of_kernels
    assert of_layer.total() - sum(of_kernels.values()) == operators, more - few


def test_norms_without_a_weight_are_launches_of_the_same_kernel(
    tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (
        launches(
            "gemma4_text", layers, tmp_path, monkeypatch,
            layer_types=[*["sliding_attention"] * (layers - 1), "full_attention"],
        )
        for layers in (2, 3)
    )  # fmt: skip
    of_layer = Counter(name.partition("-")[0] for name in (more - few).elements())
    assert of_layer["norm"] == 12
    assert not any("pow" in name or "mean" in name for name in of_layer)


def test_launches_of_a_layer_by_operators(
    tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "card_of", lambda device: None)
    monkeypatch.setattr(tabled_attention, "attention_of", lambda device: None)
    few, more = (launches("qwen3_moe", layers, tmp_path, monkeypatch, **_HEADS) for layers in (2, 3))
    assert (more - few).total() == QWEN3_30B_A3B.others + _PRODUCTS
