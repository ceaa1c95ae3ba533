"""Whatever memory there is: the right answer with a word about what was reduced, or one clear refusal."""

import contextlib
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import CACHE_POLICIES, MISSES, PREFETCHES
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import library_tokens, random_prompt
from tests.engine.on_devices import MIB, NEW_TOKENS, answer, chatting, memory_use, opened, slots
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config
from tests.refusals import refused

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "llama4_text", "granitemoe", "qwen3")
LIMIT = 256
"""Context of the tiny models."""
TEXT = random_prompt(LIMIT + 50, seed=3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("checkpoints")
    checkpoint.cache_clear()


@cache
def checkpoint(family: str, parent: Path) -> tuple[Path, Any]:
    """The family's tiny checkpoint, and transformers' model of it."""
    folder = tiny_checkpoint(family, parent / family)
    return folder, model_class(tiny_config(family)).from_pretrained(folder, dtype=torch.float32).eval()


def combination(rng: random.Random) -> dict[str, Any]:
    """What a user might ask for, from far too little to more than enough."""
    asked: dict[str, Any] = {
        "devices": rng.choice([0, 1, 1, 1, 2, 2]),
        "vram_bytes": int(2 ** rng.uniform(15, 21)),
        "context_tokens": rng.choice([None, rng.randint(1, 400)]),
        "cache_slots": rng.choice([None, None, 0, 1, 3, 1000]),
        "cache_ways": rng.choice([None, None, 1, 3]),
        "cache_policy": rng.choice(CACHE_POLICIES),
        "misses": rng.choice(MISSES),
        "prefetch": rng.choice(PREFETCHES),
    }
    if rng.random() < 0.4:
        asked["ram_bytes"] = int(2 ** rng.uniform(16, 21))
    return asked


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(20, 200))]
)
def test_any_budget_ends_in_an_answer_or_one_clear_sentence(seed: int, checkpoints: Path) -> None:
    rng = random.Random(seed)
    folder, library = checkpoint(rng.choice(FAMILIES), checkpoints)
    asked = combination(rng)
    prompt, tokens = TEXT[: rng.choice([rng.randint(1, 12), rng.randint(1, LIMIT + 40)])], rng.randint(1, 8)
    with contextlib.ExitStack() as opening:
        try:
            model = opening.enter_context(opened(folder, **asked))
        except EngineError as error:
            assert_clear(error, ErrorCode.NOT_ENOUGH_MEMORY)
            assert "ram_bytes" in asked  # whoever allows all RAM gets an answer whatever the devices are worth
            return
        assert_said(model, asked)
        session = opening.enter_context(chatting(model))
        try:
            given = answer(session, prompt, tokens)
        except EngineError as error:
            assert_clear(error, ErrorCode.PROMPT_TOO_LONG)
            assert len(prompt) >= model.context_tokens
        else:
            assert given.generated_tokens == min(tokens, model.context_tokens - len(prompt))
            assert list(given.token_ids) == library_tokens(library, prompt, given.generated_tokens)
        assert_within_budget(model, session.kv_bytes)


def assert_said(model: LoadedModel, asked: dict[str, Any]) -> None:
    """What the user is told fits what there is."""
    note = model.info.device_note
    wanted = min(asked["context_tokens"] or LIMIT, LIMIT)
    assert ("room for a context" in note) == (model.context_tokens < wanted)
    assert model.info.context_tokens == model.context_tokens <= wanted
    if model.devices is None:
        assert ("Runs on the CPU" in note) == (asked["devices"] > 0)
        return
    assert "emulated" in note
    experts = sum(len(layer.records) for layer in model.bank.layers.values()) if model.bank is not None else 0
    if 0 < slots(model) < min(asked["cache_slots"] or 0, experts) // 2 and asked["cache_ways"] is None:
        assert "Only" in note or "keeps" in note


def assert_within_budget(model: LoadedModel, kv_bytes: int) -> None:
    used = memory_use(model)
    for use in used:
        assert use.peak <= use.total
        assert all(nbytes >= 0 for nbytes in use.by_category.values())
    if used and kv_bytes:
        assert sum(use.by_category["kv"] for use in used) == kv_bytes


def assert_clear(error: EngineError, code: ErrorCode) -> None:
    """One sentence."""
    assert error.code is code
    assert "\n" not in error.message
    assert error.message.endswith(".")


def test_a_longer_context_takes_the_experts_place_and_gives_it_back(checkpoints: Path) -> None:
    folder, library = checkpoint("qwen3_moe", checkpoints)
    with opened(folder, vram_bytes=2 * MIB // 5, cache_slots=1000) as model, chatting(model) as session:
        before = slots(model)
        assert 0 < before < 16
        for length in (20, 240, 20):
            assert list(answer(session, TEXT[:length]).token_ids) == library_tokens(library, TEXT[:length], NEW_TOKENS)
            assert_within_budget(model, session.kv_bytes)
        with_beams = answer(session, TEXT[:200], beams=2)
        assert list(with_beams.token_ids) == library_tokens(library, TEXT[:200], NEW_TOKENS, num_beams=2)
        session.clear()
        assert slots(model) == before
    with opened(folder, vram_bytes=7 * MIB // 16, cache_slots=1000) as model, chatting(model) as session:
        before, prompts = slots(model), [TEXT[:120], TEXT[50:170]]
        alone = [tuple(library_tokens(library, prompt, NEW_TOKENS)) for prompt in prompts]
        assert session.together(prompts, NEW_TOKENS) == alone
        assert slots(model) < before
        session.clear()
        assert slots(model) == before


def test_a_context_beyond_all_memory_is_refused_and_a_shorter_one_still_answered(checkpoints: Path) -> None:
    folder, library = checkpoint("qwen3_moe", checkpoints)
    with opened(folder, vram_bytes=MIB // 4) as model, chatting(model) as session:
        assert model.devices is not None
        with refused(ErrorCode.NOT_ENOUGH_MEMORY, match="emulated:slow-link#0"):
            answer(session, TEXT[:200], beams=16)
        assert list(answer(session, TEXT[:40]).token_ids) == library_tokens(library, TEXT[:40], NEW_TOKENS)
        assert_within_budget(model, session.kv_bytes)
