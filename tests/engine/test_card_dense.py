"""int8 and int4 linear layers as a card holds them: what is counted, what comes out, and where everything else goes."""

from pathlib import Path

import pytest
import torch

from engine.devices.memory_budget import MemoryCategory
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.native import linear
from engine.kernels.native.linear import formats_of_linears
from engine.runtime.loaded_model import LoadedModel
from tests.engine.on_devices import MIB, PROMPT, memory_use, opened
from tests.engine.tiny_families import tiny_checkpoint

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(autouse=True)
def as_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device is taken for one that holds linear layers quantised; tiny layers are taken for large ones."""
    monkeypatch.setattr("engine.runtime.load.forms.is_held_quantised", lambda place: True)
    monkeypatch.setattr(linear, "SMALLEST", 256)
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")


@torch.inference_mode()
def logits(model: LoadedModel) -> torch.Tensor:
    result: torch.Tensor = model.model(input_ids=torch.tensor([PROMPT])).logits
    return result.float()


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_is_what_is_held(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    found, counted = {}, {}
    for precision in ("bf16", "int8", "int4"):
        with opened(folder, precision=precision, vram_bytes=64 * MIB) as model:
            assert model.devices is not None
            counted[precision] = memory_use(model)[0].by_category[MemoryCategory.WEIGHTS]
            unique = {tensor.data_ptr(): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
            held = sum(tensor.nbytes for tensor in unique.values())
            layers = sum(isinstance(m.__dict__.get("forward"), CardLinear) for m in model.model.modules())
            assert (layers > 0) == (precision != "bf16")
            # A record is aligned, and buffers that the library makes at the end are not known before.
            assert abs(counted[precision] - held) <= 256 * (layers + 4)
            found[precision] = logits(model)
            assert model.info.precision == precision
    assert counted["int8"] < counted["bf16"]
    for precision, least in (("int8", 0.99), ("int4", 0.7)):
        assert torch.cosine_similarity(found[precision], found["bf16"], dim=-1).mean() > least


def test_over_two_devices(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "two")
    with opened(folder, precision="int8", vram_bytes=64 * MIB) as model:
        wanted = logits(model)
    with opened(folder, 2, precision="int8", vram_bytes=64 * MIB, cache_slots=3) as model:
        torch.testing.assert_close(logits(model), wanted, rtol=0.05, atol=0.05)


def test_all_experts_over_two_devices(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path / "all")
    with opened(folder, precision="int8", vram_bytes=64 * MIB) as model:
        wanted, whole = logits(model), memory_use(model)[0].by_category[MemoryCategory.EXPERTS]
    with opened(folder, 2, precision="int8", vram_bytes=64 * MIB) as model:
        assert not model.devices.experts.all_caches
        held = [use.by_category[MemoryCategory.EXPERTS] for use in memory_use(model)]
        assert min(held) > 0
        assert sum(held) == whole
        torch.testing.assert_close(logits(model), wanted, rtol=0.05, atol=0.05)


def test_sizes_of_a_tied_head(tmp_path: Path) -> None:
    model = torch.nn.Module()
    head, embedding = torch.nn.Linear(64, 320, bias=False), torch.nn.Embedding(320, 64)
    head.weight = embedding.weight = torch.nn.Parameter(torch.zeros(320, 64, dtype=torch.bfloat16))
    model.head, model.embedding = head, embedding
    model.get_output_embeddings, model.get_input_embeddings = lambda: head, lambda: embedding
    sizes = dense.quantised_sizes(model, formats_of_linears(model, "int4"), {"embedding.weight": 320 * 64 * 2})
    # The embedding stays, and the head, never less than int8, comes on top.
    assert sizes == {"embedding.weight": 320 * 64 * 2, "head.tiles": 320 * 64 + 320 * 2 * 2}
