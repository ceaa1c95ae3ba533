"""Attention by the kernel in CUDA C on an emulated card: over pages, in graphs that outlive caches, and proven."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.cuda import driver
from engine.kernels.cuda.attention import CudaAttention
from engine.kernels.gpu import proof
from engine.kernels.gpu.pages import PageTable
from engine.kernels.gpu.proof import ProvenAttention, attention_of, prove_attention
from engine.kernels.native.paged_attention import (
    PAGE_TOKENS,
    AttentionTerms,
    KvShape,
    KvType,
    PagedLayer,
    Piece,
    Pieces,
)
from engine.kernels.reference import attend_in_torch
from engine.runtime.decode import tabled_attention
from engine.runtime.load import model as loading
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.graph_cases import graphs_of
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import NEW_TOKENS, PROMPT, answer, chatting, opened, reference, share_misses

pytestmark = needs_compiler
CPU = torch.device("cpu")


def kernel(multiprocessors: int = 8) -> tuple[CudaAttention, EmulatedCudaCard]:
    card = EmulatedCudaCard(multiprocessors)
    return CudaAttention(card), card


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize(
    ("kv_type", "shape", "states"),
    [
        (KvType.BF16, KvShape(8, 1, 128, 128), torch.bfloat16),
        (KvType.FP16, KvShape(6, 2, 72, 40), torch.float16),
        (KvType.FP32, KvShape(2, 2, 192, 128), torch.float32),
        (KvType.INT8, KvShape(20, 2, 8, 8), torch.bfloat16),
        (KvType.INT8, KvShape(4, 1, 128, 128), torch.bfloat16),
    ],
    ids=str,
)
def test_the_proof_that_a_card_is_asked_for(kv_type: KvType, shape: KvShape, states: torch.dtype) -> None:
    assert prove_attention(CPU, kernel()[0], shape, kv_type, states)


def test_heads_that_no_kernel_reads() -> None:
    attention = ProvenAttention(kernel()[0])
    for dim in (12, 264):
        assert not prove_attention(CPU, kernel()[0], KvShape(2, 1, dim, dim), KvType.BF16, torch.bfloat16)
        one = torch.zeros(1, 1, dim)
        with pytest.raises(LookupError, match="no attention with such heads"):
            attention.attend(PageTable(KvType.FP32, 1, 1, CPU), AttentionTerms(1.0), one, one, one, torch.tensor([0]))


@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_sequences_of_any_length_at_once(sequences: int) -> None:
    generator = torch.Generator().manual_seed(sequences)
    shape, terms = KvShape(4, 2, 24, 24), AttentionTerms(0.2, window=40)
    held = [int(n) for n in torch.randint(0, 130, (sequences,), generator=generator)]
    pages = [h // PAGE_TOKENS + 1 for h in held]
    layers = [PagedLayer(shape, KvType.BF16, sum(pages)) for _ in range(2)]
    for name in ("keys", "values"):
        drawn = torch.randn(getattr(layers[0], name).shape, generator=generator)
        for layer in layers:
            getattr(layer, name).copy_(drawn)
    order = torch.randperm(sum(pages), generator=generator).to(torch.int32).split(pages)
    table = PageTable(KvType.BF16, sequences, max(pages), CPU)
    for number, mine in enumerate(order):
        table.set_pages(number, mine, [layers[0].keys, layers[0].values])
    new = [torch.randn(sequences, heads, 24, generator=generator).bfloat16() for heads in (4, 2, 2)]
    pieces = [Piece(mine, before, 1) for mine, before in zip(order, held, strict=True)]
    wanted = attend_in_torch(layers[1], terms, Pieces(pieces), *new)
    attention, card = kernel()
    found = attention.attend(table, terms, *new, torch.tensor(held))
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.02, atol=0.01)
    assert torch.equal(layers[0].keys, layers[1].keys)
    assert torch.equal(layers[0].values, layers[1].values)
    assert len(card.launched) == 1
    assert not attention._splits.arrived(table, 1).any()


def test_what_is_no_number_is_not_lost() -> None:
    shape = KvShape(2, 1, 8, 8)
    for kv_type in (KvType.BF16, KvType.FP16, KvType.INT8):
        layer = PagedLayer(shape, kv_type, 1)
        parts = [part for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if part is not None]
        for part in parts:
            part.fill_(1)
        table = PageTable(kv_type, 1, 1, CPU)
        table.set_pages(0, torch.tensor([0]), parts)
        new = [torch.ones(1, heads, 8).bfloat16() for heads in (2, 1, 1)]
        new[2][0, 0, 3] = float("nan")
        out = kernel()[0].attend(table, AttentionTerms(1.0), *new, torch.tensor([4]))
        assert out[..., 3].isnan().all()


@pytest.fixture
def on_emulated_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedCudaCard]:
    """The emulated device has the kernel."""
    share_misses(monkeypatch)
    attention, card = kernel()
    monkeypatch.setattr(tabled_attention, "attention_of", lambda device: ProvenAttention(attention))
    yield card
    reference.cache_clear()


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("qwen3_moe", {"cache_slots": 4}),
    ("gpt_oss", {"cache_slots": 4, "misses": "fetch"}),
    ("olmoe", {}),
]


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(("family", "config"), FAMILIES, ids=str)
def test_tokens_are_those_of_transformers(
    family: str, config: dict[str, Any], tmp_path: Path, on_emulated_cards: EmulatedCudaCard
) -> None:
    expected = reference(family, tmp_path)
    with opened(expected.folder, graphs="on", **config) as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert session.together([expected.second_prompt, PROMPT], NEW_TOKENS) == [
            (*expected.second,),
            (*expected.first,),
        ]
        graphs = graphs_of(session)
        assert graphs.refused is None
        assert graphs._attention.kernels
        assert graphs.counters.replays > 20
        assert max(graphs._kinds) > 1
    launched = {each.entry for each, _ in on_emulated_cards.launched}
    assert launched == {"attention_kernel"}


@pytest.mark.parametrize(
    ("kv_precision", "family"), [("fp16", "qwen3_moe"), ("int8", "qwen3_moe"), ("int8", "gpt_oss")]
)
def test_narrow_keys_stay_where_they_are(
    kv_precision: str,
    family: str,
    tmp_path: Path,
    on_emulated_cards: EmulatedCudaCard,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of layers with a window are as the model has them."""
    monkeypatch.setattr(loading, "attention_of", tabled_attention.attention_of)
    expected = reference(family, tmp_path)
    with opened(expected.folder, graphs="on", kv_precision=kv_precision) as model, chatting(model) as session:
        assert model.kv_type is not None
        found = answer(session, PROMPT).token_ids
        graphs = graphs_of(session)
        assert graphs.refused is None
        assert graphs._attention.kernels
        assert graphs.counters.replays > 3
    with opened(expected.folder, graphs="off", kv_precision=kv_precision) as model, chatting(model) as session:
        assert answer(session, PROMPT).token_ids == found
    assert kv_precision == "int8" or list(found) == expected.first
    types = {kernel.defines[0][1] for kernel, _ in on_emulated_cards.launched}
    assert f"Kv{kv_precision.title()}" in types
    assert (len(types) > 1) == (family == "gpt_oss")


def test_a_step_is_captured_once_however_long_the_answer_grows(
    tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reference("qwen3_moe", tmp_path).folder
    prompt = random_prompt(20, seed=4)
    with opened(folder, cache_slots=4) as model, chatting(model) as session:
        wanted = answer(session, prompt, 45).token_ids
    options = {"cache_slots": 4, "graphs": "on", "speculation": "off"}
    with opened(folder, **options) as model, chatting(model) as session:
        assert answer(session, prompt, 45).token_ids == wanted
        assert graphs_of(session).counters.captures == 1
        assert graphs_of(session).counters.eager == 0


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_kernel_that_computes_wrongly_is_left_alone(
    is_proven: bool, tmp_path: Path, on_emulated_cards: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("gpt_oss", tmp_path)
    if is_proven:  # the model's own step shows it, too
        monkeypatch.setattr(proof, "prove_attention", lambda *args: True)
    attend = CudaAttention.attend
    monkeypatch.setattr(CudaAttention, "attend", lambda *args: attend(*args) * -3)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        graphs = graphs_of(session)
        assert not graphs._attention.kernels
        assert graphs.refused is None
        assert graphs.counters.replays > 10


def test_without_a_card_or_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_of(CPU) is None
    driver._card.cache_clear()

    def refuses(index: int) -> None:
        raise driver.DriverError("there is no driver")

    monkeypatch.setattr(driver, "find_nvrtc", lambda capability: None)
    monkeypatch.setattr(driver, "NvidiaCard", refuses)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    assert attention_of(torch.device("cuda", 0)) is None
    driver._card.cache_clear()
