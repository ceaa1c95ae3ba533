"""Caches and windows that grow with the context give what those of the whole size give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from engine.runtime.kv.growing import GrowingIndexedLayer, GrowingLayer, GrowingWindowLayer
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


_WINDOW, _HEADS, _DIM = 5, 2, 3


def _add_token(layer: GrowingWindowLayer, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any] | None:
    row = layer.claim_rows(1)
    if row is None:
        return None
    key_rows, value_rows, held = row
    key_rows[:, :, held] = keys[:, :, 0]
    value_rows[:, :, held] = values[:, :, 0]
    return key_rows, value_rows


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["claim", "claim", "claim", "one", "many", "crop", "copy", "reorder"]), max_size=40))
def test_holds_and_shows_what_the_librarys_layer_does(steps: list[str]) -> None:
    growing, library = GrowingWindowLayer(_WINDOW), DynamicSlidingWindowLayer(_WINDOW)
    number = 0
    for step in steps:
        count = 3 if step == "many" else 1
        states = torch.arange(number, number + count * _HEADS * _DIM, dtype=torch.float32)
        states = states.reshape(1, count, _HEADS, _DIM).transpose(1, 2)
        number += count * _HEADS * _DIM
        if step in ("claim", "one", "many"):
            shown = _add_token(growing, states, -states) if step == "claim" else growing.update(states, -states)
            wanted = library.update(states, -states)
            if shown is None:  # of an empty layer
                shown = growing.update(states, -states)
            for mine, theirs in zip(shown, wanted, strict=True):
                assert torch.equal(mine, theirs)
        elif step == "crop" and 1 < library.get_seq_length() < _WINDOW:
            growing.crop(-1)
            library.crop(-1)
        elif step == "copy":
            growing = copy.deepcopy(growing)
        elif step == "reorder" and library.get_seq_length():
            growing.reorder_cache(torch.tensor([0]))
            library.reorder_cache(torch.tensor([0]))
        assert growing.get_seq_length() == library.get_seq_length()
        if library.get_seq_length():
            assert torch.equal(growing.keys, library.keys)
            assert torch.equal(growing.values, library.values)
            assert growing.allocated_bytes() >= library.keys.nbytes + library.values.nbytes


def test_what_was_shown_before_stays_as_it_was() -> None:
    layer = GrowingWindowLayer(_WINDOW)
    layer.update(torch.zeros(1, _HEADS, 2, _DIM), torch.zeros(1, _HEADS, 2, _DIM))
    seen = []
    for number in range(1, 40):
        states = torch.full((1, _HEADS, 1, _DIM), float(number))
        assert _add_token(layer, states, states) is not None
        seen.append((layer.keys, layer.keys.clone()))
    assert all(torch.equal(view, then) for view, then in seen)


def test_several_sequences_go_the_librarys_way() -> None:
    layer = GrowingWindowLayer(_WINDOW)
    layer.update(torch.zeros(2, _HEADS, 2, _DIM), torch.zeros(2, _HEADS, 2, _DIM))
    assert layer.claim_rows(1) is None
