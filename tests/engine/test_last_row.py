"""A prompt's last layer computes its last token alone: the logits and what follows are as if it computed them all."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.kernels.native.build import library_path
from engine.runtime.decode.step_model import StepModel
from tests.engine.loaded_tiny import open_model
from tests.engine.single_streams import PagedSequence
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

_LARGER: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4}
_LARGER_LATENT = {"head_dim": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 72, "kv_lora_rank": 136}


@pytest.mark.parametrize("precision", ["bf16", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_a_prompt_is_read_as_by_a_whole_last_layer(
    family: str, precision: Literal["bf16", "int4"], tmp_path: Path
) -> None:
    options = {**_LARGER, **(_LARGER_LATENT if family == "deepseek_v3" else {})}
    loaded = open_model(tiny_checkpoint(family, tmp_path, **options), precision, threads=2)
    rows: list[int] = []
    try:
        model = loaded.model
        torch.manual_seed(3)
        tokens = torch.randint(3, model.config.vocab_size, (1, 45))
        step, one, other = StepModel(model, 64), PagedSequence(model), PagedSequence(model)
        layer = model.model.layers[-1]
        layer.register_forward_hook(lambda _module, _args, out: rows.append(out.shape[1]))
        far = []
        with torch.inference_mode():
            for start, end in [(0, 20), (20, 40), *((at, at + 1) for at in range(40, 45))]:
                got, _ = step(tokens[:, start:end], one.next(end - start), start)
                whole = other.logits(model, tokens[:, start:end])
                far.append(float((got.float() - whole.float()).norm() / whole.float().norm()))
        assert rows == [1, 20, 1, 20, *([1, 1] * 5)]
        assert sorted(far)[len(far) // 2] < (0.02 if precision == "bf16" else 0.05)
    finally:
        loaded.close()


def test_who_listens_to_hidden_states_hears_all_of_them(tmp_path: Path) -> None:
    loaded = open_model(tiny_checkpoint("qwen3_moe", tmp_path), threads=2)
    heard: list[int] = []
    try:
        handle = loaded.model.model.norm.register_forward_hook(lambda _m, _a, out: heard.append(out.shape[1]))
        step = StepModel(loaded.model, 64)
        with torch.inference_mode():
            sequence = PagedSequence(loaded.model)
            heard.clear()
            step(torch.arange(5, 25)[None], sequence.next(20), 0)
            handle.remove()
            step(torch.tensor([[5]]), sequence.next(1), 20)
        assert heard == [20]
    finally:
        loaded.close()
