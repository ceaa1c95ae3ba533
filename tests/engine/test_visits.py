"""A step's visits: computed in any portions and any order, the sum is the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.disk_backed import visits_of

EXPERTS, HIDDEN = 9, 4
SCALES = torch.arange(1.0, EXPERTS + 1)


def kernel(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    assert top_k_index.shape == top_k_weights.shape == (len(hidden_states), 1)
    return hidden_states * SCALES[EXPERTS - 1 - top_k_index[:, 0]][:, None]


@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_portions(data: st.DataObject, tokens: int, width: int, distinct: bool) -> None:
    ids = st.integers(0, EXPERTS + 1)  # the last two are no experts
    rows = st.lists(ids, min_size=width, max_size=width, unique=distinct)
    index = torch.tensor(data.draw(st.lists(rows, min_size=tokens, max_size=tokens)))
    hidden, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, width)
    visits = visits_of(hidden, index, EXPERTS)
    assert list(visits.spans) == sorted({expert for expert in index.flatten().tolist() if expert < EXPERTS})
    left = data.draw(st.permutations(list(visits.spans)))
    slots = {expert: EXPERTS - 1 - expert for expert in left}
    while left:
        count = data.draw(st.integers(1, len(left)))
        visits.compute(kernel, slots, left[:count])
        left = left[count:]
    scales = torch.cat([SCALES, torch.zeros(2)])[index]
    expected = (weights * scales).sum(1, keepdim=True) * hidden
    torch.testing.assert_close(visits.weighted_sum(weights), expected)
