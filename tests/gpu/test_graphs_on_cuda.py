"""Decode steps repeated as graphs on a real card: tokens are those of transformers, and memory is counted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.devices.card import open_card
from engine.devices.cuda import CUDA
from engine.devices.memory_budget import MemoryCategory
from tests.engine.graph_cases import FAMILIES, check_conversation, graphs_of, step_of
from tests.engine.on_devices import MIB, PROMPT, answer, chatting, memory_use, opened, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize("config", [{}, {"cache_slots": 4}, {"cache_slots": 4, "misses": "fetch"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, config: dict[str, Any], folder: Path) -> None:
    check_conversation(family, folder, device="cuda:0", vram_bytes=512 * MIB, **config)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_with_all_experts_on_the_card_a_step_is_one_graph(family: str, folder: Path) -> None:
    expected = reference(family, folder)
    with (
        opened(expected.folder, device="cuda:0", vram_bytes=512 * MIB, precision="bf16") as model,
        chatting(model) as chat,
    ):
        answer(chat, PROMPT)
        graphs = graphs_of(chat)
        assert graphs.refused is None
        assert step_of(graphs).pieces == 1


def test_what_graphs_hold_is_counted_and_given_back(folder: Path) -> None:
    expected = reference("qwen3_moe", folder)
    with (
        opened(expected.folder, device="cuda:0", vram_bytes=512 * MIB, cache_slots=4) as model,
        chatting(model) as chat,
    ):
        answer(chat, PROMPT)
        step = step_of(graphs := graphs_of(chat))
        assert step.nbytes > 0
        assert memory_use(model)[0].by_category[MemoryCategory.ACTIVATIONS] >= step.nbytes
        chat.clear()
        assert not graphs._kinds


def test_a_capture_that_fails_leaves_the_card_as_it_was() -> None:
    with open_card(CUDA, vram_bytes=64 * MIB) as device:
        assert device.new_capture is not None
        x = torch.ones(8, device=device.torch_device)
        capture = device.new_capture()
        capture.begin()
        with pytest.raises(RuntimeError):
            x.sum().item()
        capture.abandon()
        assert float((x * 2).sum()) == 16
        again = device.new_capture()
        again.begin()
        y = x * 3
        graph = again.end()
        x.fill_(2)
        graph.replay()
        assert y.tolist() == [6.0] * 8
        again.close()
        capture.close()
