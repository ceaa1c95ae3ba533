"""Pieces of a prompt where experts come over a link: as long as copies make worth while and memory allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.common.errors import RequestCancelled
from engine.experts.latency import LatencyModel
from engine.runtime.decode.generation import drained
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.decode.pieces import Layers, wanted_tokens
from engine.runtime.kv.memory import KvCost
from engine.runtime.loaded_model import LoadedModel
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


def read(session: KvSession, cancel_after: int | None = None) -> tuple[torch.Tensor, list[int]]:
    """The logits after the prompt, and the tokens of each forward."""
    pieces: list[int] = []
    forward = session._forward

    def counted(tokens: torch.Tensor, ids: list[int]) -> torch.Tensor:
        pieces.append(len(ids))
        return forward(tokens, ids)

    session._forward = counted  # type: ignore[method-assign, assignment]
    cancelled = lambda: cancel_after is not None and len(pieces) >= cancel_after  # noqa: E731
    with torch.inference_mode():
        logits, _ = drained(session.read(PROMPT, lambda *_: None, cancelled))
    return logits, pieces


@pytest.mark.parametrize("link", [1e5, 1e15])
def test_slow_links_get_longer_pieces_and_the_same_answer(
    model: LoadedModel, link: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [cache.slots for cache in model.caches]
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: self.record_nbytes / link))
    session = KvSession(model)
    logits, pieces = read(session)
    assert pieces[0] == (4 * USUAL if link == 1e5 else USUAL)
    assert sum(pieces) == len(PROMPT)
    session.clear()
    monkeypatch.setattr("engine.runtime.decode.pieces._MOST_TIMES", 1)
    wanted, pieces = read(session := KvSession(model))
    assert pieces[0] == USUAL
    session.clear()
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert [cache.slots for cache in model.caches] == slots


def test_a_prompt_cancelled_between_pieces_gives_the_memory_back(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: 1.0))
    session = KvSession(model)
    read(session)
    session.clear()
    before = memory_use(model)
    with pytest.raises(RequestCancelled):
        read(session, cancel_after=2)
    session.clear()
    assert memory_use(model) == before


def test_memory_for_longer_pieces_comes_from_the_cache_and_goes_back_to_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatencyModel, "transfer_s", property(lambda self: 1.0))
    assert model.devices is not None
    (device,) = model.devices.devices
    total, slots = device.memory.total, model.caches[0].slots
    session = KvSession(model)
    read(session)
    session.clear()
    lent: list[int] = []
    try:
        more = 3 * USUAL * session._pieces._token_bytes
        device.memory.limit(device.memory.use().used + more - model.caches[0].nbytes // 2)
        monkeypatch.setattr("engine.runtime.decode.pieces._CACHE_SHARE", 1)
        # The rest of the cache would be too little for the context: that comes first.
        with session._pieces.of(len(PROMPT), USUAL) as longest:
            assert (longest, model.caches[0].slots) == (USUAL, slots)
        monkeypatch.setattr(model.devices, "kv", (KvCost(),))
        with session._pieces.of(len(PROMPT), USUAL) as longest:
            lent.append(model.caches[0].slots)
            assert longest == 4 * USUAL
        assert lent[0] < slots == model.caches[0].slots
        monkeypatch.setattr("engine.runtime.decode.pieces._CACHE_SHARE", 10**6)
        with session._pieces.of(len(PROMPT), USUAL) as longest:
            assert (longest, model.caches[0].slots) == (USUAL, slots)
    finally:
        device.memory.limit(total)
