"""What one token adds to the cache, from the configuration alone, against the cache of the model itself; and what a
sequence takes of a pool of pages, states and windows, as the planner counts it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.config_file import text_part
from engine.checkpoint.model_shape import read_model
from engine.checkpoint.profile import KvOfModel, kv_of_model
from engine.common.config import SamplingParams
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy, why_not_packed
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.library_caches import cache_bytes, measure_kv
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, as_loaded, opened_model, random_prompt
from tests.engine.single_streams import Alone
from tests.engine.tiny_configs import ADAPTED, FAMILIES
from tests.engine.tiny_families import tiny_checkpoint, tiny_model

_ODD = (
    "deepseek_v4", "gemma4_text", "inkling_text", "jamba", "mimo_v2_flash", "minimax_m3_vl_text", "nemotron_h",
    "longcat_flash",
)  # fmt: skip
"""Families that keep more or less than two numbers for each head and layer."""
_KEPT_OTHERWISE = ("inkling_text", "inkling_mm_model", "zaya", "jetmoe")
"""Rows have caches of their own, beside pages that only count tokens; pages of the last one hold heads that repeat."""


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
        cost, _ = measure_kv(model, torch.device("cpu"))
        for tokens in (1, 2, 17, 120, 250):
            cache = library_cache(model)
            held = model(input_ids=torch.ones(1, tokens, dtype=torch.long), cache=cache).cache
            assert cache_bytes(held) <= cost.fixed + 256 * cost.per_token


def test_the_compression_of_a_published_model_is_known() -> None:
    """Of DeepSeek-V4-Flash: 7.4 KB for a token, and not 44."""
    shape = {"model_type": "deepseek_v4", "head_dim": 512, "index_head_dim": 128, "sliding_window": 128}
    shape |= {"num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1}
    found = kv_of_model({**shape, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]})
    assert 2 * found.numbers == 7360
    assert found.window_tokens == 128
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
    named = {"layer_types": ["sliding_attention"] * 2 + kinds + kinds[:1]}
    assert kv_of_model({**shape, **named}) == found


def test_a_card_that_cannot_hold_the_caches_state_is_not_used(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 72, "head_dim": 64, "max_position_embeddings": 1024, "sliding_window": 128}
    shape |= {"num_hidden_layers": 2, "layer_types": ["heavily_compressed_attention"] * 2, "o_lora_rank": 1024}
    shape |= {"o_groups": 8, "mlp_layer_types": ["hash_moe"] * 2, "compress_rates": None, "partial_rotary_factor": None}
    tiny_checkpoint("deepseek_v4", tmp_path, **shape)
    for budget in (4_089_000, 4_092_000):  # once it was loaded with less, and long prompts were refused
        with opened_model(tmp_path, "bf16", device="emulated:laptop-4gb", vram_bytes=budget) as model:
            assert (model.devices is None) == (budget == 4_089_000)
            session = Alone(model)
            prompt = random_prompt(model.context_tokens - 20)
            answer = session.generate_from_ids(prompt, SamplingParams(max_tokens=4), end_ids=NO_END)
            assert answer.generated_tokens == 4
            session.clear()


def assert_counted(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        held, _ = measure_kv(model, torch.device("cpu"))
    found = kv_of_model(text_part(model.config.to_dict()))
    assert found.numbers * 4 == held.per_token
    assert not found.compresses or held.fixed == found.fixed_bytes(4)
    is_expanded = bool(text_part(model.config.to_dict()).get("kv_lora_rank"))  # without native steps
    if family not in _KEPT_OTHERWISE and not is_expanded and not why_not_packed(model):
        assert_as_in_the_pool(as_loaded(model, context_tokens=4096), found)


def assert_as_in_the_pool(loaded: LoadedModel, planned: KvOfModel) -> None:
    """What is planned for sequences of any length is what they take of a pool."""
    policy = BatchPolicy(kv_bytes=2**24)
    try:
        lane = ContinuousBatch(PackedModel(loaded, policy), policy)
    except LookupError:
        return  # it is not answered over pages
    shape = replace(
        read_model("olmoe-1b-7b"),
        kv_numbers=2 * planned.numbers,  # here a number takes four bytes and not two
        window_numbers=2 * planned.window_numbers,
        window_tokens=planned.window_tokens,
        state_bytes=planned.state_bytes,
        compresses=planned.compresses,
    )
    pool, unit = lane.pool, lane.model.page_bytes
    assert pool.state_weight == -(-planned.state_bytes // unit)
    assert (pool.windows > 0) == (planned.compresses or 0 < planned.window_numbers < planned.numbers)
    rounded = 2 * (pool.state_weight * unit - planned.state_bytes)
    for tokens in (1, 33, 100, 1000, 4000):
        taken = pool.needs(tokens, lane._kind, reads=False) * unit
        assert shape.context_bytes(tokens, in_pages=True) + rounded == taken
    lane.free()
