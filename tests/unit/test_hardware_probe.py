"""What this machine has: its probe, kinds of cores, and cards as Windows tells of them."""

import ctypes
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.errors import ErrorCode
from engine.devices import host_memory
from engine.hardware import cpu as cpu_module
from engine.hardware import dxgi, surroundings
from engine.hardware.cpu import compute_cpus, compute_threads, fast_cpus
from engine.hardware.dxgi import AdapterDesc, MemoryInfo, ProcessMemory, adapter_of, adapters
from engine.hardware.probe import BusyLately, OtherPrograms, free_disk_bytes, probe, usable_cpus
from engine.planner.placement import Budgets, NotEnoughRamError, require_ram
from engine.verbs.options import parse_size


def test_this_machine() -> None:
    found = probe()
    assert found.os
    assert 1 <= found.usable_cpus <= (os.cpu_count() or 1)
    assert 0 < found.ram_available_bytes <= found.ram_bytes <= psutil.virtual_memory().total
    assert found.gpus or found.gpu_note
    assert found.models_disk_free_bytes is None or found.models_disk_free_bytes > 0
    json.dumps(asdict(found))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_affinity_is_honoured() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert (free_disk_bytes(tmp_path / "not" / "yet") or 0) > 0


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_container_limits_version_2(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "memory.max": "1000000\n",
            "memory.current": "600000\n",
            "memory.stat": "anon 1\ninactive_file 50000\n",
            "cpu.max": "150000 100000\n",
        },
    )
    assert surroundings.memory_limits(root) == (1_000_000, 450_000)
    assert surroundings.cpu_quota(root) == 1.5


def test_container_limits_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": "2000000\n",
            "memory/memory.usage_in_bytes": "500000\n",
            "memory/memory.stat": "total_inactive_file 0\n",
            "cpu/cpu.cfs_quota_us": "200000\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert surroundings.memory_limits(root) == (2_000_000, 1_500_000)
    assert surroundings.cpu_quota(root) == 2.0


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n", "cpu.max": "max 100000\n"},
        {"memory/memory.limit_in_bytes": "9223372036854771712\n", "cpu/cpu.cfs_quota_us": "-1\n"},
        {"memory.max": "garbage", "cpu.max": "1 0"},
    ],
)
def test_no_limits(tmp_path: Path, files: dict[str, str]) -> None:
    root = write(tmp_path, files)
    assert surroundings.memory_limits(root) == (None, None)
    assert surroundings.cpu_quota(root) is None


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


GIB = 2**30
_FAILED, _NOT_FOUND = -2147467259, -2005270526


class Interface:
    """An object whose functions are called by their places."""

    def __init__(self, places: dict[int, tuple[Callable[..., int], list[Any]]]) -> None:
        self.references = 0
        self._kept: list[Any] = []
        table = (ctypes.c_void_p * 20)()
        for place, (function, kinds) in {**places, 2: (self._release, [])}.items():
            made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(function)
            self._kept.append(made)
            table[place] = ctypes.cast(made, ctypes.c_void_p)
        self._kept.append(table)
        self._object = ctypes.c_void_p(ctypes.addressof(table))

    def given(self, to: int) -> int:
        self.references += 1
        ctypes.c_void_p.from_address(to).value = ctypes.addressof(self._object)
        return 0

    def _release(self, _this: int) -> int:
        self.references -= 1
        return self.references


class Card(Interface):
    """A card of Windows 10, or of an older one."""

    def __init__(self, name: str, luid: int, *, display: bool = False, is_old: bool = False) -> None:
        self.output = Interface({})
        self.name, self.luid, self.display, self.is_old = name, luid, display, is_old
        self.memory = {0: (10 * GIB, 9 * GIB), 1: (16 * GIB, 2 * GIB)}
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        super().__init__(
            {
                0: (self._query, [pointer, pointer]),
                7: (self._output, [number, pointer]),
                10: (self._describe, [pointer]),
                14: (self._memory, [number, number, pointer]),
            }
        )

    def _query(self, _this: int, which: int, to: int) -> int:
        guid = uuid.UUID(bytes_le=ctypes.string_at(which, 16))
        assert str(guid) == "645967a4-1392-4310-a798-8053ce3e93fd"
        return _FAILED if self.is_old else self.given(to)

    def _output(self, _this: int, number: int, to: int) -> int:
        return self.output.given(to) if self.display and number == 0 else _NOT_FOUND

    def _describe(self, _this: int, to: int) -> int:
        description = AdapterDesc.from_address(to)
        characters = self.name.encode("utf-16-le")
        ctypes.memmove(description.description, characters, len(characters))
        description.luid[:] = list(self.luid.to_bytes(8, "little"))
        return 0

    def _memory(self, _this: int, node: int, segment: int, to: int) -> int:
        assert node == 0
        if segment not in self.memory:
            return _FAILED
        info = MemoryInfo.from_address(to)
        info.budget, info.used = self.memory[segment]
        return 0


class Library:
    """`dxgi.dll`."""

    def __init__(self, *cards: Card, fails: bool = False) -> None:
        self.cards, self.fails = cards, fails
        self.factory = Interface({12: (self._enumerate, [ctypes.c_uint32, ctypes.c_void_p])})

    def CreateDXGIFactory1(self, guid: Any, to: Any) -> int:
        assert uuid.UUID(bytes_le=bytes(guid)) == uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387")
        return _FAILED if self.fails else self.factory.given(ctypes.addressof(to._obj))

    def _enumerate(self, _this: int, number: int, to: int) -> int:
        return self.cards[number].given(to) if number < len(self.cards) else _NOT_FOUND

    @property
    def references(self) -> int:
        return self.factory.references + sum(card.references + card.output.references for card in self.cards)


def test_what_this_process_uses_of_a_card() -> None:
    card = Card("NVIDIA GeForce RTX 4090", 0x1234, display=True)
    library = Library(Card("AMD Radeon(TM) Graphics", 7), card)
    found = adapter_of((0x1234).to_bytes(8, "little"), "", library)
    assert (found.name, found.shows_desktop) == ("NVIDIA GeForce RTX 4090", True)
    assert found.memory() == ProcessMemory(10 * GIB, 9 * GIB, 2 * GIB)
    del card.memory[1]
    assert found.memory() is None
    assert library.references == 1
    found.close()
    assert library.references == 0


def test_by_name_only_where_there_is_one_of_it() -> None:
    library = Library(Card("Arc B580", 1), Card("RTX 3060", 2), Card("RTX 3060", 3))
    found = adapter_of(None, "Arc B580", library)
    assert not found.shows_desktop
    found.close()
    assert adapter_of(None, "RTX 3060", library) is None
    assert adapter_of(b"\0" * 8, "Arc B580", library) is None
    assert library.references == 0


def test_an_older_windows_says_nothing() -> None:
    assert list(adapters(Library(Card("RTX 3060", 2, is_old=True)))) == []
    assert list(adapters(Library(fails=True))) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is one")
def test_elsewhere_there_is_no_such_library() -> None:
    assert list(adapters()) == []


def test_a_system_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise OSError

    monkeypatch.setattr(dxgi.platform, "system", lambda: "Windows")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert list(adapters()) == []


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


class Machine:
    """Two CPUs whose counters the test moves on."""

    def __init__(self) -> None:
        self.user = [0.0, 0.0]
        self.idle = [0.0, 0.0]
        self.waiting = [0.0, 0.0]
        self.ours: dict[int, float] = {7: 0.0}

    def cpu_times(self) -> list[Any]:
        return [_times(*each) for each in zip(self.user, self.idle, self.waiting, strict=True)]

    def watched(self, usable: Iterable[int] | None = None) -> OtherPrograms:
        return OtherPrograms(
            lambda: tuple(self.ours), cpu_times=self.cpu_times, process_s=self.ours.get, usable=lambda: usable
        )

    def spend(self, user: list[float], idle: list[float], ours: float, waiting: float = 0.0) -> None:
        self.user = [a + b for a, b in zip(self.user, user, strict=True)]
        self.idle = [a + b for a, b in zip(self.idle, idle, strict=True)]
        self.waiting[0] += waiting
        self.ours[7] += ours


class _times(tuple[float, ...]):  # noqa: N801  # as psutil's: a tuple with names
    def __new__(cls, user: float, idle: float, iowait: float) -> "_times":
        made = super().__new__(cls, (user, idle, iowait))
        vars(made).update(user=user, idle=idle, iowait=iowait)
        return made


@pytest.mark.parametrize(
    ("user", "idle", "ours", "share"),
    [
        ([1.0, 1.0], [0.0, 0.0], 2.0, 0.0),  # all is ours
        ([1.0, 1.0], [0.0, 0.0], 0.12, 0.94),
        ([0.0, 0.0], [1.0, 1.0], 0.0, 0.0),
        ([0.5, 0.0], [0.5, 1.0], 0.1, 0.2),
        ([0.5, 0.5], [0.5, 0.5], 1.2, 0.0),  # counters of two clocks: never less than nothing
    ],
)
def test_what_is_busy_and_not_ours_is_others(user: list[float], idle: list[float], ours: float, share: float) -> None:
    machine = Machine()
    taken = machine.watched().watch()
    machine.spend(user, idle, ours)
    assert taken() == pytest.approx(share)


def test_a_stretch_is_told_as_far_as_it_has_come() -> None:
    machine = Machine()
    taken = machine.watched().watch()
    assert taken() == 0.0  # no time has passed
    machine.spend([1.0, 1.0], [0.0, 0.0], 0.0)
    assert taken() == pytest.approx(1.0)
    machine.spend([0.0, 0.0], [1.0, 1.0], 0.0)
    assert taken() == pytest.approx(0.5)


def test_a_system_that_tells_nothing_is_quiet() -> None:
    def fails() -> list[SimpleNamespace]:
        raise OSError

    taken = OtherPrograms(lambda: (), cpu_times=fails).watch()
    assert taken() == 0.0


def test_whether_it_was_busy_of_late_is_looked_up_now_and_then() -> None:
    machine, now_s = Machine(), 0.0
    is_busy_lately = BusyLately(machine.watched(), every_s=2.0, clock=lambda: now_s)
    assert not is_busy_lately()
    machine.spend([1.0, 1.0], [0.0, 0.0], 0.0)
    assert not is_busy_lately()  # it is too soon to say
    now_s = 2.5
    assert is_busy_lately()
    machine.spend([0.0, 0.0], [1.0, 1.0], 0.0)
    assert is_busy_lately()
    now_s = 5.0
    assert not is_busy_lately()
