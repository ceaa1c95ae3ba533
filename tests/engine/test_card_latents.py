"""Latent attention by kernels in CUDA C on an emulated card: what the definition says, and what a module gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import FORMATS
from engine.formats.tiles import TiledMatrix, dequantise
from engine.kernels.cuda import driver
from engine.kernels.cuda.attention import CudaAttention, CudaLatents, LatentForm, LatentNorm, LatentShape
from engine.kernels.gpu import modules
from engine.kernels.gpu.latents import CardLatents
from engine.kernels.gpu.pages import PageTable
from engine.kernels.gpu.proof import ProvenAttention
from engine.kernels.native.paged_attention import KvType
from engine.kernels.repack import quantise
from engine.runtime.decode import tabled_attention
from engine.runtime.load.binding import speed_up_on_cards
from tests.engine.emulated_cuda_card import EmulatedCudaCard, needs_compiler
from tests.engine.graph_cases import graphs_of
from tests.engine.on_devices import NEW_TOKENS, PROMPT, answer, chatting, opened, reference
from tests.engine.tiny_families import tiny_model

pytestmark = needs_compiler
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-6}


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: LatentForm) -> torch.Tensor:
    """[.., rope] by the definition, in double precision."""
    first, second = (x[..., ::2], x[..., 1::2]) if form.takes_pairs else x.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if form.makes_pairs else torch.cat(turned, -1)


@settings(max_examples=10)
@given(
    dtype=st.sampled_from(DTYPES),
    kv_type=st.sampled_from([KvType.BF16, KvType.FP16, KvType.FP32]),
    precision=st.sampled_from(["", "int8", "int4", "lut4"]),
    shape=st.builds(
        LatentShape,
        st.integers(1, 9),
        st.integers(1, 40).map(lambda n: 8 * n),
        st.integers(1, 32).map(lambda n: 2 * n),
        st.integers(1, 70),
        st.integers(1, 70),
    ),
    sequences=st.integers(1, 8),
    form=st.builds(LatentForm, st.booleans(), st.booleans(), st.integers(1, 2), st.booleans()),
    is_windowed=st.booleans(),
    multiprocessors=st.sampled_from([1, 40]),
    seed=st.integers(0, 999),
)
def test_a_token_of_each_sequence(
    dtype: torch.dtype,
    kv_type: KvType,
    precision: str,
    shape: LatentShape,
    sequences: int,
    form: LatentForm,
    is_windowed: bool,
    multiprocessors: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    heads, rank, rope = shape.heads, shape.rank, shape.rope
    plain = (drawn(heads * (shape.key_dim + shape.value_dim), rank) * rank**-0.5).to(dtype)
    matrix: torch.Tensor | TiledMatrix = quantise(plain.bfloat16(), FORMATS[precision]) if precision else plain
    meant = (dequantise(matrix, torch.float32) if isinstance(matrix, TiledMatrix) else matrix).double()
    queries, own = drawn(sequences, heads, shape.key_dim + rope).to(dtype), drawn(sequences, rank + rope).to(dtype)
    norm = LatentNorm((1 + drawn(rank) / 8).to(dtype), 1e-5, 0.5, seed % 2 == 0)
    angles = drawn(sequences if seed % 3 else 1, rope // 2 * form.angle_step)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    held = torch.randint(0, 120, (sequences,), generator=generator)
    size = 1 + seed % 70
    window, rows = size if is_windowed else 0, int(held.max()) + 1
    kept = [[drawn(1, rows, n).to(kv_type.dtype) for n in (rank, rope)] for _ in range(sequences)]
    table = PageTable(kv_type, sequences, -(-rows // 32), CPU)
    for number, parts in enumerate(kept):
        table.set_rows(number, parts)

    card = EmulatedCudaCard(multiprocessors)
    kernel = CudaLatents(card)
    assert kernel.takes(shape, matrix)
    assert kernel.keeps(table)
    found = kernel.attend(table, shape, matrix, queries, own, norm, (cos, sin), form, held, scale=0.2, window=window)
    assert len(card.launched) == 3
    assert not kernel._splits.arrived(table, 1).any()
    rounding = max(STEP[dtype], STEP[kv_type.dtype])
    c, s = (part.double()[:, :: form.angle_step] for part in (cos, sin))
    for number, parts in enumerate(kept):
        at = int(held[number])
        c_own, s_own = (part[number if len(part) > 1 else 0] for part in (c, s))
        latent, key = own[number, :rank].double(), own[number, rank:].double()
        normed = latent / (latent.pow(2).mean() + 1e-5).sqrt() * (norm.weight.double() + 0.5)
        for part, wanted in zip(parts, (normed, rotated(key, c_own, s_own, form)), strict=True):
            limit = 4 * rounding * wanted.abs().max() + 1e-5
            assert (part[0, at].double() - wanted).abs().max() <= limit
        seen = at + 1
        oldest = max(0, seen - window) if window else 0
        latents_seen, keys_seen = (part[0, oldest:seen].double() for part in parts)
        expanded = (latents_seen @ meant.T).view(-1, heads, shape.key_dim + shape.value_dim)
        keys, values = expanded.split([shape.key_dim, shape.value_dim], -1)
        plain_query, turned = queries[number].double().split([shape.key_dim, rope], -1)
        turned = rotated(turned, c_own, s_own, form)
        scores = torch.einsum("hd,thd->ht", plain_query, keys) + turned @ keys_seen.T
        wanted = torch.einsum("ht,thd->hd", (0.2 * scores).softmax(-1), values)
        # A rounded rotation moves scores, and so the shares of values.
        moved = 0.2 * 4 * STEP[dtype] * turned.norm(dim=-1).max() * keys_seen.norm(dim=-1).max()
        limit = (STEP[dtype] + 2 * moved + 1e-5) * values.abs().max() + 1e-6
        assert (found[number].double() - wanted).abs().max() <= limit


def test_what_no_kernel_is_there_for() -> None:
    fine = LatentShape(4, 64, 16, 8, 8)
    assert CudaLatents.takes(fine, torch.zeros(64, 64))
    assert not CudaLatents.takes(fine, torch.zeros(64, 64, dtype=torch.float64))
    assert not CudaLatents.takes(fine, torch.zeros(64, 128)[:, ::2])
    for other in (LatentShape(4, 60, 16, 8, 8), LatentShape(4, 520, 16, 8, 8), LatentShape(4, 64, 66, 8, 8)):
        assert not CudaLatents.takes(other, torch.zeros(64, other.rank))
    assert not CudaLatents.keeps(PageTable(KvType.INT8, 1, 1, CPU))
    assert driver.card_of(CPU) is None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    found = EmulatedCudaCard(8)
    attention = CudaAttention(found)
    monkeypatch.setattr(modules, "on_card", lambda device, make: make(found))
    monkeypatch.setattr(tabled_attention, "attention_of", lambda device: ProvenAttention(attention))
    return found


def replaced(model: Any) -> int:
    return sum(isinstance(module.__dict__.get("forward"), CardLatents) for module in model.modules())


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "glm4_moe_lite"])
def test_tokens_are_those_of_transformers(
    family: str, tmp_path: Path, card: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    expected = reference(family, tmp_path)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert replaced(model.model) > 0
        card.launched.clear()
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert session.together([expected.second_prompt, PROMPT], NEW_TOKENS) == [
            (*expected.second,),
            (*expected.first,),
        ]
        assert max(graphs_of(session)._kinds) > 1
        sources = {kernel.source for kernel, _ in card.launched}
        assert {"latent_queries.cu", "latent_attention.cu", "latent_values.cu"} <= sources
        assert "attention.cu" not in sources
    reference.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_modules_that_give_the_same(dtype: torch.dtype, card: EmulatedCudaCard) -> None:
    for config in ({}, {"rope_interleave": False, "q_lora_rank": None}):
        model = tiny_model("deepseek_v3", **config).requires_grad_(False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        speed_up_on_cards(model)
        assert replaced(model) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["deepseek_v32", "mistral4", "longcat_flash"])
def test_what_computes_otherwise_is_left_alone(family: str, card: EmulatedCudaCard) -> None:
    model = tiny_model(family).requires_grad_(False)
    speed_up_on_cards(model)
    assert replaced(model) == 0


def test_kernels_that_compute_wrongly_change_nothing(card: EmulatedCudaCard, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CudaLatents.attend
    model = tiny_model("deepseek_v3").requires_grad_(False)
    monkeypatch.setattr(CudaLatents, "attend", lambda *args, **more: right(*args, **more) * 1.1)
    speed_up_on_cards(model)
    assert replaced(model) == 0

    def fails(*args: object, **more: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(CudaLatents, "attend", fails)
    speed_up_on_cards(tiny_model("deepseek_v3").requires_grad_(False))
    assert replaced(model) == 0
