"""What one token adds to the cache, from the configuration alone, against the cache of the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config_file import text_part
from engine.checkpoint.profile import kv_elements_per_token
from engine.common.config import SamplingParams
from engine.runtime.kv.layers import new_cache
from engine.runtime.kv.memory import cache_layer_bytes, measure_kv
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.test_family_parity import loaded
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_checkpoint, tiny_model

_ODD = (
    "deepseek_v4", "gemma4_text", "inkling_text", "jamba", "mimo_v2_flash", "minimax_m3_vl_text", "nemotron_h",
    "longcat_flash",
)  # fmt: skip
"""Families that keep more or less than two numbers for each head and layer."""


@pytest.mark.parametrize("family", _ODD)
def test_families_with_caches_of_their_own(family: str) -> None:
    assert_counted(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", some(sorted({*FAMILIES, *ADAPTED} - set(_ODD)), first=4))
def test_every_other_family(family: str) -> None:
    assert_counted(family)


@pytest.mark.parametrize("family", ["deepseek_v4", "nemotron_h", "qwen3_next", "qwen4_exp_text", "minimax", "mixtral"])
def test_what_a_cache_is_expected_to_take_is_never_less_than_it_takes(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        cost = measure_kv(model, torch.device("cpu"))
        for tokens in (1, 2, 17, 120, 250):
            cache = new_cache(model, 256)
            held = model(input_ids=torch.ones(1, tokens, dtype=torch.long), cache=cache).cache
            assert sum(cache_layer_bytes(held)) <= cost.fixed + 256 * cost.per_token


def test_a_card_that_cannot_hold_the_caches_state_is_not_used(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 72, "head_dim": 64, "max_position_embeddings": 1024, "sliding_window": 128}
    tiny_checkpoint("deepseek_v4", tmp_path, **shape)
    for budget in (3_961_000, 4_060_000):  # once it was loaded with the first, and long prompts were refused
        with loaded(tmp_path, "bf16", device="emulated:laptop-4gb", vram_bytes=budget) as model:
            assert (model.devices is None) == (budget == 3_961_000)
            session = Alone(model)
            prompt = random_prompt(model.context_tokens - 20)
            answer = session.generate_from_ids(prompt, SamplingParams(max_tokens=4), end_ids=NO_END)
            assert answer.generated_tokens == 4
            session.clear()


def assert_counted(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        held = measure_kv(model, torch.device("cpu")).per_token
    assert kv_elements_per_token(text_part(model.config.to_dict())) * 4 == held
