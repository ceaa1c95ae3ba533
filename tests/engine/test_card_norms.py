"""Norms by the kernel in CUDA C on an emulated card: what modules give, and modules left alone where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.cuda import driver
from engine.kernels.gpu import norms
from engine.kernels.gpu.norms import CardNorm, CudaNorm, speed_up_norms
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.on_devices import PROMPT, answer, chatting, opened, reference

pytestmark = needs_compiler


class _RMSNorm(torch.nn.Module):
    """As families write it, by how they round and what they add."""

    def __init__(self, width: int, dtype: torch.dtype, *, offset: float = 0.0, rounds_once: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width).to(dtype))
        self.variance_epsilon, self.offset, self.rounds_once = 1e-6, offset, rounds_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.rounds_once:
            return ((self.weight.float() + self.offset) * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class _OtherRMSNorm(_RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    found = EmulatedCudaCard(8)
    monkeypatch.setattr(norms, "on_card", lambda device, make: make(found))
    return found


FORMS: list[dict[str, Any]] = [{}, {"rounds_once": True}, {"rounds_once": True, "offset": 1.0}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_norm_gives_what_its_module_gives(dtype: torch.dtype, form: dict[str, Any], card: EmulatedCudaCard) -> None:
    torch.manual_seed(2)
    for width in (1, 33, 128, 515):
        module = _RMSNorm(width, dtype, **form).requires_grad_(False)
        plain = module.forward
        assert speed_up_norms(module) == 1
        assert isinstance(module.__dict__["forward"], CardNorm)
        for rows in (*range(1, 9), 0):
            x = torch.randn(1, rows, 2, width).to(dtype).transpose(1, 2)
            torch.testing.assert_close(module(x), plain(x), rtol=0.01, atol=1e-5)


class _PlainRMSNorm(torch.nn.Module):
    """One without a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.with_scale = 1e-6, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + self.eps, -0.5)).type_as(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_without_a_weight(dtype: torch.dtype, card: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    beside = torch.nn.Linear(2, 2, dtype=dtype)
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"norm": _PlainRMSNorm(), "linear": beside})})
    norm = model["layer"]["norm"]
    plain = norm.forward
    assert speed_up_norms(model) == 1
    for width in (1, 33, 515):
        for rows in range(1, 9):
            x = torch.randn(1, rows, 2, width).to(dtype).transpose(1, 2)
            torch.testing.assert_close(norm(x), plain(x), rtol=0.01, atol=1e-5)
    card.launched.clear()
    other = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(norm(other), plain(other))
    assert not card.launched
    right = CudaNorm.__call__
    monkeypatch.setattr(CudaNorm, "__call__", lambda *args, **more: right(*args, **more) * 1.1)
    assert speed_up_norms(torch.nn.ModuleDict({"norm": _PlainRMSNorm(), "linear": beside})) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_with_a_multiple(dtype: torch.dtype, card: EmulatedCudaCard) -> None:
    torch.manual_seed(4)
    for width in (1, 33, 515):
        module = _RMSNorm(width, dtype).requires_grad_(False)
        plain = module.forward
        assert speed_up_norms(module) == 1
        for rows in range(1, 9):
            x, more = (torch.randn(1, rows, width).to(dtype) for _ in range(2))
            both = module.forward.add(x, more, 0.22)
            assert torch.equal(both, x + more * 0.22)
            torch.testing.assert_close(module(both), plain(both), rtol=0.01, atol=1e-5)


def test_a_norm_of_another_kind_and_a_kernel_that_computes_wrongly_change_nothing(
    card: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _OtherRMSNorm(64, torch.bfloat16).requires_grad_(False)
    assert speed_up_norms(module) == 0
    assert speed_up_norms(torch.nn.LayerNorm(64)) == 0
    right = CudaNorm.__call__
    monkeypatch.setattr(CudaNorm, "__call__", lambda *args, **more: right(*args, **more) * 1.1)
    assert speed_up_norms(_RMSNorm(64, torch.bfloat16).requires_grad_(False)) == 0

    def fails(*args: object, **more: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(CudaNorm, "__call__", fails)
    assert speed_up_norms(_RMSNorm(64, torch.bfloat16).requires_grad_(False)) == 0


def test_without_a_card_modules_stay_as_they_are() -> None:
    assert driver.card_of(torch.device("cpu")) is None
    assert speed_up_norms(_RMSNorm(64, torch.bfloat16)) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, card: EmulatedCudaCard) -> None:
    expected = reference(family, tmp_path)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        replaced = [m for m in model.model.modules() if isinstance(m.__dict__.get("forward"), CardNorm)]
        assert len(replaced) == sum(type(m).__name__.endswith("RMSNorm") for m in model.model.modules()) > 0
        assert list(answer(session, PROMPT).token_ids) == expected.first
    reference.cache_clear()
