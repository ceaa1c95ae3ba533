"""Chats with a cache of their own, whose layers sum up or forget what lies far back, go on where they were left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import Cache

from engine.common.errors import never_cancelled
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.decode.kv_session import KvSession
from engine.runtime.kept.block import BLOCK_TOKENS, BlockLayout
from engine.runtime.kept.copying import from_cache
from engine.runtime.kept.files import KeptFiles
from engine.runtime.kept.prefixes import KeptPrefixes, Reused
from engine.runtime.kept.state import CacheForm, HeldState, StateLayout, restore
from engine.runtime.kv.growing import GrowingLayer
from engine.runtime.kv.layers import new_cache
from engine.runtime.load.kept_context import kept_note, open_kept
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import random_prompt, tiny_loaded
from tests.engine.test_kept_prefixes import CHAT, ROOT, A, B, ask, files_in, fresh, further

FAMILIES = ("zaya", pytest.param("inkling_text", marks=pytest.mark.exhaustive))
"""Those that do not have all of that in pages."""


def store(folder: Path) -> KeptPrefixes:
    return KeptPrefixes(ROOT, 2**26, files_in(folder))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoadedModel]:
    loaded = tiny_loaded(request.param, context_tokens=1024)
    loaded.kept = store(tmp_path)
    yield loaded
    loaded.kept.close()


def restarted(loaded: LoadedModel, folder: Path) -> Scheduler:
    assert loaded.kept is not None
    loaded.kept.close()
    loaded.kept = store(folder)
    return Scheduler(loaded)


def reading(session: KvSession, prompt: Sequence[int]) -> tuple[torch.Tensor, Reused]:
    parts = session.read(prompt, ignore_progress, never_cancelled)
    with torch.inference_mode():
        while True:
            try:
                next(parts)
            except StopIteration as end:
                logits, reused = end.value
                return logits, reused


def test_a_chat_goes_on_after_another_one_and_after_a_restart(model: LoadedModel, tmp_path: Path) -> None:
    scheduler = Scheduler(model)
    (first,) = ask(scheduler, A)
    ask(scheduler, B)
    again = further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(model, again)
    assert second.reused_tokens == second.from_ram + second.from_disk == 217  # the last token was never read
    assert model.kept is not None
    assert model.kept.settle(30)
    scheduler.close()
    scheduler, more = restarted(model, tmp_path), further(again, second)
    (third,) = ask(scheduler, more)
    assert third.token_ids == fresh(model, more)
    assert third.from_disk == len(again) + 7
    scheduler.close()


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2_moe", "jamba", "deepseek_v4", "mixtral", "gpt_oss"])
def test_logits_are_those_of_reading_anew(family: str, tmp_path: Path) -> None:
    model = tiny_loaded(family, context_tokens=1024)
    model.kept = store(tmp_path)
    session = KvSession(model, kept=model.kept)
    session.chat = CHAT
    for prompt in (A, B):
        reading(session, prompt)
        session.keep()
    with torch.inference_mode():
        longer = [*A, *random_prompt(20, seed=9)]
        logits, reused = reading(session, longer)
        assert reused.ram + reused.disk == len(A)
        anew, nothing = reading(KvSession(model), longer)
        assert nothing.tokens == 0
        torch.testing.assert_close(logits, anew, rtol=1e-4, atol=1e-3)
        for token in random_prompt(12, seed=10):
            one = session.step(torch.tensor([[token]]), token)
        other = KvSession(model)
        anew, _ = reading(other, [*longer, *random_prompt(12, seed=10)])
        torch.testing.assert_close(one, anew, rtol=1e-4, atol=1e-3)
    session.clear()
    model.kept.close()


def test_an_answer_that_is_taken_back_goes_on_where_it_began(model: LoadedModel) -> None:
    """As where thoughts are left out of the next prompt."""
    scheduler = Scheduler(model)
    ask(scheduler, A)
    ask(scheduler, B)
    other = [*A[:-4], *random_prompt(30, seed=4)]
    (result,) = ask(scheduler, other)
    assert result.token_ids == fresh(model, other)
    assert result.reused_tokens == len(A) - 16
    scheduler.close()


def test_a_long_beginning_is_found_in_its_midst() -> None:
    loaded = tiny_loaded("lfm2_moe", context_tokens=4096)
    loaded.chunk_tokens = 512
    loaded.kept = KeptPrefixes(ROOT, 2**28)
    scheduler, rules = Scheduler(loaded), random_prompt(1400, seed=6)
    ask(scheduler, [*rules, *random_prompt(200, seed=7)])
    ask(scheduler, B)
    prompt = [*rules, *random_prompt(90, seed=8)]
    (result,) = ask(scheduler, prompt)
    assert result.reused_tokens == 1024
    assert result.token_ids == fresh(loaded, prompt)
    scheduler.close()
    loaded.kept.close()


@pytest.mark.parametrize("damage", ["state", "every state", "block"])
def test_damaged_files_are_skipped(
    model: LoadedModel,
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens, write = dict[str, int](), KeptFiles.write

    def noting(files: KeptFiles, path: Path, chat: str, key: bytes, description: bytes, data: memoryview) -> None:
        layout = StateLayout.read(description)
        tokens[path.stem] = layout.tokens if layout is not None else 0
        write(files, path, chat, key, description, data)

    monkeypatch.setattr(KeptFiles, "write", noting)
    scheduler = Scheduler(model)
    (first,) = ask(scheduler, A)
    assert model.kept is not None
    assert model.kept.settle(30)
    scheduler.close()
    states = {file: tokens[file.stem] for file in tmp_path.rglob("*.kept") if tokens[file.stem]}
    blocks = [file for file in tmp_path.rglob("*.kept") if file not in states]
    assert sorted(states.values()) == [len(A) - 16, len(A) + 7]
    if damage == "block" and not blocks:
        return
    hit = blocks[:1] if damage == "block" else [f for f, n in states.items() if n > len(A) or damage == "every state"]
    for file in hit:
        content = bytearray(file.read_bytes())
        content[-70] ^= 4
        file.write_bytes(content)
    scheduler, again = restarted(model, tmp_path), further(A, first)
    (second,) = ask(scheduler, again)
    assert second.token_ids == fresh(model, again)
    assert second.reused_tokens == (len(A) - 16 if damage == "state" else 0)
    assert "damaged" in caplog.text
    scheduler.close()


def test_a_budget_counts_each_byte_once(model: LoadedModel, tmp_path: Path) -> None:
    assert model.kept is not None
    scheduler, kept = Scheduler(model), model.kept
    for _ in range(2):  # nothing new in the second round
        for prompt in (A, B):
            ask(scheduler, prompt)
            assert kept.settle(30)
    files = {file: file.stat().st_size for file in tmp_path.rglob("*.kept")}
    assert kept.disk_bytes == sum(files.values())
    assert kept.ram_bytes == sum(block.data.nbytes for block in kept._blocks.values())
    form = CacheForm.of(new_cache(model.model))
    assert form is not None
    blocks = 3 + 2 if form.has_rows else 0
    assert len(files) == blocks + 4
    assert blocks == 0 or blocks == 210 // BLOCK_TOKENS + 150 // BLOCK_TOKENS
    scheduler.close()


def test_little_room_keeps_what_is_of_use(model: LoadedModel) -> None:
    """Blocks are of no use without what layers held behind them."""
    assert model.kept is not None
    model.kept.close()
    for room in (0, 3_000, 30_000, 100_000):
        model.kept = KeptPrefixes(ROOT, room)
        scheduler = Scheduler(model)
        (first,) = ask(scheduler, A)
        ask(scheduler, B)
        assert model.kept.ram_bytes <= room
        again = further(A, first)
        (second,) = ask(scheduler, again)
        assert second.token_ids == fresh(model, again)
        scheduler.close()
        model.kept.close()


@pytest.mark.parametrize("tokens", [130, 210])
def test_blocks_of_all_layers_serve_a_window_too(tokens: int) -> None:
    """As rows that shared sweeps leave them: pages forget nothing."""
    loaded = tiny_loaded("gpt_oss", context_tokens=512)
    loaded.kept = kept = KeptPrefixes(ROOT, 2**26)
    prompt, session = random_prompt(tokens, seed=tokens), KvSession(loaded, kept=kept)
    whole = [GrowingLayer() for _ in loaded.model.model.layers]
    cache = new_cache(loaded.model)
    assert cache is not None
    with torch.inference_mode():
        for token in prompt:
            loaded.model(torch.tensor([[token]]), cache=cache, use_cache=True)
            for all_rows, states in zip(whole, cache.layers, strict=True):
                all_rows.update(states.keys[:, :, -1:], states.values[:, :, -1:])
        everything = Cache(layers=whole)
        layout = BlockLayout.of_cache(everything, tokens)
        assert layout is not None
        kept.offer("everything", prompt, layout, from_cache(everything, layout))
        kept.withdraw("everything")
        longer = [*prompt, *random_prompt(9, seed=9)]
        logits, reused = reading(session, longer)
        assert reused.ram == tokens // BLOCK_TOKENS * BLOCK_TOKENS
        torch.testing.assert_close(logits, reading(KvSession(loaded), longer)[0], rtol=1e-4, atol=1e-3)
    session.clear()
    kept.close()


def test_what_does_not_fit_is_refused() -> None:
    loaded, other = tiny_loaded("qwen3_next"), tiny_loaded("gpt_oss")
    session = KvSession(loaded)
    reading(session, A)
    held = HeldState(session.cache, len(A))
    layout = StateLayout.of(held)
    assert StateLayout.read(layout.described) == layout
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    held.copy(data)
    with pytest.raises(LookupError), torch.inference_mode():
        restore(new_cache(other.model), layout, data, lambda _layer: torch.device("cpu"))
    for description in (b"", b"[]", b"[1,[]]", b"[1,[[[],3]]]", b'[1,[[[["keys",[-1],"int8"]],[]]]]', b"[" * 10_000):
        assert StateLayout.read(description) is None
    session.clear()


def test_models_say_what_is_not_kept() -> None:
    assert "read again" in kept_note(tiny_loaded("qwen3_next").model)
    assert "read again" in kept_note(tiny_loaded("mixtral", sliding_window=16).model)
    assert "read again" in kept_note(tiny_loaded("deepseek_v4").model)
    loaded = tiny_loaded("olmoe")
    assert kept_note(loaded.model) == ""
    kept = open_kept(loaded)
    assert kept is not None
    kept.close()
