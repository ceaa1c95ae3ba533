"""A few tokens of one sequence in one step: bit by bit what single steps give, and taken back without a trace."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.common.config import KvPrecision
from engine.kernels.native.build import library_path
from engine.runtime.decode.step_model import MOST_ROWS, StepModel, TokenStep
from engine.runtime.fast_path.decoder_layer import route_in_library
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import open_model, opened_model
from tests.engine.single_streams import PagedSequence
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


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("family", "options", "precision"), CASES)
def test_tokens_together_come_out_as_alone(
    family: str, options: dict[str, Any], precision: Literal["bf16", "int8", "int4"], tmp_path: Path
) -> None:
    _compare(open_model(tiny_checkpoint(family, tmp_path, **options), precision, threads=2))


@pytest.mark.parametrize("kv_precision", ["int8", "fp16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_also_with_narrow_keys_and_values(family: str, kv_precision: KvPrecision, tmp_path: Path) -> None:
    options = {"sliding_window": None} if family == "mixtral" else {}
    loaded = open_model(tiny_checkpoint(family, tmp_path, **options), threads=2, kv_precision=kv_precision)
    assert loaded.kv_type is not None
    _compare(loaded)


def _compare(loaded: LoadedModel) -> None:
    """Single steps, and several tokens at once after others were tried and taken back."""
    try:
        torch.manual_seed(5)
        tokens = torch.randint(3, loaded.model.config.vocab_size, (1, PROMPT + 32))
        reader, step = StepModel(loaded.model, 512), TokenStep.of(loaded.model)
        assert step is not None
        one, several = (PagedSequence(loaded.model, 512, loaded.kv_type) for _ in range(2))
        with torch.inference_mode():
            for each in (one, several):
                reader(tokens[:, :PROMPT], each.next(PROMPT), 0)
            at = PROMPT
            for width in (1, 2, 3, 5, MOST_ROWS):
                assert step.takes_rows(width)
                alone = [one.rows(step, tokens[0, place : place + 1])[0] for place in range(at, at + width)]
                # What was tried and did not come true leaves nothing behind.
                several.rows(step, tokens.flip(1)[0, :width])
                several.held -= width
                together = several.rows(step, tokens[0, at : at + width])
                assert torch.equal(together, torch.stack(alone))
                assert all(map(torch.equal, one.parts(), several.parts()))
                at += width
    finally:
        loaded.close()


def test_tokens_go_alone_where_the_library_computes(tmp_path: Path) -> None:
    with opened_model(tiny_checkpoint("qwen3_moe", tmp_path), threads=2) as loaded:
        step = TokenStep.of(loaded.model)
        assert step.takes_rows(MOST_ROWS)
        assert not step.takes_rows(MOST_ROWS + 1)
        handle = loaded.model.model.layers[0].register_forward_hook(lambda *_: None)
        assert not step.takes_rows(1)  # whoever listens to layers is to hear them
        handle.remove()
        route_in_library(loaded.model)
        assert step.takes_rows(1)
        assert not step.takes_rows(2)
