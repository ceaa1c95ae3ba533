"""Tokens are the same whether a prompt is read at once, in pieces, or on top of what an earlier one left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.common.errors import RequestCancelled, never_cancelled
from engine.runtime.decode.generation import drained, ignore_progress
from engine.runtime.decode.kv_session import KvSession
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, library_tokens, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone
from tests.engine.tiny_configs import FAMILIES

PROMPT = random_prompt(40)
GREEDY = SamplingParams(max_tokens=12)


def logits_after(session: KvSession, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return drained(session.read(prompt, ignore_progress, never_cancelled))[0]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", some(sorted(FAMILIES), first=3))
def test_pieces_and_reuse_are_exact(family: str) -> None:
    loaded = tiny_loaded(family)

    found: dict[tuple[int, ...], torch.Tensor] = {}

    def alone(prompt: list[int]) -> torch.Tensor:
        if tuple(prompt) not in found:
            loaded.chunk_tokens = 1000
            with torch.inference_mode():
                whole = loaded.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[:, -1]
            assert torch.allclose(logits_after(KvSession(loaded), prompt), whole, atol=2e-4)
            found[tuple(prompt)] = whole
        return found[tuple(prompt)]

    for tokens in (7, 13):
        expected = alone(PROMPT)
        loaded.chunk_tokens = tokens
        assert torch.allclose(logits_after(KvSession(loaded), PROMPT), expected, atol=2e-4)

    session = Alone(loaded)
    answer = session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END).token_ids
    continued = [*PROMPT, *answer, *random_prompt(9, seed=2)]
    edited = [*PROMPT[:30], *random_prompt(20, seed=3)]
    kv = session._session
    assert isinstance(kv, KvSession)
    for prompt in (continued, continued, PROMPT, edited, edited[:20]):
        expected = alone(prompt)
        kv._chunk_tokens = 7
        assert torch.allclose(logits_after(kv, prompt), expected, atol=2e-4)


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
        assert result.reused_tokens == (0 if turn == 0 else len(prompt) - 6)
        prompt = [*prompt, *result.token_ids, *random_prompt(5, seed=turn)]


@pytest.mark.parametrize(
    ("family", "reused"),
    [
        ("llama", 39),
        ("deepseek_v3", 39),
        ("gpt_oss", 24),
        ("qwen3_next", 24),
        ("mixtral", 24),
        ("jamba", 24),
        ("minimax", 24),
    ],
)
def test_asking_again_reuses_what_the_cache_can_give_back(family: str, reused: int) -> None:
    session = Alone(tiny_loaded(family))
    first = session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    again = session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    assert again.token_ids == first.token_ids
    assert (first.reused_tokens, again.reused_tokens) == (0, reused)


def test_a_window_that_has_not_slid_is_cropped() -> None:
    session = Alone(tiny_loaded("gpt_oss", sliding_window=128))
    session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    assert session.generate_from_ids([*PROMPT[:10], 5], GREEDY, end_ids=NO_END).reused_tokens == 10


def test_a_failed_forward_spoils_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert result.reused_tokens == 0
    assert list(result.token_ids) == library_tokens(loaded.model, [*PROMPT, 5, 6], 12)


def test_a_cancelled_prompt_keeps_what_it_has_read() -> None:
    loaded = tiny_loaded("olmoe")
    loaded.chunk_tokens = 8
    session = KvSession(loaded)
    seen: list[tuple[int, int]] = []
    with torch.inference_mode(), pytest.raises(RequestCancelled):
        drained(session.read(PROMPT, lambda done, total: seen.append((done, total)), lambda: len(seen) > 3))
    assert seen == [(0, 40), (8, 40), (16, 40), (24, 40)]
    assert session.tokens == 24
    with torch.inference_mode():
        assert drained(session.read(PROMPT, ignore_progress, never_cancelled))[1].tokens == 24


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
    for prompt in (PROMPT, [*PROMPT, 5], random_prompt(60), [*random_prompt(60), 7, 8], PROMPT[:30], random_prompt(46)):
        result = session.generate_from_ids(prompt, GREEDY, end_ids=NO_END)
        with torch.inference_mode():
            ids = list(prompt)
            for _ in range(12):
                ids.append(int(loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert list(result.token_ids) == ids[len(prompt) :]


def test_kv_is_counted_and_freed() -> None:
    session = Alone(tiny_loaded("gpt_oss"))
    assert (session.kv_tokens, session.kv_bytes) == (0, 0)
    session.generate_from_ids(PROMPT, GREEDY, end_ids=NO_END)
    assert session.kv_tokens == 51
    assert session.kv_bytes > 2 * 51 * 2 * 8 * 4
    session.clear()
    assert (session.kv_tokens, session.kv_bytes) == (0, 0)
