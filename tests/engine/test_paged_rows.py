"""Attention of a batch's rows on a card, by the kernel in C++ and by PyTorch's fused one, against the definition."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.config import SamplingParams
from engine.common.falls import FALLS
from engine.devices.memory_budget import MemoryCategory
from engine.kernels.cuda.attention import CudaAttention
from engine.kernels.gpu.proof import ProvenAttention
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
from engine.planner.schedules import CGOPIPE, HYBRID, S4, Schedule
from engine.runtime.batch import packed_sweep
from engine.runtime.batch.pipeline import paged
from engine.runtime.batch.pipeline.device_attention import StayingPages
from engine.runtime.batch.pipeline.paged import PagedAttention, PlacedRows
from engine.runtime.batch.policy import BatchPolicy, ScheduleChoice
from engine.runtime.kv.paged_cache import parts_of_pages
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.on_devices import answer, chatting, opened
from tests.engine.single_streams import answers_of, rows_of
from tests.engine.tiny_families import tiny_checkpoint

rows = partial(rows_of, [3, 60, 31], 4)

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.integers(0, 140), st.sampled_from((1, 1, 1, 2, 33))), min_size=1, max_size=5)
TERMS = st.builds(
    AttentionTerms,
    st.just(0.2),
    window=st.sampled_from((0, 0, 1, 40)),
    kept=st.sampled_from((0, 3, 50)),
    softcap=st.sampled_from((0.0, 0.0, 15.0)),
    sinks=st.sampled_from((None, torch.linspace(-1, 2, 4))),
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    """The emulated device has the kernel."""
    card = EmulatedCudaCard(4)
    proven = ProvenAttention(CudaAttention(card))
    monkeypatch.setattr(paged, "attention_of", lambda _device: proven)
    return card


def compared(rows: list[tuple[int, int]], terms: AttentionTerms, kv_type: KvType, seed: int) -> None:
    """Attention of rows that hold so much and have so many new tokens; what no token sees is no number."""
    generator = torch.Generator().manual_seed(seed)
    shape = KvShape(4, 2, 24, 16)
    counts = [-(-(held + tokens) // PAGE_TOKENS) for held, tokens in rows]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32).split(counts)
    layers = [PagedLayer(shape, kv_type, sum(counts)) for _ in range(2)]
    for part in parts_of_pages(layers[0]):
        part.fill_(float("nan") if part.dtype.is_floating_point else 77)
    pieces = [Piece(mine, held, tokens) for mine, (held, tokens) in zip(order, rows, strict=True)]
    for piece in pieces:
        for part in parts_of_pages(layers[0]):
            for position in range(piece.held):
                place = part[piece.pages[position // PAGE_TOKENS], :, position % PAGE_TOKENS]
                drawn = torch.rand(place.shape, generator=generator)
                place.copy_((drawn * 200 - 100).round() if kv_type is KvType.INT8 and part.dim() == 4 else drawn / 50)
    for part, source in zip(parts_of_pages(layers[1]), parts_of_pages(layers[0]), strict=True):
        part.copy_(source)
    tokens = sum(count for _, count in rows)
    new = [torch.randn(tokens, heads, dim, generator=generator) for heads, dim in ((4, 24), (2, 24), (2, 16))]
    # The definition multiplies what it hides by zero.
    for part in parts_of_pages(layers[1]):
        part.nan_to_num_()
    wanted = attend_in_torch(layers[1], terms, Pieces(pieces), *new)
    found = PagedAttention(CPU, None).attend(layers[0], terms, PlacedRows(Pieces(pieces)), *new)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
    for part, meant in zip(parts_of_pages(layers[0]), parts_of_pages(layers[1]), strict=True):
        torch.testing.assert_close(part.nan_to_num(), meant, rtol=1e-6, atol=1e-6)


@given(ROWS, TERMS, st.sampled_from(KvType), st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_rows_of_any_lengths_over_gathered_pages(
    rows: list[tuple[int, int]], terms: AttentionTerms, kv_type: KvType, seed: int
) -> None:
    compared(rows, terms, kv_type, seed)


@pytest.mark.takes_turns(2)
@needs_compiler
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_any_lengths_by_the_kernel(card: EmulatedCudaCard, seed: int) -> None:
    kv_type = list(KvType)[seed % 4]
    terms = AttentionTerms(0.2, 40 * (seed % 2), 3 * (seed % 2), 15.0 * (seed == 5), torch.linspace(-1, 2, 4))
    compared([(0, 1), (131, 1), (40, 3), (33, 1)], terms, kv_type, seed)
    assert any(grid[2] == 3 for _, grid in card.launched), "single tokens of all rows in one launch"


@given(st.floats(0, 1), st.integers(1, 400))
def test_pages_on_the_card_are_evenly_spread(share: float, among: int) -> None:
    staying, pages = StayingPages(share, among), torch.arange(among + 3)
    index = staying.index(pages)
    assert index[index >= 0].tolist() == list(range(staying.count))
    assert (index[among:] == -1).all()
    assert torch.equal((index >= 0).nonzero()[:, 0], staying.numbers)
    for width in (4, 16):
        counts = [int((index[begin : begin + width] >= 0).sum()) for begin in range(0, among - width + 1, width)]
        assert all(abs(count - share * width) <= 2.5 for count in counts)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tiny_checkpoint(request.param, tmp_path / request.param)


def answers(loaded: LoadedModel, schedule: Schedule, **policy: Any) -> dict[int, tuple[int, ...]]:
    sizes = BatchPolicy(rows=3, kv_bytes=2**22, micro_batch_rows=3, schedule=schedule, row_tokens=64, **policy)
    found = answers_of(loaded, rows(), sizes)
    assert FALLS.note == ""
    return found


@pytest.mark.takes_turns(2)
@needs_compiler
@pytest.mark.parametrize(
    ("folder", "policy"),
    [
        ("mixtral", {"cached": 0.5, "resident": 0.5}),
        ("gpt_oss", {}),
        ("qwen3_moe", {"cached": 1.0, "window": 16, "kept": 4}),
        ("qwen3_moe", {"kv_type": KvType.INT8, "cached": 0.4}),
    ],
    ids=str,
    indirect=["folder"],
)
def test_a_batch_attends_by_the_kernel(folder: Path, policy: dict[str, Any], card: EmulatedCudaCard) -> None:
    with opened(folder, cache_slots=3) as loaded:
        wanted = answers(
            loaded, HYBRID, **{name: policy[name] for name in policy if name not in ("cached", "resident")}
        )
        assert not card.launched
        assert answers(loaded, S4, **policy) == wanted
        launches = [grid for kernel, grid in card.launched if kernel.entry == "attention_kernel" and grid[2] == 3]
        layers = loaded.model.config.num_hidden_layers
        assert len(launches) == 3 * layers, "a launch a layer for each token of all rows"


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_without_a_schedule_attention_is_where_the_pages_are(folder: Path) -> None:
    with opened(folder, cache_slots=3) as loaded:
        wanted = answers(loaded, HYBRID)
        executor = BatchExecutor(loaded, BatchPolicy(rows=3, kv_bytes=2**22, cached=0.5, row_tokens=64))
        found: dict[int, tuple[int, ...]] = {}
        executor.run(iter(rows()), lambda answer: found.__setitem__(answer.row, answer.token_ids))
        executor.close()
        assert found == wanted
        with chatting(loaded) as session:
            assert answer(session, rows()[1].ids, 4).token_ids == wanted[1]


# What goes otherwise than planned


def run(loaded: LoadedModel, policy: BatchPolicy, on_text: Callable[[str, int], None]) -> tuple[dict[int, Any], str]:
    """(answers, the note)"""
    found: dict[int, tuple[int, ...]] = {}
    with closing(BatchExecutor(loaded, policy)) as executor:
        asked = iter([replace(row, on_text=on_text) for row in rows()])
        executor.run(asked, lambda answer: found.__setitem__(answer.row, answer.token_ids))
        return found, FALLS.note


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
@pytest.mark.parametrize(("after", "left"), [(1, 2**18), (4, 2**18), (7, 2**18)])
def test_a_card_that_fills_up_in_mid_job_goes_on_with_the_next_best(folder: Path, after: int, left: int) -> None:
    with opened(folder, cache_slots=3) as loaded:
        wanted, written = answers(loaded, HYBRID), [0]
        (card,) = loaded.devices.devices
        total = card.memory.total

        def wrote(_text: str, _count: int) -> None:
            written[0] += 1
            if written[0] == after:
                card.memory.limit(card.memory.use().by_category[MemoryCategory.WEIGHTS] + left)

        policy = BatchPolicy(
            rows=3, kv_bytes=2**22, micro_batch_rows=2, schedule=S4, resident=0.25, cached=0.5, row_tokens=64
        )
        found, note = run(loaded, policy, wrote)
        card.memory.limit(total)
        assert found == wanted
        assert "card" in note, note


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_pages_that_do_not_fit_stay_in_ram(folder: Path) -> None:
    with opened(folder, cache_slots=3) as loaded:
        wanted = answers(loaded, HYBRID)
        policy = BatchPolicy(rows=3, kv_bytes=2**24, schedule=S4, cached=1.0, row_tokens=2**17)
        found, note = run(loaded, replace(policy, rows=2**10), lambda _text, _count: None)
        assert found == wanted
        assert "gives way to keys and values in RAM: the graphics card has no room for the share" in note


@pytest.mark.parametrize("folder", ["mixtral"], indirect=True)
def test_another_schedule_than_the_planned_one_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a link is ten times slower than was said."""

    class Settled(ScheduleChoice):
        def of(self, tokens: int, *, reads: bool = False) -> Schedule:
            return CGOPIPE

    monkeypatch.setattr(packed_sweep, "ScheduleChoice", Settled)
    with opened(folder, cache_slots=3) as loaded:
        policy = BatchPolicy(rows=3, kv_bytes=2**22, planned=S4, planned_reading=S4)
        asked = [replace(row, sampling=SamplingParams(max_tokens=8)) for row in rows()]
        executor = BatchExecutor(loaded, policy)
        executor.run(iter(asked), lambda answer: None)
        assert "gives way to cgopipe: s4 was measured to be slower here." in FALLS.note
        executor.close()
