"""Answers that depend on which tokens are computed together are the library's, whatever came before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DogeConfig, DogeForCausalLM

from engine.checkpoint.catalogue import find_shape
from engine.common.config import SamplingParams
from engine.planner.batch_prediction import JobRows
from engine.runtime.batch.job_plan import plan_rows
from engine.runtime.batch.policy import BatchPolicy, can_pack, why_not_packed
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kv.reuse import exact_tokens, restart_angles
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, as_loaded, library_tokens, opened_model, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone
from tests.engine.tiny_configs import OMNI
from tests.engine.tiny_families import tiny_checkpoint

GREEDY = SamplingParams(max_tokens=8)
DYNAMIC = {
    "max_position_embeddings": 40,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 40,
    }
}
FEW_HEADS = {"index_topk": 8, "index_n_heads": 1}
_OMNI_WINDOW = {**OMNI["text_config"], "sliding_window": 8}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dynamic angles": ("qwen3_moe", DYNAMIC, 40),
    "LongRoPE of a family that keeps earlier angles": ("llama", LONG, 40),
    "deepseek_v32": ("deepseek_v32", FEW_HEADS, 8),
    "glm_moe_dsa": ("glm_moe_dsa", FEW_HEADS, 8),
    "axk2": ("axk2", FEW_HEADS, 8),
    "hy_v4": ("hy_v4", FEW_HEADS, 8),
    "deepseek_v4": ("deepseek_v4", FEW_HEADS, 8),
    "a stray window": ("qwen3_vl_moe", {"text_config": {"sliding_window": 8}}, 8),
    "a window that attention ignores": ("qwen3_omni_moe_thinker", {**OMNI, "text_config": _OMNI_WINDOW}, 8),
    "a stray window of latent attention": ("deepseek_v3", {"sliding_window": 8}, 8),
    "qwen4_exp_text": ("qwen4_exp_text", {"indexer_n_heads": 2, "indexer_budget": 8}, 8),
}


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("case", some(CASES, every=4))
def test_answers_of_a_chat_are_the_librarys_of_each_prompt(case: str) -> None:
    family, overrides, exact = CASES[case]
    model = tiny_loaded(family, **overrides)
    assert exact_tokens(model.model) == exact
    _assert_chat_is_exact(model)


@pytest.mark.parametrize("window", [None, 8])
def test_doge_reads_every_prompt_at_once(window: int | None) -> None:
    """Its experts mix the routing of all tokens of a forward; with a window a snapshot would cut the prompt in two."""
    _assert_chat_is_exact(as_loaded(_doge(is_moe=True, sliding_window=window)))


def test_doge_without_experts_is_like_other_models() -> None:
    model = as_loaded(_doge(is_moe=False, sliding_window=None))
    assert _assert_chat_is_exact(model) > 0


def test_many_index_heads_do_not_tie_and_their_cache_is_reused() -> None:
    model = tiny_loaded("deepseek_v32", index_topk=8, index_n_heads=64)
    assert _assert_chat_is_exact(model) > 0


def test_a_dynamic_context_grows_and_the_user_is_told(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, **DYNAMIC)
    with opened_model(tmp_path, "fp32") as model:
        assert model.context_tokens == 160
        assert "40" in model.info.device_note
        assert "160" in model.info.device_note
        prompt = random_prompt(100)
        answer = Alone(model).generate_from_ids(prompt, GREEDY, end_ids=NO_END)
        restart_angles(model.model)
        assert answer.token_ids == tuple(library_tokens(model.model, prompt, 8))
        assert StepModel(model.model, 160).why_not_repeated
        assert not StepModel(model.model, 40).why_not_repeated
        for length, together in ((20, 30), (60, 1)):  # as they will be answered
            planned = plan_rows(JobRows(30, length, 8), model, find_shape(str(tmp_path))).prediction
            assert planned is not None
            assert planned.batch_rows == together
    with opened_model(tmp_path, "fp32", context_tokens=40) as model:
        assert model.info.device_note == ""


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_rows_share_sweeps_while_angles_do_not_depend_on_their_lengths(family: str) -> None:
    loaded, found = tiny_loaded(family, **(DYNAMIC if family == "qwen3_moe" else LONG)), dict[int, GenerationResult]()
    lengths = [9, 30, 20, 60, 12, 36, 9, 15]
    rows = [
        BatchRequest(row, ids=tuple(random_prompt(each, seed=row)), sampling=GREEDY, end_ids=NO_END)
        for row, each in enumerate(lengths)
    ]
    executor = BatchExecutor(loaded, BatchPolicy(rows=8, kv_bytes=2**22))
    assert "longer than 40 tokens" in executor.note
    assert family not in executor.note
    assert executor._batch is not None
    executor.run(iter(rows), lambda answer: found.__setitem__(answer.row, answer))
    assert executor._batch.turns < 40  # of 64 tokens and 8 prompts, those of two rows by themselves
    executor.close()
    for row in rows:
        restart_angles(loaded.model)
        assert found[row.row].token_ids == tuple(library_tokens(loaded.model, row.ids, 8)), row.row


def test_what_never_shares_sweeps_is_named() -> None:
    assert "doge" in why_not_packed(tiny_loaded("doge").model)


def test_what_hunyuan_calls_dynamic_has_fixed_angles_and_packs() -> None:
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}
    model = tiny_loaded("hunyuan_v1_moe", rope_parameters=rope).model
    assert can_pack(model)
    assert exact_tokens(model) > 256


def _assert_chat_is_exact(model: LoadedModel) -> int:
    """Prompts that grow, shrink and follow answers, in pieces; returns how many tokens were reused."""
    model = replace(model, chunk_tokens=16)
    session, base, reused = Alone(model), random_prompt(100, seed=5), 0
    for length in (5, 36, 70, 20):
        prompt = base[:length]
        for _ in range(2):
            answer = session.generate_from_ids(prompt, GREEDY, end_ids=NO_END)
            reused += answer.reused_tokens
            restart_angles(model.model)  # the library would go on with those of the longest answer so far
            assert answer.token_ids == tuple(library_tokens(model.model, prompt, 8)), length
            prompt = [*prompt, *answer.token_ids, 7, 8, 9]
    return reused


def _doge(**options: Any) -> Any:
    config = DogeConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = DogeForCausalLM(config).eval()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(20)
    return model
