"""Pieces of a prompt where experts come over a link: as long as copies make worth while and memory allows."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.opened import OneSequence
from engine.experts.latency import LatencyModel
from engine.runtime.decode.pieces import Layers, PromptPieces, wanted_tokens
from engine.runtime.kv.library_caches import KvCost
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import memory_use, opened
from tests.engine.tiny_families import tiny_checkpoint

PROMPT = random_prompt(300, seed=2)
USUAL = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    with opened(tiny_checkpoint("qwen3_moe", folder, max_position_embeddings=512), cache_slots=6, misses="fetch") as it:
        it.chunk_tokens = USUAL
        yield it


def latency(link: float, card: float) -> LatencyModel:
    """Bytes a second, and seconds of a token."""
    return LatencyModel("test", 10**6, 1e-3, 1e-4, 1e-6, 1, card, 0.0, link)


@given(
    link=st.floats(1e6, 1e12),
    card=st.floats(1e-9, 1e-3),
    absent=st.integers(0, 256),
    usual=st.integers(1, 4096),
    times=st.integers(1, 4),
    left=st.integers(1, 40_000),
)
def test_a_piece_is_longer_only_where_copies_take_longer_than_computing(
    link: float, card: float, absent: int, usual: int, times: int, left: int
) -> None:
    layers = Layers(latency(link, card), 256, absent, 8, 2)
    tokens = wanted_tokens([layers], usual, times * usual, left)
    assert usual <= tokens <= times * usual
    if tokens > usual:
        assert layers.copying_s() > layers.computing_s(usual)
        assert tokens < 2 * left
    elif times > 1 and left > usual:
        assert layers.copying_s() <= layers.computing_s(usual)


def read(model: LoadedModel) -> tuple[torch.Tensor, list[int]]:
    """The logits after the prompt, and the tokens of each forward."""
    pieces, sequence = list[int](), OneSequence(model)
    own = sequence.steps.read

    def counted(ids: Sequence[int], *more: Any) -> torch.Tensor:
        pieces.append(len(ids))
        return own(ids, *more)

    sequence.steps.read = counted  # type: ignore[method-assign, assignment]
    logits = sequence.read(PROMPT)
    sequence.close()
    return logits, pieces


@pytest.mark.parametrize("link", [1e5, 1e15])
def test_slow_links_get_longer_pieces_and_the_same_answer(
    model: LoadedModel, link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [cache.slots for cache in model.caches]
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: self.record_nbytes / link))
    logits, pieces = read(model)
    assert pieces[0] == (4 * USUAL if link == 1e5 else USUAL)
    assert sum(pieces) == len(PROMPT)
    monkeypatch.setattr("engine.runtime.decode.pieces._MOST_TIMES", 1)
    wanted, pieces = read(model)
    assert pieces[0] == USUAL
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert [cache.slots for cache in model.caches] == slots


def test_memory_for_longer_pieces_comes_from_the_cache_and_goes_back_to_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: 1.0))
    (device,) = model.devices.devices
    total, slots = device.memory.total, model.caches[0].slots
    read(model)
    pieces = PromptPieces(model)
    lent: list[int] = []
    try:
        more = 3 * USUAL * pieces._token_bytes
        device.memory.limit(device.memory.use().used + more - model.caches[0].nbytes // 2)
        monkeypatch.setattr("engine.runtime.decode.pieces._CACHE_SHARE", 1)
        # The rest of the cache would be too little for the context: that comes first.
        with pieces.of(len(PROMPT), USUAL) as longest:
            assert (longest, model.caches[0].slots) == (USUAL, slots)
        monkeypatch.setattr(model.devices, "kv", (KvCost(),))
        with pieces.of(len(PROMPT), USUAL) as longest:
            lent.append(model.caches[0].slots)
            assert longest == 4 * USUAL
        assert lent[0] < slots == model.caches[0].slots
        monkeypatch.setattr("engine.runtime.decode.pieces._CACHE_SHARE", 10**6)
        with pieces.of(len(PROMPT), USUAL) as longest:
            assert (longest, model.caches[0].slots) == (USUAL, slots)
    finally:
        device.memory.limit(total)


def test_a_prompt_cancelled_between_pieces_gives_the_memory_back(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: 1.0))
    read(model)
    before, told = memory_use(model), list[int]()
    scheduler = Scheduler(model)
    asked = BatchRequest(
        0, ids=tuple(PROMPT), on_progress=lambda done, _all: told.append(done), cancelled=lambda: len(told) > 2
    )
    assert scheduler.answer(asked).finish_reason == "cancelled"
    assert 0 < told[-1] < len(PROMPT)
    scheduler.close()
    assert memory_use(model) == before
