"""A whole token's fast path against the library's model around the same layers: the same logits, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers.cache_utils import DynamicCache

from engine.common.config import EngineConfig
from engine.common.errors import never_cancelled
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import PAGE_TOKENS, KvType, Piece, Pieces, StatePages
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.decode.step_model import StepModel, TokenStep
from engine.runtime.kv.layers import new_cache
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.kv.parts import held_parts, parts_of_pages
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": None}),
    ("mixtral", {"sliding_window": 64}),
    ("qwen3_moe", {}),
    ("llama", {}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    ("qwen3", {}),
    ("olmoe", {}),
    ("qwen2_moe", {}),
    ("gpt_oss", {}),
    ("deepseek_v2", {}),
    ("deepseek_v3", {}),
    ("granitemoeshared", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 1.5}),
]
LARGER = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4}
"""Enough for a head of the kernels' own."""
PROMPT, END = 250, 262
"""The angles of 256 positions are computed together: some of either side of that."""


def _load(path: Path, precision: Literal["fp32", "bf16", "int8", "int4"] = "bf16") -> LoadedModel:
    config = EngineConfig(str(path), precision=precision, threads=2)
    return load_model(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)


def _fill_pages(cache: Any, caches: PagedCaches, pages: torch.Tensor, state: int, tokens: int) -> None:
    numbers = torch.arange(tokens)
    places, rows = pages[numbers // PAGE_TOKENS].long(), numbers % PAGE_TOKENS
    for states, paged in zip(cache.layers, caches.layers, strict=True):
        if isinstance(paged, StatePages):
            paged.recent[state] = states.conv_states[0][0]
            if paged.states.numel():
                paged.states[state] = states.recurrent_states[0][0]
            continue
        for target, source in zip(parts_of_pages(paged), held_parts(states), strict=True):
            target[places, :, rows] = source[:, :tokens].transpose(0, 1)


def _steps(loaded: LoadedModel, kind_of_cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [V] of every token after a prompt: by steps, and by calls of the library's model."""
    torch.manual_seed(7)
    tokens = torch.randint(3, loaded.model.config.vocab_size, (1, END))
    step, caches = StepModel(loaded.model, END), (kind_of_cache(), kind_of_cache())
    ours, librarys = [], []
    with torch.inference_mode():
        for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, END))]:
            ours.append(step(tokens[:, start:end], caches[0], start)[0][0])
            output = loaded.model(input_ids=tokens[:, start:end], cache=caches[1], use_cache=True)
            librarys.append(output.logits[0, -1])
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    return ours, librarys


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_steps_are_the_librarys(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint(family, tmp_path, **options))
    try:
        short = TokenStep.of(loaded.model)
        assert short is not None
        ours, librarys = _steps(loaded, lambda: new_cache(loaded.model))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, librarys, strict=True))
    finally:
        loaded.close()


@pytest.mark.parametrize(("precision", "kv_type"), [("bf16", None), ("int4", KvType.INT8)])
@pytest.mark.parametrize(("family", "options"), [FAMILIES[1], FAMILIES[2], *FAMILIES[7:9]])
def test_all_layers_in_one_call_are_as_one_after_the_other(
    family: str,
    options: dict[str, Any],
    precision: Literal["bf16", "int8", "int4"],
    kv_type: KvType | None,
    tmp_path: Path,
) -> None:
    loaded = _load(tiny_checkpoint(family, tmp_path, **LARGER, **options), precision)
    try:
        torch.manual_seed(8)
        ids = torch.randint(3, loaded.model.config.vocab_size, (1, 30))
        whole, layers = StepModel(loaded.model, 30), StepModel(loaded.model, 30)
        assert whole._single is not None
        assert layers._single is not None
        assert whole._single._whole is not None
        layers._single._whole = None
        one, other = (new_cache(loaded.model, 30, kv_type) for _ in range(2))
        assert one is not None
        assert other is not None
        with torch.inference_mode():
            for step, cache in ((whole, one), (layers, other)):
                step(ids[:, :6], cache, 0)
            start = 6
            while start < 30:
                end = start + (3 if start >= 18 and whole.takes(3, one) else 1)
                got = whole.several(ids[:, start:end], one, start)
                wanted = layers.several(ids[:, start:end], other, start)
                start = end
                # Only the last norm differs: torch adds its squares in another order.
                assert (got.float() - wanted.float()).norm() <= 0.004 * wanted.float().norm()
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
    finally:
        loaded.close()


@pytest.mark.takes_turns(4)
@pytest.mark.parametrize(("precision", "kv_type"), [("bf16", None), ("int4", KvType.INT8)])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *FAMILIES[:4],
        *FAMILIES[5:8],
        FAMILIES[-1],
        ("gpt_oss", {"sliding_window": 64}),
        ("deepseek_v2", {}),
        ("deepseek_v3", {}),
        ("glm4_moe_lite", {}),
        ("qwen3_next", {"linear_key_head_dim": 32, "linear_value_head_dim": 64}),
        ("qwen3_5_moe_text", {}),
        ("kimi_linear", {"q_lora_rank": None}),
        ("lfm2_moe", {}),
        ("granitemoehybrid", {"mamba_d_state": 40, "mamba_n_groups": 2, "residual_multiplier": 0.5}),
    ],
)
def test_rows_over_pages_are_as_each_alone(
    family: str,
    options: dict[str, Any],
    precision: Literal["bf16", "int8", "int4"],
    kv_type: KvType | None,
    tmp_path: Path,
) -> None:
    is_latent = "deepseek" in family or family in ("glm4_moe_lite", "kimi_linear")
    if is_latent and kv_type is not None:
        pytest.skip("latents are kept in bf16")
    larger = {"hidden_size": 256} if is_latent else LARGER
    loaded = _load(tiny_checkpoint(family, tmp_path, **larger, **options), precision)
    packed = PackedModel(loaded, BatchPolicy(kv_bytes=2**22, kv_type=kv_type))
    try:
        packed.allocate(40, 4)
        places = torch.randperm(40, dtype=torch.int32)
        pages = [places[10 * row : 10 * (row + 1)].contiguous() for row in range(3)]
        caches = packed.caches
        assert caches is not None
        alone, together = StepModel(loaded.model, 300), TokenStep.of(loaded.model)
        assert together is not None
        assert together.takes_rows(3)
        # A window that is full orders its tokens otherwise, and keeps them in bf16.
        is_window = bool(options.get("sliding_window"))
        lengths = [3, 40, 55] if is_window else [3, PROMPT, 90]
        ids = torch.randint(3, loaded.model.config.vocab_size, (3, 300))
        with torch.inference_mode():
            alones, own = [], [0, 1, 2, 3]
            for row, length in enumerate(lengths):
                cache = new_cache(loaded.model, 300, kv_type)
                alone(ids[row : row + 1, :length], cache, 0)
                if is_window and kv_type is not None:
                    assert PagedSteps.of(loaded, caches) is None
                    return
                _fill_pages(cache, caches, pages[row], row, length)
                alones.append(cache)
            for step in range(END - PROMPT - 4):
                at = [length + step for length in lengths]
                chosen = [int(ids[row, place]) for row, place in enumerate(at)]
                # States in place, or into the one that nobody has, which takes turns.
                last = len(at) - 1
                pieces = Pieces(
                    [Piece(pages[row], held, 1, own[row], own[row + (row == last)]) for row, held in enumerate(at)]
                )
                own[last], own[last + 1] = own[last + 1], own[last]
                got = together.rows(chosen, at, caches.structs, pieces)
                for row, cache in enumerate(alones):
                    wanted, _ = alone(ids[row : row + 1, at[row] : at[row] + 1], cache, at[row])
                    assert torch.equal(got[row], wanted[0])
    finally:
        packed.close()
        loaded.close()


_COMPRESSED = {"hidden_size": 256, "head_dim": 64, "q_lora_rank": 72, "o_lora_rank": 40, "index_head_dim": 48}
_COMPRESSED |= {"index_topk": 9, "sliding_window": 24}
_LONG_RUNS = {"compress_rates": {"compressed_sparse_attention": 5, "heavily_compressed_attention": 48}}
"""Longer than a page and the window, and no part of a page."""


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("options", [_LONG_RUNS, {"index_topk": 70, "hc_mult": 2}])
def test_steps_of_what_is_compressed_are_the_librarys_and_those_of_each_alone(
    options: dict[str, Any], precision: Literal["bf16", "int8", "int4"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of DeepSeek-V4: in company, tried with others and alone they are the same, and its prompts are the library's."""
    path = tiny_checkpoint("deepseek_v4", tmp_path, **{**_COMPRESSED, **options})
    torch.manual_seed(9)
    lengths, more = [3, 170, 61], 20
    ids = [torch.randint(3, 300, (length + more,)) for length in lengths]
    loaded = _load(path, precision)
    packed = PackedModel(loaded, BatchPolicy(kv_bytes=2**24))
    try:
        packed.allocate(60, 0, 60)
        steps = packed.exact_steps()
        assert steps is not None
        assert steps.is_native
        assert steps.most_rows == 8
        full, windows = (torch.randperm(60, dtype=torch.int32).view(6, 10) for _ in range(2))

        def piece(row: int, held: int, tokens: int) -> Piece:
            return Piece(full[row], held, tokens, windows=windows[row])

        with torch.inference_mode():
            for row in range(6):
                own, length = ids[row % 3], lengths[row % 3]
                for begin in range(0, length, 50):  # in pieces that end in the midst of what is compressed
                    part = own[begin : min(begin + 50, length)].tolist()
                    steps.read(part, piece(row, begin, len(part)), length, ignore_progress, never_cancelled)
            alone = []
            for row, (own, length) in enumerate(zip(ids, lengths, strict=True)):
                at = range(length, length + more)
                alone.append(torch.cat([steps.write([int(own[held])], [piece(row, held, 1)], [held]) for held in at]))
            for step in range(0, more, 2):  # two tokens of each
                held = [length + step for length in lengths]
                given = [int(own[at + place]) for own, at in zip(ids, held, strict=True) for place in range(2)]
                pieces = [piece(row, at, 2) for row, at in zip((3, 4, 5), held, strict=True)]
                assert torch.equal(steps.write(given, pieces, held), torch.cat([one[step : step + 2] for one in alone]))
    finally:
        packed.close()
        loaded.close()
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    library = _load(path, "fp32")
    try:
        for own, length, got in zip(ids, lengths, alone, strict=True):
            with torch.inference_mode():
                wanted = library.model(input_ids=own[None]).logits[0, length:]
            far = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert (
                float(far.median()) < {"bf16": 0.05, "int8": 0.07, "int4": 0.4}[precision]
            )  # the library in bf16: 0.05
    finally:
        library.close()


def test_a_cache_that_is_not_written_into_is_the_librarys_to_fill(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("qwen3_moe", tmp_path), "int8")
    try:
        ours, librarys = _steps(loaded, lambda: DynamicCache(config=loaded.model.config))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, librarys, strict=True))
    finally:
        loaded.close()


def test_whoever_listens_to_layers_hears_them(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("qwen3_moe", tmp_path))
    try:
        step, cache = StepModel(loaded.model, 16), new_cache(loaded.model)
        heard: list[int] = []
        layers = loaded.model.model.layers
        with torch.inference_mode():
            step(torch.tensor([[3, 4, 5]]), cache, 0)
            handles = [layer.register_forward_hook(lambda *_, i=i: heard.append(i)) for i, layer in enumerate(layers)]
            step(torch.tensor([[6]]), cache, 3)
            for handle in handles:
                handle.remove()
            step(torch.tensor([[7]]), cache, 4)
        assert heard == list(range(len(layers)))
        assert cache is not None
        assert cache.get_seq_length() == 5
    finally:
        loaded.close()


def test_whoever_listens_to_the_last_hidden_states_hears_them(tmp_path: Path) -> None:
    loaded = _load(tiny_checkpoint("qwen3_moe", tmp_path))
    try:
        step, cache = StepModel(loaded.model, 16), new_cache(loaded.model)
        heard: list[tuple[int, ...]] = []
        with torch.inference_mode():
            step(torch.tensor([[3, 4, 5]]), cache, 0)
            handle = loaded.model.model.norm.register_forward_hook(lambda _m, _a, out: heard.append(out.shape[:2]))
            step(torch.tensor([[6]]), cache, 3)
            handle.remove()
            step(torch.tensor([[7]]), cache, 4)
        assert heard == [(1, 1)]
    finally:
        loaded.close()


def test_models_without_native_layers_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    loaded = _load(tiny_checkpoint("mixtral", tmp_path))
    try:
        assert TokenStep.of(loaded.model) is None
    finally:
        loaded.close()
