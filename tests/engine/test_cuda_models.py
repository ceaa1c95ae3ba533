"""Whole models whose experts are computed by the kernels in CUDA C, in slots of an emulated card and out of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import kernels
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.kernels.gpu import linear as dense
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.linear import CardLinear
from engine.kernels.native import linear as native_linear
from engine.runtime.loaded_model import LoadedModel
from tests.engine.emulated_cuda_card import emulated_kernels, needs_compiler
from tests.engine.on_devices import MIB, PROMPT, opened, share_misses
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = needs_compiler


@torch.inference_mode()
def logits(model: LoadedModel, tokens: int) -> torch.Tensor:
    result: torch.Tensor = model.model(input_ids=torch.tensor([PROMPT[:tokens]])).logits
    return result.float()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "precision", "slots"),
    [("qwen3_moe", "int4", 3), ("mixtral", "bf16", None), ("gpt_oss", "lut4", 3), ("gpt_oss", "int8", None)],
)
def test_logits_are_those_of_torch(
    family: str, precision: str, slots: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    share_misses(monkeypatch)
    # The emulated device is taken for one that holds linear layers quantised; tiny layers are taken for large ones.
    monkeypatch.setattr("engine.runtime.load.forms.is_held_quantised", lambda place: True)
    monkeypatch.setattr(native_linear, "SMALLEST", 256)
    folder = tiny_checkpoint(family, tmp_path / family)
    options = {"precision": precision, "cache_slots": slots, "vram_bytes": 64 * MIB}
    with opened(folder, **options) as model:
        wanted = [logits(model, tokens) for tokens in (1, 5)]
    found_here = replace(emulated_kernels(), most_few=4)  # five tokens have more visits
    monkeypatch.setattr(kernels, "kernels_of", lambda place: found_here)
    monkeypatch.setattr(dense, "kernels_of", lambda place: found_here)
    with opened(folder, **options) as model:
        bound = [m.__dict__[BANK_LAYER][1] for m in model.model.modules() if BANK_LAYER in m.__dict__]
        assert bound
        assert all(isinstance(kernel, CardExperts if slots is None else HybridExperts) for kernel in bound)
        linear = [m for m in model.model.modules() if isinstance(m.__dict__.get("forward"), CardLinear)]
        assert bool(linear) == (precision != "bf16")
        for expected in wanted:
            found = logits(model, expected.shape[1])
            assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.98
