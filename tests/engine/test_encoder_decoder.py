"""Models with an encoder: the same tokens as transformers' `generate`."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from engine.common.config import SamplingParams
from engine.common.errors import ErrorCode, never_cancelled
from engine.protocol import ChatMessage
from engine.runtime.schedule.request import Preparation
from tests.engine.loaded_tiny import NO_END, as_loaded, random_prompt
from tests.engine.single_streams import Alone
from tests.refusals import refused

PROMPT = random_prompt(20)


@cache
def model(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if name == "switch_transformers":
            config = SwitchTransformersConfig(
                vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, num_decoder_layers=2,
                num_experts=4, expert_capacity=64, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, initializer_factor=3.0,
            )  # fmt: skip
            built = SwitchTransformersForConditionalGeneration(config)
        else:
            nllb = NllbMoeConfig(
                vocab_size=320, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_experts=4, expert_capacity=64,
                encoder_sparse_step=2, decoder_sparse_step=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=2, max_position_embeddings=128, init_std=0.5,
            )  # fmt: skip
            built = NllbMoeForConditionalGeneration(nllb)
    return built.eval()


def library_tokens(name: str, tokens: int, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "max_new_tokens": tokens, **options}
    with torch.inference_mode():
        return [int(i) for i in model(name).generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, 1:]]


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
@pytest.mark.parametrize("beams", [1, 2, 4])
def test_the_same_tokens_as_transformers(name: str, beams: int) -> None:
    session = Alone(as_loaded(model(name)))
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=16, beams=beams), end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(name, 16, num_beams=beams)
    assert (result.prompt_tokens, result.reused_tokens) == (20, 0)


@pytest.mark.parametrize("name", ["switch_transformers", "nllb_moe"])
def test_repetition_penalty_counts_the_answer(name: str) -> None:
    session = Alone(as_loaded(model(name)))
    result = session.generate_from_ids(PROMPT, SamplingParams(max_tokens=16, repetition_penalty=1.5), end_ids=NO_END)
    assert list(result.token_ids) == library_tokens(name, 16, repetition_penalty=1.5)


def test_a_forced_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model("nllb_moe").generation_config, "forced_bos_token_id", 77)
    result = Alone(as_loaded(model("nllb_moe"))).generate_from_ids(PROMPT, SamplingParams(max_tokens=8), end_ids=NO_END)
    assert result.token_ids[0] == 77
    assert list(result.token_ids) == library_tokens("nllb_moe", 8, forced_bos_token_id=77)


def test_the_encoder_reads_the_last_request() -> None:
    loaded = as_loaded(model("switch_transformers"))
    preparation, session = Preparation(loaded), Alone(loaded)
    messages = [ChatMessage("user", "one"), ChatMessage("assistant", "two"), ChatMessage("user", "three")]
    assert preparation.prompt(messages, never_cancelled) == preparation.prompt(messages[-1:], never_cancelled)
    assert session.generate(messages, SamplingParams(max_tokens=3)).generated_tokens <= 3
    session.clear()
    assert (session.kv_tokens, session.kv_bytes) == (0, 0)


def test_a_cancelled_request_never_runs_the_encoder() -> None:
    session = Alone(as_loaded(model("switch_transformers")))
    result = session.generate_from_ids(PROMPT, SamplingParams(), cancelled=lambda: True)
    assert (result.finish_reason, result.generated_tokens) == ("cancelled", 0)


def test_a_prompt_longer_than_the_encoder_takes() -> None:
    session = Alone(as_loaded(model("switch_transformers"), context_tokens=10))
    with refused(ErrorCode.PROMPT_TOO_LONG):
        session.generate_from_ids(PROMPT, SamplingParams())
