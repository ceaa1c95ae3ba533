"""A few tokens of one sequence in one step: bit by bit what single steps give, and taken back without a trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.common.config import EngineConfig, KvPrecision
from engine.kernels.native.build import library_path
from engine.runtime.decode.step_model import MOST_ROWS, StepModel
from engine.runtime.fast_path.decoder_layer import route_in_library
from engine.runtime.kv.layers import new_cache
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

CASES: list[tuple[str, dict[str, Any], Literal["bf16", "int8", "int4"]]] = [
    ("mixtral", {"sliding_window": None}, "bf16"),
    ("mixtral", {"sliding_window": 400}, "int4"),
    ("qwen3_moe", {}, "bf16"),
    ("qwen3_moe", {}, "int4"),
    ("llama", {}, "bf16"),
    ("qwen3", {}, "int8"),
    ("olmoe", {}, "bf16"),
    ("qwen2_moe", {}, "int8"),
    ("deepseek_v2", {}, "bf16"),
    ("deepseek_v3", {}, "int4"),
]
PROMPT = 250
"""The angles of 256 positions are computed together: the steps are on either side of that."""


def _load(
    path: Path, precision: Literal["bf16", "int8", "int4"] = "bf16", kv_precision: KvPrecision = "auto"
) -> LoadedModel:
    config = EngineConfig(str(path), precision=precision, threads=2, kv_precision=kv_precision)
    return load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)


def _same(cache: Any, other: Any) -> bool:
    return all(
        torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values)
        for mine, its in zip(cache.layers, other.layers, strict=True)
    )


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("family", "options", "precision"), CASES)
def test_tokens_together_come_out_as_alone(
    family: str, options: dict[str, Any], precision: Literal["bf16", "int8", "int4"], tmp_path: Path
) -> None:
    _compare(_load(tiny_checkpoint(family, tmp_path, **options), precision))


@pytest.mark.parametrize("kv_precision", ["int8", "fp16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_also_with_narrow_keys_and_values(family: str, kv_precision: KvPrecision, tmp_path: Path) -> None:
    options = {"sliding_window": 400} if family != "qwen3_moe" else {}
    loaded = _load(tiny_checkpoint(family, tmp_path, **options), kv_precision=kv_precision)
    assert family == "mixtral" or loaded.kv_type is not None
    _compare(loaded)


def _compare(loaded: LoadedModel) -> None:
    """Single steps, and several tokens at once after others were tried and taken back."""
    try:
        torch.manual_seed(5)
        tokens = torch.randint(3, loaded.model.config.vocab_size, (1, PROMPT + 32))
        step = StepModel(loaded.model, 512)
        one, several = (new_cache(loaded.model, None, loaded.kv_type) for _ in range(2))
        with torch.inference_mode():
            for cache in (one, several):
                step(tokens[:, :PROMPT], cache, 0)
            at = PROMPT
            for width in (1, 2, 3, 5, MOST_ROWS):
                assert step.takes(width, several)
                assert several is not None
                alone = [step(tokens[:, place : place + 1], one, place)[0][0] for place in range(at, at + width)]
                # What was tried and taken back leaves nothing behind.
                step.several(tokens.flip(1)[:, :width].contiguous(), several, at)
                several.crop(-width)
                together = step.several(tokens[:, at : at + width], several, at)
                assert torch.equal(together, torch.stack(alone))
                assert _same(one, several)
                at += width
    finally:
        loaded.close()


def test_a_window_takes_several_only_until_something_slides_out(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("mixtral", tmp_path, sliding_window=64))
    try:
        step, cache = StepModel(loaded.model, 128), new_cache(loaded.model)
        with torch.inference_mode():
            step(torch.full((1, 60), 5), cache, 0)
        assert step.takes(3, cache)
        assert not step.takes(4, cache)
        assert step.takes(1, cache)
    finally:
        loaded.close()


def test_tokens_go_alone_where_the_library_computes(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("qwen3_moe", tmp_path))
    try:
        step, cache = StepModel(loaded.model, 64), new_cache(loaded.model)
        with torch.inference_mode():
            assert not step.takes(2, None)
            step(torch.tensor([[3, 4, 5]]), cache, 0)
            assert step.takes(2, cache)
            assert not step.takes(MOST_ROWS + 1, cache)
            assert not step.takes(2, copy.deepcopy(cache) if cache is None else _of_library(loaded, step))
            handle = loaded.model.model.layers[0].register_forward_hook(lambda *_: None)
            assert not step.takes(2, cache)
            handle.remove()
            route_in_library(loaded.model)
            assert not step.takes(2, cache)
    finally:
        loaded.close()


def _of_library(loaded: LoadedModel, step: StepModel) -> Any:
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    step(torch.tensor([[3, 4]]), cache, 0)
    return cache
