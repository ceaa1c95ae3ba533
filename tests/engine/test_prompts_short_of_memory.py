"""Prompts of every size while other programs hold a card's memory: smaller pieces, or one sentence, and never a size
between two others that alone has no room."""

import functools
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices import emulated, memory_budget
from engine.devices.memory_budget import MemoryCategory
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import MIB, answer, chatting, opened
from tests.engine.tiny_families import tiny_checkpoint
from tests.refusals import refused

KIB = 2**10
CONTEXT = 1024


@functools.cache
def checkpoint(family: str, parent: Path) -> Path:
    return tiny_checkpoint(family, parent / family, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("short")


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(emulated, "OTHERS", {})


def leave(loaded: LoadedModel, nbytes: int) -> None:
    """So many bytes besides what cannot be given back."""
    (device,) = loaded.devices.devices
    assert device.watch is not None
    emulated.OTHERS.clear()
    while device.memory.total < 8 * MIB:  # they left long ago
        loaded.devices.heed(monotonic())
    loaded.devices.experts.activations[0].shrink()
    use = device.memory.use()
    kept = use.by_category[MemoryCategory.WEIGHTS] + use.by_category[MemoryCategory.STAGING]
    emulated.OTHERS[device.name] = device.watch._room().free + use.used - kept - nbytes
    loaded.devices.heed(monotonic())


def has_room(loaded: LoadedModel, nbytes: int, tokens: int) -> bool:
    leave(loaded, nbytes)
    said: EngineError | None = None
    with chatting(loaded) as session:
        try:
            assert answer(session, random_prompt(tokens), 3).generated_tokens == 3
        except EngineError as error:
            said = error
    assert said is None or (said.code is ErrorCode.NOT_ENOUGH_MEMORY and said.message.count(". ") == 0)
    return said is None


def test_others_get_what_no_request_holds(parent: Path) -> None:
    with opened(checkpoint("qwen3_moe", parent)) as loaded, chatting(loaded) as session:
        answer(session, random_prompt(700), 3)
        (device,), room = loaded.devices.devices, session.batch.pool.room
        assert device.watch is not None
        before, use = room.pages, device.memory.use()
        assert before >= 22
        emulated.OTHERS[device.name] = device.watch._room().free + use.by_category[MemoryCategory.KV] // 2
        answer(session, random_prompt(40, seed=3), 3)
        assert room.pages < before // 2
        assert device.memory.excess == 0


def test_sweeps_are_whole_again_once_others_have_left(parent: Path) -> None:
    """Whoever else looks at what devices have."""
    with opened(checkpoint("qwen3_moe", parent)) as loaded, chatting(loaded) as session:
        answer(session, random_prompt(700), 3)
        (device,), model = loaded.devices.devices, session.batch.model
        assert device.watch is not None
        held = device.memory.use().by_category[MemoryCategory.KV]
        emulated.OTHERS[device.name] = device.watch._room().free + held // 2
        answer(session, random_prompt(40, seed=3), 3)
        model.lighten()
        assert model._micro_batch_tokens < model._policy.micro_batch_tokens
        emulated.OTHERS.clear()
        answer(session, random_prompt(40, seed=4), 20)
        assert model._micro_batch_tokens == model._policy.micro_batch_tokens


_MANY = (1, 17, 33, 47, 64, 65, 90, 100, 128, 129, 160, 200, 240, 255, 256, 257, 300, 400, 512, 513, 700)
_MUCH = (12, 20, 28, 40, 52, 64, 78, 108, 138, 168, 192, 228, 268, 320)


@pytest.mark.parametrize(
    ("family", "misses", "sizes", "kilobytes"),
    [
        ("qwen3_moe", "mixed", (1, 90, 100, 200, 300), (40, 192)),
        *(
            pytest.param(family, misses, _MANY, _MUCH, marks=pytest.mark.exhaustive)
            for family in ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
            for misses in ("mixed", "fetch", "cpu")
        ),
    ],
)
def test_what_has_no_room_is_longer_than_all_that_has(
    parent: Path, family: str, misses: str, sizes: tuple[int, ...], kilobytes: tuple[int, ...]
) -> None:
    with opened(checkpoint(family, parent), misses=misses, cache_slots=16) as loaded:
        for each in kilobytes:
            fitting = [size for size in sizes if has_room(loaded, each * KIB, size)]
            assert fitting == list(sizes[: len(fitting)]), f"{each} KiB"
            assert fitting, f"{each} KiB are room for a token"


def test_a_context_takes_what_it_needs_where_there_is_no_room_to_grow(parent: Path) -> None:
    """Twice as much as it holds is asked for so that it grows rarely: not where that much is not there."""
    with opened(checkpoint("qwen3_moe", parent), misses="cpu", cache_slots=0) as loaded:
        (kv,) = loaded.devices.kv
        room = 320 * kv.per_token + 8 * KIB  # ten pages
        assert has_room(loaded, room, 290)
        leave(loaded, room)
        with chatting(loaded) as session, refused(ErrorCode.NOT_ENOUGH_MEMORY, match="needs"):
            answer(session, random_prompt(290), 200)


def test_a_prompt_is_read_in_shorter_pieces(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card refuses once is not asked for again with each piece."""
    prompt, fitting, computed = random_prompt(400), 70, list[int]()
    with opened(checkpoint("qwen3_moe", parent), misses="cpu", cache_slots=0) as loaded:
        with chatting(loaded) as session:
            expected = answer(session, prompt).token_ids
        with chatting(loaded) as session:
            exact = session.batch.exact
            step = exact._step

            def refusing(tokens: torch.Tensor, *rest: Any) -> Any:
                computed.append(tokens.shape[1])
                if tokens.shape[1] > fitting:
                    raise torch.OutOfMemoryError
                return step(tokens, *rest)

            monkeypatch.setattr(exact, "_step", refusing)
            exact.chunk_tokens = 200
            found = answer(session, prompt)
            assert found.token_ids == expected
        refused = computed[: computed.index(50)]
        assert refused == [200, 200, 100]  # once more without spare pages
        assert sum(each for each in computed if each > 1) == sum(refused) + len(prompt)
