"""A step's visits: computed in any portions, in any order and anywhere, the sum is the same."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts.executor import PartialSums, Routing

EXPERTS, HIDDEN = 9, 4
SCALES = torch.arange(1.0, EXPERTS + 1)


def kernel(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    assert top_k_index.shape == top_k_weights.shape == (len(hidden_states), 1)
    return hidden_states * SCALES[EXPERTS - 1 - top_k_index[:, 0]][:, None]


@given(st.data(), st.integers(1, 5), st.integers(1, 8), st.booleans())
@settings(deadline=None, max_examples=100)
def test_any_portions(data: st.DataObject, tokens: int, width: int, distinct: bool) -> None:
    ids = st.integers(0, EXPERTS + 1)  # the last two are no experts
    choices = st.lists(ids, min_size=width, max_size=width, unique=distinct)
    index = torch.tensor(data.draw(st.lists(choices, min_size=tokens, max_size=tokens)))
    hidden, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, width)
    routing = Routing(index, EXPERTS)
    assert routing.experts == sorted({expert for expert in index.flatten().tolist() if expert < EXPERTS})
    rows = torch.full((index.numel(), HIDDEN), torch.nan)  # whatever it holds must not matter
    sums = PartialSums(hidden, weights, routing, rows)
    left = data.draw(st.permutations(routing.experts))
    slots = {expert: EXPERTS - 1 - expert for expert in left}
    while left:
        count, most = data.draw(st.integers(1, len(left))), data.draw(st.integers(1, 8))
        some = left[:count]
        where = data.draw(st.sampled_from(["in place", "on the host", "on the device"]))
        if where == "in place":
            sums.on_host(kernel, hidden, some, slots, most=most)
        elif where == "on the host":
            out = torch.empty(sum(map(routing.tokens, some)), HIDDEN)
            sums.on_host(kernel, hidden, some, slots, out, most)
            sums.add(out, some)()
        else:
            sums.on_device(kernel, {expert: slots[expert] for expert in some})()
        left = left[count:]
    sums.finish()()
    scales = torch.cat([SCALES, torch.zeros(2)])[index]
    expected = (weights * scales).sum(1, keepdim=True) * hidden
    torch.testing.assert_close(sums.result, expected)
