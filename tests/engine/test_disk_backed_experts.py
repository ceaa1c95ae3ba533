"""Experts from slots over a disk: right whatever is there, in rounds, a layer ahead, predicted, and while slots go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.errors import EngineError
from engine.experts.executor import ExpertExecutor
from engine.experts.ram_tier import RamTier
from tests.engine.made_up_records import (
    LARGE,
    SMALL,
    contents_of,
    disk_of,
    flip,
    place_of,
    random_records,
    write_records,
)
from tests.engine.ram_tier_parts import arrived

LAYERS = 4
CONTENTS = contents_of([(8, SMALL), (8, SMALL), (3, LARGE), (8, SMALL)])
RECORDS = random_records(CONTENTS)
HIDDEN = 6


class Kernel:
    """What an expert makes of a token depends on every byte of its record."""

    def __init__(self, tier: RamTier, layer: int) -> None:
        self._records = tier.slots(layer).records
        self.calls: list[int] = []

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append(len(hidden_states))
        return hidden_states * digest(self._records[top_k_index[:, 0]])[:, None] * top_k_weights


def digest(records: torch.Tensor) -> torch.Tensor:
    places = torch.arange(records.shape[1]) % 251 + 1.0
    return (records.float() @ places) / records.shape[1] / 1000


class Listener:
    """Stands where a prefetcher would."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int], torch.Size]] = []

    def observe(self, layer: int, experts: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        assert hidden is not None
        self.told.append((layer, list(experts), hidden.shape))


class Model:
    """All layers over one tier."""

    def __init__(self, path: Path, slots: int) -> None:
        self.disk = disk_of(path, CONTENTS, readers=3)
        self.tier = RamTier(self.disk, budget_of(slots), at_least=1, policy="lru")
        self.listener = Listener()
        self.kernels = [Kernel(self.tier, layer) for layer in range(LAYERS)]
        self.layers = [
            ExpertExecutor(self.tier.source(layer, kernel), layer, self.listener, ahead=self.tier)
            for layer, kernel in enumerate(self.kernels)
        ]

    def close(self) -> None:
        self.tier.close()


def budget_of(slots: int) -> int:
    """Room for so many of the 24 small records, and for the large ones in proportion."""
    return slots * SMALL.nbytes + max(1, slots // 8) * LARGE.nbytes


def expected(layer: int, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for token, experts in enumerate(index.tolist()):
        for place, expert in enumerate(experts):
            if expert < CONTENTS.tensors[layer].num_experts:
                out[token] += weights[token, place] * digest(RECORDS[layer][expert][None]) * hidden[token]
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("converted") / "a.gguf"
    write_records(file, CONTENTS)
    return file


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    model = Model(path, 12)
    yield model
    model.close()


def check(model: Model, layer: int, tokens: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=draw)
    count = CONTENTS.tensors[layer].num_experts + 1  # one that is none
    index = torch.stack([torch.randperm(count, generator=draw)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3, generator=draw)
    torch.testing.assert_close(
        model.layers[layer](hidden, index, weights), expected(layer, hidden, index, weights), rtol=1e-4, atol=1e-4
    )


@given(
    slots=st.integers(1, 24),
    steps=st.lists(st.tuples(st.integers(1, 20), st.none() | st.integers(0, 24)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=8)
def test_any_steps_with_any_slots(path: Path, slots: int, steps: list[tuple[int, int | None]], seed: int) -> None:
    model = Model(path, slots)
    try:
        for step, (tokens, resized) in enumerate(steps):
            for layer in range(LAYERS):
                if resized is not None and layer == 1:
                    model.tier.resize(budget_of(resized))
                check(model, layer, tokens, seed + step)
        counters = model.tier.counters
        assert counters.failures == 0
        assert all(not group.pool._pins for group in model.tier._groups.values())
    finally:
        model.close()


def test_a_prompt_reads_the_next_layer_ahead_and_leaves_decoding_its_experts(model: Model) -> None:
    for layer in (3, 0):
        arrived(model.tier.acquire(layer, [0]))  # in use, as it were, by decoding
    tokens = torch.randn(40, HIDDEN)
    index = torch.arange(40)[:, None] % 8
    for layer in (0, 1):
        model.layers[layer](tokens, index, torch.ones(40, 1))
    counters = model.tier.counters
    assert counters.prefetched
    assert counters.prefetches_used
    assert {0} <= model.tier.resident(3).keys()
    assert model.listener.told == []


def test_a_step_that_fails_gives_all_slots_back(tmp_path: Path) -> None:
    write_records(tmp_path / "b.gguf", CONTENTS)
    flip(tmp_path / "b.gguf", place_of(CONTENTS, 0, 5) + 3)
    model = Model(tmp_path / "b.gguf", 4)
    try:
        for tokens in (1, 40):
            with pytest.raises(EngineError, match="Expert 5"):
                model.layers[0](torch.randn(tokens, HIDDEN), torch.arange(8).expand(tokens, 8), torch.ones(tokens, 8))
        assert all(not group.pool._pins for group in model.tier._groups.values())
        check(model, 1, 3, 0)
    finally:
        model.close()
