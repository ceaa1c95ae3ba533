"""Whether a model fits is said with figures, before anything is allocated."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.common.errors import ErrorCode
from engine.devices import host_memory
from engine.hardware import surroundings
from engine.planner.placement import Budgets, NotEnoughRamError, require_ram
from engine.verbs.options import parse_size

FREE = 8 * 10**9


def test_free_memory_is_cut_to_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_memory.available_ram() > 0
    monkeypatch.setattr(surroundings, "memory_limits", lambda in_use: (5000, 700 - in_use))
    assert host_memory.available_ram() == 700


def test_mapped_files_are_used_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surroundings.psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    monkeypatch.setattr(surroundings, "memory_limits", lambda in_use: (None, None))
    mapped = 2**30 - 1
    monkeypatch.setattr(surroundings, "mapped_bytes", lambda: mapped)
    surroundings.count_as_used(3000)
    try:
        assert host_memory.available_ram() == FREE - 3000
        mapped = 2**30 + 5000  # by another program too
        assert host_memory.available_ram() == FREE - 5000
    finally:
        surroundings.count_as_used(-3000)
    mapped = 7 * 10**8
    assert host_memory.available_ram() == FREE
    monkeypatch.undo()
    for name, text in (("memory.max", "9000"), ("memory.current", "8000"), ("memory.stat", "inactive_file 6000\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(surroundings, "_own_groups", lambda *_: [tmp_path])
    assert surroundings.memory_limits() == (9000, 7000)
    assert surroundings.memory_limits(in_use=4000) == (9000, 3000)
    assert surroundings.memory_limits(in_use=7000) == (9000, 1000)


def test_what_all_programs_have_mapped_is_read_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMapped:          1204 kB\nShmem: 7 kB\n")
    assert surroundings.mapped_bytes(tmp_path / "meminfo") == 1197 * 1024
    assert surroundings.mapped_bytes(tmp_path / "none") == 0


def test_refusal_names_both_figures() -> None:
    require_ram("small", 2 * 10**9, Budgets(FREE))
    with pytest.raises(NotEnoughRamError) as caught:
        require_ram("big", 61 * 10**9, Budgets(FREE))
    assert (caught.value.code, caught.value.needed) == (ErrorCode.NOT_ENOUGH_MEMORY, 61 * 10**9)
    assert "big needs 61.6 GB" in caught.value.message
    assert "8.0 GB are free" in caught.value.message


@pytest.mark.parametrize(
    ("needed", "budget"), [(1_200_000, 1_100_000), (10**6 + 1, 10**6), (61_520_000_000, 61_480_000_000)]
)
def test_a_budget_that_is_too_small_by_little_is_told_from_what_is_needed(needed: int, budget: int) -> None:
    with pytest.raises(NotEnoughRamError) as caught:
        require_ram("model", needed, Budgets(2 * needed + 2**31, budget))
    sizes = re.findall(r"[\d.,]+ (?:kB|MB|GB)", caught.value.message)
    assert len(sizes) == 2
    said = [parse_size(size) for size in sizes]
    assert said[0] >= needed  # who allows as much as is said to be needed has allowed enough
    assert said[1] <= budget
