"""Models on a real card, with some of their experts or all of them there: the answers are transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.on_devices import PROMPT, answer, chatting, opened, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.mark.parametrize(
    "config",
    [
        {"vram_bytes": 512 * MIB},  # all of it
        {"cache_slots": 5},
        {"cache_slots": 5, "misses": "cpu"},
        {"cache_slots": 5, "misses": "fetch"},
        {"cache_slots": 0, "misses": "off"},
        {"misses": "layer"},
        {"cache_slots": 5, "ram_bytes": 3 * 2**30},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(family: str, config: dict[str, Any], folder: Path) -> None:
    expected = reference(family, folder)
    with (
        opened(expected.folder, device="cuda:0", **{"vram_bytes": 512 * MIB, **config}) as model,
        chatting(model) as chat,
    ):
        assert model.devices is not None, model.info.device_note
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([PROMPT], device=model.device)).logits
        torch.testing.assert_close(logits.cpu(), expected.logits, rtol=0, atol=1e-4)
        assert list(answer(chat, PROMPT).token_ids) == expected.first
        assert list(answer(chat, expected.second_prompt).token_ids) == expected.second


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_over_all_cards(folder: Path) -> None:
    expected = reference("mixtral", folder)
    with opened(expected.folder, device="cuda", vram_bytes=512 * MIB, cache_slots=3) as model, chatting(model) as chat:
        assert model.devices is not None
        assert len({str(parameter.device) for parameter in model.model.parameters()}) > 1
        assert list(answer(chat, PROMPT).token_ids) == expected.first
