"""Whole models whose experts are computed by the card's kernels, in slots of an emulated card and out of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("only under Triton's interpreter", allow_module_level=True)

from engine import kernels
from engine.experts.dispatch import BANK_LAYER
from engine.experts.dispatcher import HybridExperts
from engine.kernels.gpu import products
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.gpu.products import TritonProducts
from engine.kernels.gpu.stored import CardKernels
from engine.runtime.loaded_model import LoadedModel
from tests.engine.on_devices import MIB, PROMPT, opened, share_misses
from tests.engine.tiny_families import tiny_checkpoint


@torch.inference_mode()
def logits(model: LoadedModel, tokens: int) -> torch.Tensor:
    result: torch.Tensor = model.model(input_ids=torch.tensor([PROMPT[:tokens]])).logits
    return result.float()


@pytest.mark.parametrize(
    ("family", "precision", "slots"),
    [
        ("qwen3_moe", "int4", 3),
        ("gpt_oss", "int8", 3),
        ("mixtral", "bf16", None),
        ("gpt_oss", "lut4", 3),
        ("qwen3_moe", "fp32", 2),
    ],
)
def test_logits_are_those_of_torch(
    family: str, precision: str, slots: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    share_misses(monkeypatch)
    folder = tiny_checkpoint(family, tmp_path / family)
    options = {"precision": precision, "cache_slots": slots, "vram_bytes": 64 * MIB}
    with opened(folder, **options) as model:
        wanted = [logits(model, tokens) for tokens in (1, 5)]
    triton = TritonProducts()
    monkeypatch.setattr(kernels, "kernels_of", lambda place: CardKernels(triton, triton.most_visits, triton))
    launch, turn = products._launch, threading.Lock()

    def one_at_a_time(*args: Any, **constants: Any) -> None:
        with turn:  # the interpreter knows of one launch only
            launch(*args, **constants)

    monkeypatch.setattr(products, "_launch", one_at_a_time)
    with opened(folder, **options) as model:
        bound = [m.__dict__[BANK_LAYER][1] for m in model.model.modules() if BANK_LAYER in m.__dict__]
        kind = CardExperts if slots is None else HybridExperts
        assert bound
        assert all(isinstance(kernel, kind) for kernel in bound)
        for expected in wanted:
            found = logits(model, expected.shape[1])
            assert torch.cosine_similarity(found, expected, dim=-1).min() > (0.9999 if precision == "fp32" else 0.98)
