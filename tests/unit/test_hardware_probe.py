"""What the machine is found to have, and what a container is found to allow."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from engine.hardware import surroundings
from engine.hardware.probe import free_disk_bytes, probe, usable_cpus


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
