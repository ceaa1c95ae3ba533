"""A sliding window that grows in place against the library's, whatever is done to both."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicSlidingWindowLayer

from engine.runtime.kv.growing import GrowingWindowLayer

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
