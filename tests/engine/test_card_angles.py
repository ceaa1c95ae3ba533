"""Angles of positions by the kernel in CUDA C on an emulated card: what modules give, or modules left alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cuda import driver
from engine.kernels.gpu import angles
from engine.kernels.gpu.angles import CardAngles, CudaAngles, speed_up_angles
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.tiny_families import tiny_model

pytestmark = needs_compiler
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}


@settings(max_examples=20)
@given(
    dtype=st.sampled_from(list(STEP)),
    positions=st.lists(st.integers(0, 1_000_000), min_size=1, max_size=8),
    pairs=st.integers(1, 200),
    times=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_cosines_and_sines(dtype: torch.dtype, positions: list[int], pairs: int, times: int, seed: int) -> None:
    frequencies = torch.rand(pairs, generator=torch.Generator().manual_seed(seed))
    rows, kernel = torch.tensor(positions), CudaAngles(EmulatedCudaCard(4))
    meant = (rows[:, None].float() * frequencies).double().repeat(1, times)
    found = kernel(rows, frequencies, 1.25, dtype, times)
    for mine, wanted in zip(found, (meant.cos(), meant.sin()), strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - 1.25 * wanted).abs().max() <= 1.25 * STEP[dtype] + 1e-6
    turned = kernel.turned(rows, frequencies, 1.25)
    assert torch.equal(torch.view_as_real(turned), torch.stack(kernel(rows, frequencies, 1.25, torch.float32, 1), -1))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    found = EmulatedCudaCard(8)
    monkeypatch.setattr(angles, "on_card", lambda device, make: make(found))
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2", "hunyuan_v1_moe"])
@pytest.mark.parametrize("dtype", list(STEP))
def test_a_familys_module_gives_the_same(family: str, dtype: torch.dtype, card: EmulatedCudaCard) -> None:
    module = tiny_model(family).get_decoder().rotary_emb
    plain = module.forward
    assert speed_up_angles(module, dtype)
    assert isinstance(module.forward, CardAngles)
    for shape, launches in (((1, 1), 1), ((1, 8), 1), ((8, 1), 1), ((1, 17), 0)):
        x, positions = torch.zeros(*shape, 4, dtype=dtype), torch.randint(0, 4000, shape)
        card.launched.clear()
        found, wanted = module(x, positions), plain(x, positions)
        assert len(card.launched) == launches
        pairs = [(found, wanted)] if isinstance(wanted, torch.Tensor) else zip(found, wanted, strict=True)
        for mine, its in pairs:
            assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
            torch.testing.assert_close(mine, its, rtol=2 * STEP[dtype], atol=2 * STEP[dtype])


def test_angles_that_change_with_the_context_and_kernels_that_compute_wrongly_change_nothing(
    card: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not speed_up_angles(tiny_model("qwen3_moe", rope_parameters=rope).model.rotary_emb, torch.bfloat16)
    module = tiny_model("qwen3_moe").model.rotary_emb
    right = CudaAngles._launch

    def wrong(self: CudaAngles, positions: torch.Tensor, *more: object, **named: object) -> None:
        right(self, positions + 1, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaAngles, "_launch", wrong)
    assert not speed_up_angles(module, torch.bfloat16)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(CudaAngles, "_launch", fails)
    assert not speed_up_angles(module, torch.float32)
    assert not speed_up_angles(torch.nn.Identity(), torch.float32)
    assert driver.card_of(torch.device("cpu")) is None
