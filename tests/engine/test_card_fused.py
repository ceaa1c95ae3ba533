"""Sums, rotations, norms, angles and routers by kernels on an emulated card: as modules give, or left alone."""

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from engine.kernels.cuda import driver
from engine.kernels.gpu import rotations
from engine.kernels.gpu.latents import CardLatents
from engine.kernels.gpu.modules import (
    CardAngles,
    CardLayer,
    CardNorm,
    CudaAngles,
    CudaNorm,
    speed_up_angles,
    speed_up_norms,
)
from engine.kernels.gpu.rotations import CudaRotary, HeadNorms, RotaryForm
from engine.kernels.gpu.routers import CardRouter, CudaRouter, Routing
from engine.runtime.load.binding import speed_up_on_cards
from tests.combinations import some
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.on_devices import PROMPT, answer, chatting, opened, reference
from tests.engine.tiny_families import tiny_model

pytestmark = needs_compiler
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUGH = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    found = EmulatedCudaCard(8)
    monkeypatch.setattr(driver, "card_of", lambda device: found)
    return found


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    angle_dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 8),
    heads=st.tuples(st.integers(1, 6), st.integers(1, 3)),
    half=st.integers(1, 40),
    passed=st.integers(0, 9),
    form=st.builds(RotaryForm, st.booleans(), st.integers(1, 2), st.integers(1, 2), st.booleans()),
    norm=st.sampled_from(["", "each head", "all heads"]),
    seed=st.integers(0, 99),
)
def test_heads_are_normed_and_rotated(
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    half: int,
    passed: int,
    form: RotaryForm,
    norm: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim = 2 * half + passed
    q, k = (torch.randn(count, rows, dim, generator=generator).to(dtype).transpose(0, 1) for count in heads)
    # Each pair's angle `angles_of_pair` times; beyond what `angle_step` needs nothing is read.
    width = half * form.angles_of_pair
    form = RotaryForm(
        form.is_interleaved, min(form.angle_step, form.angles_of_pair), form.angles_of_pair, form.rounds_once
    )
    angles = torch.randn(rows if seed % 3 else 1, width, generator=generator)
    cos, sin = angles.cos().to(angle_dtype), angles.sin().to(angle_dtype)
    weights = [
        torch.randn(dim * (count if norm == "all heads" else 1), generator=generator).to(dtype) for count in heads
    ]
    head_norms = HeadNorms(weights[0], weights[1], 1e-5, 0.5, True, norm == "all heads") if norm else None
    found = CudaRotary(EmulatedCudaCard(4))(q, k, cos, sin, form, head_norms)
    for x, weight, mine in zip((q, k), weights, found, strict=True):
        wide = x.double()
        if norm:
            over = wide.flatten(1) if norm == "all heads" else wide
            over = over / (over.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 0.5)
            wide = over.view(wide.shape)
        c, s = (part[:, : half * form.angle_step : form.angle_step].double()[:, None] for part in (cos, sin))
        turned, kept = wide[..., : 2 * half], wide[..., 2 * half :]
        if form.is_interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            wanted = torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            wanted = torch.cat([first * c - second * s, second * c + first * s], -1)
        wanted = torch.cat([wanted, kept], -1)
        assert mine.is_contiguous()
        assert (mine.double() - wanted).abs().max() <= ROUGH[dtype] * wide.abs().max() + 1e-6


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 8),
    columns=st.integers(1, 200),
    group=st.integers(1, 24),
    groups=st.integers(1, 6),
    is_sigmoid=st.booleans(),
    normalises=st.booleans(),
    has_more=st.booleans(),
    seed=st.integers(0, 99),
)
def test_experts_are_those_of_torch(
    dtype: torch.dtype,
    rows: int,
    columns: int,
    group: int,
    groups: int,
    is_sigmoid: bool,
    normalises: bool,
    has_more: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    experts, kept = group * groups, 1 + seed % groups
    how = Routing(
        per_token=1 + seed % min(32, kept * group), is_sigmoid=is_sigmoid, groups=groups, kept_groups=kept,
        rounds_logits=seed % 2 == 0, normalises=normalises, rounds_shares=seed % 3 == 0, scale=1.5,
    )  # fmt: skip
    x, weight = (torch.randn(n, columns, generator=generator).to(dtype) for n in (rows, experts))
    weight[seed % experts] = weight[0]  # a tie
    bias = torch.randn(experts, generator=generator).to(dtype) if has_more else None
    if bias is not None:
        bias[seed % experts] = bias[0]
    correction = torch.rand(experts, generator=generator).round(decimals=1) if has_more else None
    assert how.suits(experts)
    kernel = CudaRouter(EmulatedCudaCard(4))
    logits, shares, ids = kernel(x, weight, how, bias, correction)
    meant = x.float() @ weight.float().T + (bias.float() if bias is not None else 0)
    torch.testing.assert_close(logits, meant, rtol=ROUGH[dtype], atol=1e-3)
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    preference = scores + correction if correction is not None else scores
    if kept < groups:
        own = preference.view(rows, groups, group)
        best = own.topk(min(2, group))[0].sum(-1) if is_sigmoid and group > 1 else own.max(-1)[0]
        if is_sigmoid and group == 1:
            return  # a sum of two scores of which there is only one
        chosen = best.sort(descending=True, stable=True)[1][:, :kept]
        hidden = torch.ones(rows, groups, dtype=torch.bool).scatter(1, chosen, False)
        preference = preference.masked_fill(hidden.repeat_interleave(group, 1), -torch.inf)
    order = preference.sort(descending=True, stable=True)[1][:, : how.per_token]
    near = (preference.gather(1, ids) - preference.gather(1, order)).abs() <= 1e-6
    assert bool(((ids == order) | near).all())
    assert all(len(set(row)) == how.per_token for row in ids.tolist())
    wanted = scores.gather(1, ids)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalises else wanted
    torch.testing.assert_close(shares, wanted * 1.5, rtol=ROUGH[dtype] if how.rounds_shares else 1e-4, atol=1e-6)


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 8),
    columns=st.integers(1, 60),
    experts=st.integers(2, 70),
    jitter=st.sampled_from([0.01, 0.1, 0.4]),
    seed=st.integers(0, 99),
)
def test_experts_that_are_mixed_are_those_of_transformers(
    dtype: torch.dtype, rows: int, columns: int, experts: int, jitter: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, columns, generator=generator).to(dtype) for n in (rows, experts))
    weight[seed % experts] = weight[0]  # a tie
    how = Routing(2, rounds_shares=True, slack=2 * jitter)
    logits, shares, ids = CudaRouter(EmulatedCudaCard(4))(x, weight, how)
    wanted, wanted_ids = sparsemixer(logits.to(dtype), jitter_eps=jitter, training=False)
    assert torch.equal(logits.gather(1, ids), logits.gather(1, wanted_ids))
    torch.testing.assert_close(shares, wanted.float(), rtol=ROUGH[dtype], atol=1e-6)


def test_equal_experts_come_in_their_order() -> None:
    weight = torch.ones(40, 16)
    _, shares, ids = CudaRouter(EmulatedCudaCard(2))(torch.ones(2, 16), weight, Routing(7, normalises=True))
    assert ids.tolist() == [list(range(7))] * 2
    torch.testing.assert_close(shares, torch.full((2, 7), 1 / 7))


def fused_parts(model: Any) -> dict[str, int]:
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    kinds = {
        "norms": CardNorm,
        "latents": CardLatents,
        "routers": CardRouter,
        "sums": CardLayer,
        "later": rotations._Later,
    }
    functions = [each.__func__ for each in forwards if isinstance(each, MethodType)]
    rotated = [isinstance(each.__globals__.get("apply_rotary_pos_emb"), rotations.Rotation) for each in functions]
    counted = {name: sum(isinstance(forward, kind) for forward in forwards) for name, kind in kinds.items()}
    return counted | {"rotations": sum(rotated)}


@torch.inference_mode()
def logits_of(model: Any, tokens: int) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([PROMPT[:tokens]])).logits.float()
    return found


WHOLE = {
    "qwen3_moe": "rotations later routers sums",
    "mixtral": "rotations routers sums",
    "gpt_oss": "rotations routers sums",
    "olmoe": "rotations later routers sums",
    "qwen2_moe": "rotations routers sums",
    "deepseek_v3": "latents routers sums",
    "deepseek_v2": "latents routers sums",
    "glm4_moe_lite": "latents routers sums",
    "mistral4": "routers sums",
    "glm4_moe": "rotations routers sums",
    "ernie4_5_moe": "rotations routers sums",
    "minimax_m2": "rotations later routers sums",
    "dots1": "rotations later routers sums",
    "hunyuan_v1_moe": "rotations routers sums",
    "granitemoe": "rotations routers sums",
    "phimoe": "rotations routers",
}
"""What of a family's layers kernels compute besides norms, which Phi-3.5 has another kind of."""


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_familys_modules_give_the_same(family: str, dtype: torch.dtype, card: EmulatedCudaCard) -> None:
    model = tiny_model(family).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    counts = (1, 5, 40)
    wanted = [logits_of(model, tokens) for tokens in counts]
    speed_up_on_cards(model)
    has_norms = {"norm"} if family != "phimoe" else set[str]()
    parts = {name for name, count in fused_parts(model).items() if count}
    assert parts == {*(f"{name}s" for name in has_norms), *WHOLE[family].split()}
    card.launched.clear()
    for expected, tokens in zip(wanted, counts, strict=True):
        found = logits_of(model, tokens)
        if tokens == 1:
            sources = {kernel.source.partition(".")[0] for kernel, _ in card.launched}
            of_parts = {"rotations": "rotary", "routers": "router"}
            assert sources - {"angles"} == {
                *has_norms,
                *(of_parts[part] for part in WHOLE[family].split() if part in of_parts),
            }
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        else:
            assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.99


@pytest.mark.parametrize(
    "family", some(["qwen3_moe", "granitemoe", "hunyuan_v1_moe", "gpt_oss", "phimoe", "gemma4_text"])
)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path, card: EmulatedCudaCard) -> None:
    expected = reference(family, tmp_path)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert fused_parts(model.model)[{"phimoe": "routers", "gemma4_text": "norms"}.get(family, "sums")] > 0
        assert list(answer(session, PROMPT).token_ids) == expected.first
    reference.cache_clear()


def test_without_a_card_modules_stay_as_they_are() -> None:
    assert driver.card_of(torch.device("cpu")) is None
    model = tiny_model("qwen3_moe")
    speed_up_on_cards(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


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


def test_card_norms_without_a_card_modules_stay_as_they_are() -> None:
    assert driver.card_of(torch.device("cpu")) is None
    assert speed_up_norms(_RMSNorm(64, torch.bfloat16)) == 0


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
