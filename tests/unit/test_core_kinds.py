"""How many threads compute: on processors with two kinds of cores, with SMT, in containers, under an affinity."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware import cpu as cpu_module
from engine.hardware.cpu import compute_cpus, compute_threads, fast_cpus


def _write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def _machine(folder: Path, cores: list[int], *, packages: int = 1, **told: list[int]) -> Path:
    """A tree like `/sys/devices`: the core that each logical CPU belongs to, and what else is told of each CPU."""
    cpus = folder / "system" / "cpu"
    _write(cpus / "online", f"0-{len(cores) - 1}")
    for cpu, core in enumerate(cores):
        _write(cpus / f"cpu{cpu}" / "topology" / "core_id", core)
        _write(cpus / f"cpu{cpu}" / "topology" / "physical_package_id", cpu * packages // len(cores))
        for name, values in told.items():
            _write(cpus / f"cpu{cpu}" / name.replace("__", "/"), values[cpu])
    return folder


def _alder_lake(folder: Path) -> Path:
    """Two fast cores of two threads each, then four frugal ones."""
    machine = _machine(folder, [0, 0, 4, 4, 8, 9, 10, 11])
    _write(machine / "cpu_core" / "cpus", "0-3")
    _write(machine / "cpu_atom" / "cpus", "4-7")
    return machine


def test_an_intel_hybrid_computes_on_its_fast_cores(tmp_path: Path) -> None:
    machine = _alder_lake(tmp_path)
    assert compute_cpus(frozenset(range(8)), machine) == (0, 2)


def test_an_affinity_to_frugal_cores_is_kept_to(tmp_path: Path) -> None:
    machine = _alder_lake(tmp_path)
    assert compute_cpus(frozenset({5, 6, 7}), machine) == (5, 6, 7)


def test_an_affinity_to_the_second_threads_of_cores_is_kept_to(tmp_path: Path) -> None:
    machine = _alder_lake(tmp_path)
    assert compute_cpus(frozenset({1, 2, 3, 4}), machine) == (1, 2)


def test_arm_cores_differ_in_capacity(tmp_path: Path) -> None:
    three_kinds = _machine(tmp_path, list(range(8)), cpu_capacity=[250, 250, 250, 250, 800, 800, 800, 1024])
    assert fast_cpus(three_kinds) == {4, 5, 6, 7}
    assert compute_cpus(frozenset(range(8)), three_kinds) == (4, 5, 6, 7)


def test_clocks_tell_where_nothing_else_does(tmp_path: Path) -> None:
    clocks = [4_700_000, 4_700_000, 2_400_000, 2_400_000]
    assert fast_cpus(_machine(tmp_path, [0, 1, 2, 3], cpufreq__cpuinfo_max_freq=clocks)) == {0, 1}


def test_favoured_cores_are_no_other_kind(tmp_path: Path) -> None:
    clocks = [5_700_000, 5_500_000, 5_200_000, 5_200_000]
    machine = _machine(tmp_path, [0, 1, 2, 3], cpufreq__cpuinfo_max_freq=clocks)
    assert not fast_cpus(machine)
    assert compute_cpus(frozenset(range(4)), machine) == (0, 1, 2, 3)


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    neighbours = _machine(tmp_path / "a", [0, 0, 1, 1, 2, 2])
    assert compute_cpus(frozenset(range(6)), neighbours) == (0, 2, 4)
    spread = _machine(tmp_path / "b", [0, 1, 2, 0, 1, 2])
    assert compute_cpus(frozenset(range(6)), spread) == (0, 1, 2)


def test_cores_of_two_sockets_may_have_the_same_number(tmp_path: Path) -> None:
    assert len(compute_cpus(frozenset(range(4)), _machine(tmp_path, [0, 1, 0, 1], packages=2))) == 4


def test_without_a_topology_every_allowed_cpu_counts(tmp_path: Path) -> None:
    assert compute_cpus(frozenset({2, 5}), tmp_path) == (2, 5)


@given(
    cpus=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=12),
    chosen=st.sets(st.integers(0, 11), min_size=1),
)
def test_only_allowed_cpus_are_chosen_and_no_core_twice(
    tmp_path_factory: pytest.TempPathFactory, cpus: list[tuple[int, bool]], chosen: set[int]
) -> None:
    cores = [core for core, _ in cpus]
    capacity = [1024 if fast else 300 for _, fast in cpus]
    machine = _machine(tmp_path_factory.mktemp("machine"), cores, cpu_capacity=capacity)
    allowed = frozenset(cpu for cpu in chosen if cpu < len(cpus)) or frozenset({0})
    picked = compute_cpus(allowed, machine)
    assert picked
    assert set(picked) <= allowed
    assert len({cores[cpu] for cpu in picked}) == len(picked)
    if any(capacity[cpu] == 1024 for cpu in allowed):
        assert all(capacity[cpu] == 1024 for cpu in picked)


@pytest.mark.parametrize(("quota", "threads"), [(None, 4), (8.0, 4), (2.5, 2), (1.0, 1), (0.3, 1)])
def test_a_container_gets_no_more_threads_than_its_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(cpu_module, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpu_module, "compute_cpus", lambda allowed: tuple(sorted(allowed)))
    monkeypatch.setattr(cpu_module.platform, "system", lambda: "Linux")
    assert compute_threads(frozenset(range(4))) == threads


@pytest.mark.parametrize(("told", "threads"), [("6", 6), ("12", 8), ("", 4)])
def test_a_mac_computes_on_its_fast_cores(monkeypatch: pytest.MonkeyPatch, told: str, threads: int) -> None:
    monkeypatch.setattr(cpu_module.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(cpu_module, "output_of", lambda *_: told or None)
    monkeypatch.setattr(cpu_module.psutil, "cpu_count", lambda logical: 4)
    assert compute_threads(frozenset(range(8)), quota=100.0) == threads
