"""Keys and values in int8 and fp16: what a layer holds, and what answers lose by it."""

from pathlib import Path

import pytest
import torch

from engine.common.config import KvPrecision, SamplingParams
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import KvType
from tests.engine.loaded_tiny import open_model, opened_model
from tests.engine.single_streams import Alone, PagedSequence
from tests.engine.tiny_families import tiny_checkpoint

needs_kernels = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")
_LARGE = {"head_dim": 64, "num_key_value_heads": 2}


@pytest.mark.takes_turns(3)
@needs_kernels
@pytest.mark.parametrize(("kv_precision", "most"), [("fp16", 0.01), ("int8", 0.03)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama"])
def test_logits_lose_little(family: str, kv_precision: KvPrecision, most: float, tmp_path: Path) -> None:
    with opened_model(tiny_checkpoint(family, tmp_path, **_LARGE), threads=2, kv_precision=kv_precision) as loaded:
        assert loaded.kv_type is KvType[kv_precision.upper()]
        torch.manual_seed(5)
        tokens = torch.randint(3, loaded.model.config.vocab_size, (1, 120))
        sequences = PagedSequence(loaded.model, kv_type=loaded.kv_type), PagedSequence(loaded.model)
        far = []
        with torch.inference_mode():
            for start, end in [(0, 7), *((at, at + 1) for at in range(7, 120))]:
                got, wanted = (each.logits(loaded.model, tokens[:, start:end]) for each in sequences)
                far.append(float((got.float() - wanted.float()).norm() / wanted.float().norm()))
        assert sorted(far)[len(far) // 2] < most


@needs_kernels
def test_a_chat_with_int8_goes_on_and_takes_about_half(tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3_moe", tmp_path, **_LARGE)
    held: dict[KvPrecision, int] = {}
    choices: tuple[KvPrecision, ...] = ("auto", "int8")
    for kv_precision in choices:
        loaded = open_model(path, threads=2, kv_precision=kv_precision)
        session = Alone(loaded)
        try:
            for beams in (1, 2):
                asked = SamplingParams(max_tokens=12, beams=beams)
                answer = session.generate_from_ids(list(range(5, 45)), asked, end_ids=frozenset())
                assert len(answer.token_ids) == 12
            held[kv_precision] = loaded.info.kv_bytes_per_token
        finally:
            loaded.close()
    assert held["int8"] * 2 * 64 == held["auto"] * (64 + 4)


@needs_kernels
def test_a_model_that_cannot_keeps_its_own_and_says_so(tmp_path: Path) -> None:
    with opened_model(tiny_checkpoint("deepseek_v2", tmp_path), threads=2, kv_precision="int8") as loaded:
        assert loaded.kv_type is None
        assert "Chats hold keys and values in the model's own type" in loaded.info.device_note
