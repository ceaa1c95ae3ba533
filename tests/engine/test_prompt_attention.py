"""Attention of prompts by the native kernels against torch: shapes, what is seen, and whole models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.native.library import Isa, NativeKernels
from engine.kernels.native.prompt_attention import attend_prompt
from engine.runtime.fast_path.prompt_attention import speed_up_prompts
from tests.engine.native_isas import isas, kernels_of

ISAS = isas()


@pytest.fixture(scope="module", params=ISAS, ids=lambda isa: isa.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    isa: Isa = request.param
    with kernels_of(isa, threads=int(isa) % 3 + 1) as held_back:
        yield held_back


def _reference(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sees: torch.Tensor
) -> torch.Tensor:
    group = queries.shape[0] // keys.shape[0]
    keys, values = (each.float().repeat_interleave(group, 0) for each in (keys, values))
    scores = (queries.float() @ keys.transpose(1, 2) * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)


def _causal(tokens: int, held: int, window: int | None = None) -> torch.Tensor:
    place, key = torch.arange(held - tokens, held)[:, None], torch.arange(held)[None]
    return (key <= place) & (key > place - window if window is not None else key >= 0)


def assert_prompt_as_in_torch(
    kernels: NativeKernels,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    before: int,
    window: int | None,
    masked: bool,
) -> None:
    held = before + tokens
    # As caches and projections have them: heads within tokens, and room for more tokens.
    queries = torch.randn(tokens, kv_heads * group, key_dim).bfloat16().transpose(0, 1)
    keys = torch.randn(kv_heads, held + 7, key_dim).bfloat16()[:, :held]
    values = torch.randn(held, kv_heads, value_dim).bfloat16().transpose(0, 1)
    sees = _causal(tokens, held, window)
    scale = key_dim**-0.5
    got = attend_prompt(kernels, queries, keys, values, scale, sees if masked or window is not None else None)
    assert got is not None
    torch.testing.assert_close(got.float(), _reference(queries, keys, values, scale, sees), atol=3e-2, rtol=3e-2)


@settings(max_examples=10)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    key_dim=st.integers(1, 140),
    value_dim=st.integers(1, 140),
    tokens=st.integers(1, 150),
    before=st.sampled_from([0, 1, 100, 300]),
    window=st.sampled_from([None, 1, 40, 1000]),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_prompts_attend_as_torch_does(
    kernels: NativeKernels,
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    before: int,
    window: int | None,
    masked: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    assert_prompt_as_in_torch(kernels, kv_heads, group, key_dim, value_dim, tokens, before, window, masked)


def test_large_scores_neither_overflow_nor_vanish(kernels: NativeKernels) -> None:
    torch.manual_seed(2)
    queries, keys, values = (torch.randn(2, 200, 64).bfloat16() for _ in range(3))
    queries, keys = 30 * queries, 30 * keys
    got = attend_prompt(kernels, queries, keys, values, 1.0)
    assert got is not None
    wanted = _reference(queries, keys, values, 1.0, _causal(200, 200))
    torch.testing.assert_close(got.float(), wanted, atol=3e-2, rtol=3e-2)


def test_what_is_no_range_is_left_to_torch(kernels: NativeKernels) -> None:
    states = torch.randn(1, 20, 32).bfloat16()
    sees = _causal(20, 20)
    sees[15, 3] = False
    assert attend_prompt(kernels, states, states, states, 1.0, sees) is None
    assert attend_prompt(kernels, states, states, states, 1.0, torch.zeros(20, 20, dtype=torch.bool)) is None


def test_threads_do_not_matter() -> None:
    torch.manual_seed(3)
    queries, keys, values = (torch.randn(heads, 333, 64).bfloat16() for heads in (8, 2, 2))
    outs = []
    for threads in (1, 2, 5):
        with kernels_of(ISAS[-1], threads) as kernels:
            outs.append(attend_prompt(kernels, queries, keys, values, 0.125))
    assert outs[0] is not None
    for out in outs[1:]:
        assert out is not None
        assert torch.equal(outs[0], out)


@pytest.mark.parametrize("window", [None, 24])
def test_a_model_reads_its_prompt_as_before(kernels: NativeKernels, window: int | None) -> None:
    """In one piece and continued, with and without a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    model = MistralForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(0, 100, (1, 120))
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits.float()
        taken = speed_up_prompts(model, kernels)
        assert bool(taken) == (kernels.isa is not Isa.PORTABLE)
        # Families of the library look at this name, and leave the masks of sparse attention out under any other.
        assert model.config._attn_implementation == "sdpa"
        whole = model(input_ids=ids).logits.float()
        first = model(input_ids=ids[:, :70], use_cache=True)
        second = model(input_ids=ids[:, 70:], cache=first.cache, use_cache=True)
        pieces = torch.cat([first.logits, second.logits], 1).float()
    torch.testing.assert_close(whole, wanted, atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(pieces, wanted, atol=3e-2, rtol=3e-2)
