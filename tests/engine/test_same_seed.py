"""The same seed gives the same answer in bf16: with and without reuse, in company, and after a restart."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.kernels.native.build import library_path
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.prefix_cache.store import PrefixCache
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, opened_model, random_prompt
from tests.engine.single_streams import Alone, answered_together
from tests.engine.test_kept_prefixes import CHAT, ROOT, files_in
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

TOKENS = 14
WIDE = {"hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 2048, "sliding_window": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": WIDE,  # wide enough for kernels whose sums depend on how many tokens there are
    "qwen3_moe": {"max_position_embeddings": 2048},
    "gpt_oss": {"max_position_embeddings": 2048},  # windows
    "deepseek_v2": {"max_position_embeddings": 2048},  # latent attention
    "qwen3_next": {"max_position_embeddings": 2048},  # states, not packed
    "olmoe": {"max_position_embeddings": 2048},
}


@pytest.fixture(scope="module", params=some(FAMILIES, every=4))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_checkpoint(request.param, folder, dtype=torch.bfloat16, **FAMILIES[request.param])
    with opened_model(path, threads=2) as model:
        yield model


def _request(ids: Sequence[int], seed: int | None, number: int = 0, tokens: int = TOKENS) -> BatchRequest:
    sampling = SamplingParams(temperature=1.5, seed=seed, max_tokens=tokens)
    return BatchRequest(number, ids=tuple(ids), sampling=sampling, end_ids=NO_END, chat=CHAT)


PROMPT = random_prompt(340)


@pytest.mark.takes_turns(2)
def test_whatever_was_read_before(loaded: LoadedModel) -> None:
    assert loaded.chunk_tokens == 256
    alone = Alone(loaded)
    first = alone.answer(_request(PROMPT, 3))
    turn = [*PROMPT, *first.token_ids, *random_prompt(300, seed=4)]
    fresh = Alone(loaded)
    second = fresh.answer(_request(turn, 5))
    others = {
        "the same": PROMPT,
        "its beginning": PROMPT[:270],
        "more than it": [*PROMPT, *random_prompt(30, seed=6)],
        "another end": [*PROMPT[:300], *random_prompt(90, seed=7)],
        "another": random_prompt(290, seed=8),
    }
    for name, other in others.items():
        for seed in (None, 9):
            alone.answer(_request(other, seed))
            again = alone.answer(_request(PROMPT, 3))
            assert again.token_ids == first.token_ids, name
            if name in ("the same", "more than it", "another end") and seed is not None and not loaded.kept:
                assert again.reused_tokens in (0, 256)
        assert alone.answer(_request(turn, 5)).token_ids == second.token_ids, name
    assert alone.answer(_request(PROMPT, None)).reused_tokens >= 256 or loaded.info.family in ("qwen3_next", "gpt_oss")


def test_chunks_that_began_elsewhere_or_were_kept_are_computed_again(loaded: LoadedModel) -> None:
    one, other = ([*PROMPT[:300], *random_prompt(300, seed=seed)] for seed in (7, 8))
    own = ((one, None), (other, 3), (one, None), (one, 3))  # whole chunks of the first are as they would be
    for asked in (((one, None), (other, None), (other, 3)), own):
        alone = Alone(loaded, kept=PrefixCache(ROOT, 2**26))
        for ids, seed in asked:
            result = alone.answer(_request(ids, seed))
        assert result.token_ids == Alone(loaded).answer(_request(*asked[-1])).token_ids
        assert result.reused_tokens <= 256 or asked is own or loaded.info.family in ("qwen3_next", "gpt_oss")


@pytest.mark.takes_turns(2)
def test_in_company(loaded: LoadedModel) -> None:
    alone, expected = Alone(loaded), dict[int, tuple[int, ...]]()
    prompts = {number: random_prompt(30 + 37 * number, seed=number) for number in range(12)}
    for number in range(8):
        expected[number] = alone.answer(_request(prompts[number], number, tokens=TOKENS + 40)).token_ids
    alone.clear()
    for company in (2, 8, 12) if loaded.info.family == "mixtral" else (10,):
        scheduler = Scheduler(loaded)
        requests = [
            _request(prompts[number], number if number < 8 else None, number, TOKENS + 40 + (number >= 8) * 20)
            for number in sorted(range(company), key=lambda number: number % 5)
        ]
        answers = answered_together(scheduler, requests)
        scheduler.close()
        assert {number: answers[number].token_ids for number in range(min(company, 8))} == {
            number: expected[number] for number in range(min(company, 8))
        }


def test_after_a_restart_with_what_was_kept(loaded: LoadedModel, tmp_path: Path) -> None:
    expected = Alone(loaded).answer(_request(PROMPT, 3))
    for _restart in range(2):
        loaded.kept = PrefixCache(ROOT, 2**26, files_in(tmp_path))
        scheduler, ended = Scheduler(loaded), list[Any]()
        for ids, seed in ((random_prompt(200, seed=2), 1), (PROMPT[:290], None), (PROMPT, 3), (PROMPT, None)):
            scheduler.submit(_request(ids, seed), ended.append)
            scheduler.serve()
        assert ended[2].token_ids == expected.token_ids
        scheduler.close()
        assert loaded.kept.settle(20.0)
        loaded.kept.close()
        loaded.kept = None
