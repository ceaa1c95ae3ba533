"""A whole token's fast path against the library's model around the same weights."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.common.errors import never_cancelled
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import KvType, Piece, Pieces
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import ignore_progress
from engine.runtime.decode.step_model import StepModel, TokenStep
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import open_model
from tests.engine.seeing_models import seeing_checkpoint
from tests.engine.single_streams import PagedSequence
from tests.engine.tiny_families import tiny_checkpoint

_load = partial(open_model, threads=2)

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
SEEING = ("gemma3", "internvl", "kimi_k25", "nemotron_h_omni", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
LARGER = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4}
"""Enough for a head of the kernels' own."""
PROMPT, END = 250, 262
"""The angles of 256 positions are computed together: some of either side of that."""


def _steps(loaded: LoadedModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [V] of every token after a prompt: by native steps, and by calls of the library's model."""
    torch.manual_seed(7)
    tokens = torch.randint(3, 300, (1, END))
    step, one, other = StepModel(loaded.model, END), PagedSequence(loaded.model), PagedSequence(loaded.model)
    ours, librarys = [], []
    with torch.inference_mode():
        for each in (one, other):
            step(tokens[:, :PROMPT], each.next(PROMPT), 0)
        for at in range(PROMPT, END):
            native = step.rows_of(1)
            assert native is not None
            ours.append(one.rows(native, tokens[0, at : at + 1])[0])
            librarys.append(other.logits(loaded.model, tokens[:, at : at + 1]))
    return ours, librarys


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_steps_are_the_librarys(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    with closing(_load(tiny_checkpoint(family, tmp_path, **options))) as loaded:
        _compare_steps(loaded)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("family", SEEING)
def test_steps_of_models_that_see_are_the_librarys(family: str, tmp_path: Path) -> None:
    with closing(_load(seeing_checkpoint(family, tmp_path))) as loaded:
        assert loaded.sight is not None
        _compare_steps(loaded)


def _compare_steps(loaded: LoadedModel) -> None:
    ours, librarys = (torch.stack(each).float() for each in _steps(loaded))
    far = (ours - librarys).norm(dim=-1) / librarys.norm(dim=-1)
    assert float(far.median()) < 0.02, far


@pytest.mark.parametrize(("precision", "kv_type"), [("bf16", None), ("int4", KvType.INT8)])
@pytest.mark.parametrize(("family", "options"), [FAMILIES[1], FAMILIES[2], *FAMILIES[7:9]])
def test_all_layers_in_one_call_are_as_one_after_the_other(
    family: str,
    options: dict[str, Any],
    precision: Literal["bf16", "int8", "int4"],
    kv_type: KvType | None,
    tmp_path: Path,
) -> None:
    if kv_type is not None:  # of a window the library's pages hold no narrow values
        whole = {"gpt_oss": {"layer_types": ["full_attention"] * 2}, "mixtral": {"sliding_window": None}}
        options = {**options, **whole.get(family, {})}
    with closing(_load(tiny_checkpoint(family, tmp_path, **LARGER, **options), precision)) as loaded:
        torch.manual_seed(8)
        ids = torch.randint(3, loaded.model.config.vocab_size, (1, 30))
        reader, at_once, layers = StepModel(loaded.model, 30), TokenStep.of(loaded.model), TokenStep.of(loaded.model)
        assert at_once._whole is not None
        layers._whole = None
        one, other = (PagedSequence(loaded.model, 30, kv_type) for _ in range(2))
        with torch.inference_mode():
            for each in (one, other):
                reader(ids[:, :6], each.next(6), 0)
            start = 6
            while start < 30:
                end = start + (3 if start >= 18 else 1)
                got, wanted = one.rows(at_once, ids[0, start:end]), other.rows(layers, ids[0, start:end])
                start = end
                # Only the last norm differs: torch adds its squares in another order.
                assert (got.float() - wanted.float()).norm() <= 0.004 * wanted.float().norm()
        assert all(map(torch.equal, one.parts(), other.parts()))


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
        packed.allocate(80, 8)
        places = torch.randperm(80, dtype=torch.int32)
        pages = [places[10 * row : 10 * (row + 1)].contiguous() for row in range(6)]
        caches = packed.caches
        assert caches is not None
        is_window = bool(options.get("sliding_window"))
        if is_window and kv_type is not None:
            assert packed.exact_steps() is None
            return
        reader, together = StepModel(loaded.model, 300), TokenStep.of(loaded.model)
        assert together.takes_rows(3)
        lengths = [3, 40, 55] if is_window else [3, PROMPT, 90]
        ids = torch.randint(3, loaded.model.config.vocab_size, (3, 300))
        with torch.inference_mode():
            for row in range(6):
                length = lengths[row % 3]
                reader(ids[row % 3][None, :length], caches.of(Piece(pages[row], 0, length, row, row)), 0)
            own = [0, 1, 2, 6]
            for step in range(END - PROMPT - 4):
                at = [length + step for length in lengths]
                chosen = [int(ids[row, place]) for row, place in enumerate(at)]
                # States in place, or into the one that nobody has, which takes turns.
                pieces = [Piece(pages[row], held, 1, own[row], own[row + (row == 2)]) for row, held in enumerate(at)]
                own[2], own[3] = own[3], own[2]
                got = together.rows(chosen, at, caches.structs, Pieces(pieces))
                for row, held in enumerate(at):
                    alone = Piece(pages[3 + row], held, 1, 3 + row, 3 + row)
                    wanted = together.rows([chosen[row]], [held], caches.structs, Pieces([alone]))
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
    with closing(_load(path, "fp32")) as library:
        for own, length, got in zip(ids, lengths, alone, strict=True):
            with torch.inference_mode():
                wanted = library.model(input_ids=own[None]).logits[0, length:]
            far = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
            assert (
                float(far.median()) < {"bf16": 0.05, "int8": 0.07, "int4": 0.4}[precision]
            )  # the library in bf16: 0.05


def test_whoever_listens_to_the_last_hidden_states_hears_them(tmp_path: Path) -> None:
    with closing(_load(tiny_checkpoint("qwen3_moe", tmp_path))) as loaded:
        step, sequence = StepModel(loaded.model, 16), PagedSequence(loaded.model)
        heard: list[tuple[int, ...]] = []
        with torch.inference_mode():
            step(torch.tensor([[3, 4, 5]]), sequence.next(3), 0)
            handle = loaded.model.model.norm.register_forward_hook(lambda _m, _a, out: heard.append(out.shape[:2]))
            native = step.rows_of(1)
            assert native is not None
            sequence.rows(native, torch.tensor([6]))
            handle.remove()
            sequence.rows(native, torch.tensor([7]))
        assert heard == [(1, 1)]


def test_models_without_native_layers_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_NATIVE", "0")
    with closing(_load(tiny_checkpoint("mixtral", tmp_path))) as loaded:
        assert TokenStep.of(loaded.model) is None
