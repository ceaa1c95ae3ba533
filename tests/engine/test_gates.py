"""Every family's routers, asked by themselves: they answer as they do in the model, and nobody notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.experts.sites import find_sites
from engine.runtime.load.foresight import find_gates
from tests.combinations import some
from tests.engine.tiny_configs import ADAPTED, DENSE, FAMILIES
from tests.engine.tiny_families import tiny_model

WANT_MORE = {"afmoe", "deepseek_v4", "hy_v3", "inkling_mm_model", "inkling_text", "lfm2_moe", "minimax_m2", "zaya"}
WANT_MORE |= {"smallthinker"}
"""Routers that take another input, or answer in another way."""
HIDDEN_DIFFERS = {"muse_spark"}
"""The experts get something narrower than the router."""
TOKENS = torch.tensor([[5, 17, 100, 33]])


def sites_of(model: Any) -> Any:
    return find_sites(model, lambda name, parameter: parameter.dtype)


@pytest.mark.parametrize("family", some([family for family in FAMILIES if family not in DENSE], first=5))
def test_asked_early_a_router_chooses_as_it_does(family: str) -> None:
    model = tiny_model(family)
    sites = sites_of(model)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def listen(name: str) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden, index, *_ = [*arguments, *keywords.values()]
            seen[name] = hidden.reshape(-1, hidden.shape[-1]), index

        return hook

    for site in sites:
        site.module.register_forward_pre_hook(listen(site.name), with_kwargs=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gates = find_gates(model, sites)
    assert len(gates) == len(sites)
    assert all(gate is None for gate in gates) == (family in WANT_MORE | HIDDEN_DIFFERS)
    with torch.no_grad():
        model(input_ids=TOKENS)
    for site, gate in zip(sites, gates, strict=True):
        if gate is None or site.name not in seen:
            continue
        hidden, index = seen[site.name]
        logits, chosen = gate(hidden)
        assert logits.shape == (len(hidden), site.num_experts)
        assert [set(row) for row in chosen.tolist()] == [set(row) for row in index.tolist()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", sorted(ADAPTED))
def test_families_of_another_kind_are_no_trouble(family: str) -> None:
    model = tiny_model(family)
    for gate in find_gates(model, sites_of(model)):
        if gate is not None:
            assert gate(torch.zeros(1, 32))[1].shape[0] == 1
