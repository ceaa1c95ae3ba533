"""Tokens are the same whether a prompt is read at once, in pieces, or on top of what an earlier one left."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.bench.opened import OneSequence
from engine.common.config import SamplingParams
from engine.runtime.kv.library_caches import measure_kv
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone
from tests.engine.tiny_configs import FAMILIES

PROMPT = random_prompt(40)
GREEDY = SamplingParams(max_tokens=12)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", some(sorted(FAMILIES), first=3))
def test_pieces_and_reuse_are_exact(family: str) -> None:
    loaded = tiny_loaded(family)
    for tokens in (7, 13, 1000):
        with torch.inference_mode():
            whole = loaded.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[:, -1]
        loaded.chunk_tokens = tokens
        sequence = OneSequence(loaded)
        assert torch.allclose(sequence.read(PROMPT), whole, atol=2e-4)
        sequence.close()

    loaded.chunk_tokens = 7
    session = Alone(loaded)
    answer = session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END).token_ids
    continued = [*PROMPT, *answer, *random_prompt(9, seed=2)]
    edited = [*PROMPT[:30], *random_prompt(20, seed=3)]
    for prompt in (continued, continued, PROMPT, edited, edited[:20]):
        found = session.generate_from_ids(prompt, SamplingParams(max_tokens=3), end_ids=NO_END).token_ids
        assert list(found) == library_tokens(loaded.model, prompt, 3)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    "family", ["llama", "olmoe", "gpt_oss", "deepseek_v3", "qwen3_next", "deepseek_v4", "lfm2_moe"]
)
def test_greedy_tokens_with_and_without_reuse(family: str) -> None:
    loaded = tiny_loaded(family)
    session = Alone(loaded)
    prompt = PROMPT
    for turn in range(3):
        result = session.generate_from_ids(prompt, GREEDY, end_ids=NO_END)
        assert list(result.token_ids) == library_tokens(loaded.model, prompt, 12)
        assert (result.reused_tokens > 0) is (turn > 0)
        prompt = [*prompt, *result.token_ids, *random_prompt(5, seed=turn)]


def test_after_a_failed_forward_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_loaded("mixtral")
    session = Alone(loaded)
    session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    layer = loaded.model.model.layers[1].mlp

    def fail(*args: Any) -> None:
        raise RuntimeError("device fault")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fail)
        with pytest.raises(RuntimeError, match="device fault"):
            session.generate_from_ids([*PROMPT, 5, 6], GREEDY, end_ids=NO_END)
    result = session.generate_from_ids([*PROMPT, 5, 6], GREEDY, end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(loaded.model, [*PROMPT, 5, 6], 12)


@pytest.mark.parametrize("family", ["olmoe", "zaya"])
def test_a_cancelled_prompt_keeps_what_it_has_read(family: str) -> None:
    loaded = tiny_loaded(family)
    loaded.chunk_tokens = 16
    session, seen = Alone(loaded), list[tuple[int, int]]()
    asked = BatchRequest(0, ids=tuple(PROMPT), sampling=GREEDY, end_ids=NO_END)
    seeing = replace(asked, on_progress=lambda done, all_: seen.append((done, all_)), cancelled=lambda: len(seen) > 3)
    assert session.answer(seeing).finish_reason == "cancelled"
    assert seen == [(0, 40), (16, 40), (32, 40), (40, 40)][: len(seen)]
    again = session.answer(asked)
    assert list(again.token_ids) == library_tokens(loaded.model, PROMPT, 12)


def test_what_the_librarys_caches_hold_of_a_long_prompt_is_twice_as_much_at_most() -> None:
    loaded = tiny_loaded("zaya", context_tokens=2048)
    loaded.chunk_tokens = 128
    session, held = Alone(loaded), list[int]()
    with torch.no_grad():
        cost, _ = measure_kv(loaded.model, loaded.device)
    asked = BatchRequest(0, ids=tuple(random_prompt(1600)), sampling=SamplingParams(max_tokens=2), end_ids=NO_END)
    session.answer(replace(asked, on_progress=lambda _done, _all: held.append(session.kv_bytes)))
    assert max(*held, session.kv_bytes) <= 2 * (cost.fixed + 1602 * cost.per_token)
    session.clear()


def test_long_rope_recomputes_when_it_switches() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 46,
    }
    loaded = tiny_loaded("phimoe", rope_parameters=rope, original_max_position_embeddings=46, sliding_window=None)
    session = Alone(loaded)
    reused = list[int]()
    long = random_prompt(100)
    for prompt in (PROMPT, [*PROMPT, 5], random_prompt(60), long, [*long, 7, 8], PROMPT[:30], random_prompt(46)):
        result = session.generate_from_ids(prompt, GREEDY, end_ids=NO_END)
        with torch.inference_mode():
            ids = list(prompt)
            for _ in range(12):
                ids.append(int(loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert list(result.token_ids) == ids[len(prompt) :]
        reused.append(result.reused_tokens)
    assert reused[0] == reused[2] == 0
    assert reused[4] >= 96, "long contexts go on from each other"
    assert reused[6] > 0, "and so do short ones"


def test_kv_is_counted_and_freed() -> None:
    session = Alone(tiny_loaded("gpt_oss"))
    assert (session.kv_tokens, session.kv_bytes) == (0, 0)
    session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    assert session.kv_tokens == 51
    assert session.kv_bytes > 2 * 51 * 2 * 8 * 4
    session.clear()
    assert (session.kv_tokens, session.kv_bytes) == (0, 0)
