"""Whether a model fits is said with figures, before anything is allocated."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, ErrorCode
from engine.runtime import memory


def test_free_memory_is_cut_to_the_budget_and_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available_ram() > 0
    assert memory.available_ram(1000) == 1000
    monkeypatch.setattr(memory, "memory_limits", lambda: (5000, 700))
    assert memory.available_ram() == 700


def test_refusal_names_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_ram", lambda: 8 * 10**9)
    memory.require_ram("small", 2 * 10**9)
    with pytest.raises(EngineError) as caught:
        memory.require_ram("big", 61 * 10**9)
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert "big needs 61.5 GB" in caught.value.message
    assert "8.0 GB are free" in caught.value.message


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_ram", lambda: 8 * 10**9)
    memory.require_ram("model", 2 * 10**9, budget=3 * 10**9)
    with pytest.raises(EngineError) as caught:
        memory.require_ram("model", 2 * 10**9, budget=10**9)
    assert caught.value.code is ErrorCode.NOT_ENOUGH_MEMORY
    assert "budget" in caught.value.message


@pytest.mark.parametrize(("count", "text"), [(85_000_000, "85 MB"), (12_340_000_000, "12.3 GB"), (3, "1 MB")])
def test_sizes_for_people(count: int, text: str) -> None:
    assert memory.gigabytes(count) == text
