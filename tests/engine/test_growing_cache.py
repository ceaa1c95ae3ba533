"""The growing layer against the library's concatenating one, through any sequence of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from engine.runtime.kv.growing import GrowingIndexedLayer, GrowingLayer
from engine.runtime.kv.layers import new_cache
from engine.runtime.kv.memory import cache_bytes
from tests.engine.loaded_tiny import tiny_loaded

OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 300)),
    st.tuples(st.just("crop"), st.integers(0, 60)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("reset"), st.just(0)),
)


def _change(layers: tuple[DynamicLayer, DynamicLayer], name: str, value: object) -> None:
    """Whatever is done to a cache besides updating it."""
    fewer = min(value, max(0, layers[1].get_seq_length() - 1)) if isinstance(value, int) else 0
    for layer in layers:
        if name == "crop":
            layer.crop(-fewer)
        elif name == "reorder":
            layer.reorder_cache(torch.tensor(value))
        else:
            layer.reset()


@given(operations=st.lists(OPERATIONS, max_size=12), most=st.sampled_from([None, 10, 400]), seed=st.integers(0, 99))
def test_equal_to_concatenation(operations: list[tuple[str, object]], most: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = GrowingLayer(most), DynamicLayer()
    for name, value in operations:
        if name == "update":
            assert isinstance(value, int)
            keys = torch.randn((3, 2, value, 4), generator=generator)
            values = torch.randn((3, 2, value, 6), generator=generator)
            for mine, library in zip(ours.update(keys, values), theirs.update(keys, values), strict=True):
                assert torch.equal(mine, library)
        else:
            _change((ours, theirs), name, value)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(5) == theirs.get_mask_sizes(5)
        if theirs.get_seq_length():
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


@given(operations=st.lists(OPERATIONS, max_size=12), most=st.sampled_from([None, 10, 400]), seed=st.integers(0, 99))
def test_an_index_is_equal_to_concatenation(operations: list[tuple[str, object]], most: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = GrowingIndexedLayer(most), DynamicIndexedLayer()
    for name, value in operations:
        if name == "update":
            assert isinstance(value, int)
            states, index = (torch.randn(shape, generator=generator) for shape in ((3, 2, value, 4), (3, value, 5)))
            positions = torch.randint(99, (2, 3, value), generator=generator)
            assert torch.equal(ours.update_indexer(index), theirs.update_indexer(index))
            for layer in (ours, theirs):
                layer.update(states, states)
                held = layer.indexer_position_ids
                layer.indexer_position_ids = positions if held is None else torch.cat([held, positions], dim=2)
        else:
            _change((ours, theirs), name, value)
        assert ours.is_indexer_initialized == theirs.is_indexer_initialized
        for mine, library in (
            (ours.indexer_keys, theirs.indexer_keys),
            (ours.indexer_position_ids, theirs.indexer_position_ids),
        ):
            assert (mine is None) == (library is None)
            assert mine is None or torch.equal(mine, library)


def test_widening_and_selecting() -> None:
    states = torch.randn(1, 2, 5, 4)
    ours, theirs = GrowingLayer(), DynamicLayer()
    for layer in (ours, theirs):
        layer.update(states, states)
        layer.reorder_cache(torch.tensor([0, 0, 0]))
        layer.update(
            states.expand(3, -1, -1, -1) + torch.arange(3.0)[:, None, None, None], states.expand(3, -1, -1, -1)
        )
        layer.batch_select_indices(torch.tensor([2, 0]))
        layer.batch_repeat_interleave(2)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)


def test_tokens_are_written_in_place() -> None:
    layer = GrowingLayer()
    state = torch.randn(1, 2, 1, 4)
    layer.update(state, state)
    where = layer.keys.data_ptr()
    for _ in range(255):
        layer.update(state, state)
    assert layer.keys.data_ptr() == where
    layer.update(state, state)
    assert layer.allocated_bytes() == 2 * 2 * 512 * 4 * 4


def test_capacity_ends_at_the_context() -> None:
    layer = GrowingLayer(most_tokens=300)
    state = torch.randn(1, 1, 290, 2)
    layer.update(state, state)
    assert layer.allocated_bytes() == 2 * 290 * 2 * 4
    layer.update(state[:, :, :5], state[:, :, :5])
    assert layer.allocated_bytes() == 2 * 300 * 2 * 4


def test_only_a_negative_crop_is_taken() -> None:
    with pytest.raises(ValueError, match="negative"):
        GrowingLayer().crop(3)


def test_plain_layers_and_sliding_windows_grow_in_place() -> None:
    cache = new_cache(tiny_loaded("gpt_oss").model)
    assert cache is not None
    kinds = {type(layer).__name__ for layer in cache.layers}
    assert kinds == {"GrowingLayer", "GrowingWindowLayer"}
    assert cache_bytes(cache) < 100  # but for what the library's layers note down
