"""Processor, disk and surroundings, read from made-up files of the kernel."""

import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.hardware import disk as disk_module
from engine.hardware.cpu import apple_cpu, bytes_of_size, linux_cpu, windows_cpu_of
from engine.hardware.disk import DiskKind, block_device, disk_info, look, stays_connected
from engine.hardware.surroundings import (
    BoundedCalls,
    number_of,
    output_of,
    surroundings,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def system_of(root: Path, cores: Sequence[int], **of_cpu: Sequence[str]) -> Path:
    """`/sys/devices/system/cpu` of logical CPUs on these cores, each two with a second-level cache of their own."""
    files = {"cpu/online": f"0-{len(cores) - 1}", "node/online": "0"}
    for cpu, core in enumerate(cores):
        here = f"cpu/cpu{cpu}"
        sharing = [str(other) for other, its in enumerate(cores) if its == core]
        files |= {
            f"{here}/topology/physical_package_id": "0",
            f"{here}/topology/core_id": str(core),
            f"{here}/cache/index1/level": "1",
            f"{here}/cache/index1/type": "Instruction",
            f"{here}/cache/index1/size": "64K",
            f"{here}/cache/index2/level": "2",
            f"{here}/cache/index2/type": "Unified",
            f"{here}/cache/index2/size": "1024K",
            f"{here}/cache/index2/shared_cpu_list": ",".join(sharing),
            f"{here}/cache/index3/level": "3",
            f"{here}/cache/index3/type": "Unified",
            f"{here}/cache/index3/size": "32M",
            f"{here}/cache/index3/shared_cpu_list": f"0-{len(cores) - 1}",
        }
        files |= {f"{here}/{name}": values[cpu] for name, values in of_cpu.items()}
    return write(root, files) / "cpu"


def test_cores_threads_and_caches(tmp_path: Path) -> None:
    system = system_of(tmp_path / "system", [0, 0, 1, 1, 2, 2, 3, 3])
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A processor\nflags\t\t: fpu avx2 fma avx512f made_up\n")
    found = linux_cpu(system, tmp_path / "nowhere", info)
    assert (found.name, found.physical_cores, found.logical_cores) == ("A processor", 4, 8)
    assert (found.performance_cores, found.efficiency_cores) == (None, None)
    assert (found.l2_bytes, found.l3_bytes) == (4 * 2**20, 32 * 2**20)
    assert found.instructions == ("avx2", "fma", "avx512f")
    assert found.numa_nodes == 1


def test_intels_two_kinds_of_cores(tmp_path: Path) -> None:
    system = system_of(tmp_path / "system", [0, 0, 4, 4, 8, 9, 10, 11])
    write(tmp_path, {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-7"})
    found = linux_cpu(system, tmp_path, tmp_path / "nothing")
    assert (found.performance_cores, found.efficiency_cores, found.physical_cores) == (2, 4, 6)


def test_arms_clusters(tmp_path: Path) -> None:
    system = system_of(tmp_path / "system", range(4), cpu_capacity=["400", "400", "1024", "1024"])
    found = linux_cpu(system, tmp_path / "nowhere", tmp_path / "nothing")
    assert (found.performance_cores, found.efficiency_cores) == (2, 2)


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    found = linux_cpu(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert found.logical_cores is not None
    assert (found.l2_bytes, found.l3_bytes, found.numa_nodes, found.instructions) == (None, None, None, ())


def test_an_apple_chip() -> None:
    found = apple_cpu(
        {
            "machdep.cpu.brand_string": "Apple M3 Pro",
            "hw.physicalcpu": "12",
            "hw.logicalcpu": "12",
            "hw.perflevel0.physicalcpu": "6",
            "hw.perflevel1.physicalcpu": "6",
            "hw.l2cachesize": "4194304",
            "hw.optional.arm64": "1",
            "hw.optional.arm.FEAT_DotProd": "1",
            "hw.optional.arm.FEAT_I8MM": "0",
        }
    )
    assert (found.performance_cores, found.efficiency_cores) == (6, 6)
    assert found.instructions == ("asimd", "asimddp")
    assert apple_cpu({}).physical_cores is None


def test_windowss_structures() -> None:
    def core(kind: int) -> bytes:
        return struct.pack("<II", 0, 48) + bytes((1, kind)) + bytes(38)

    def cache(level: int, nbytes: int, kind: int) -> bytes:
        return struct.pack("<II", 2, 56) + struct.pack("<BBHII", level, 8, 64, nbytes, kind) + bytes(36)

    topology = core(1) * 2 + core(0) * 4 + cache(2, 2**20, 0) * 3 + cache(3, 2**25, 0) + cache(2, 2**20, 1)
    found = windows_cpu_of(topology, frozenset({"avx2"}), "A processor")
    assert (found.performance_cores, found.efficiency_cores, found.physical_cores) == (2, 4, 6)
    assert (found.l2_bytes, found.l3_bytes, found.instructions) == (3 * 2**20, 2**25, ("avx2",))
    for cut in (b"", topology[:7], topology[:30], struct.pack("<II", 0, 0)):
        windows_cpu_of(cut, frozenset(), None)


def test_small_readers(tmp_path: Path) -> None:
    assert [bytes_of_size(text) for text in ("2048K", "32M", "7", "x", None)] == [2**21, 2**25, 7, None, None]
    (tmp_path / "number").write_text("0x10\n")
    assert number_of(tmp_path / "number") == 16
    assert number_of(tmp_path) is None
    assert output_of("there is no such program") is None


def sys_with(root: Path, folder: Path, name: str, files: dict[str, str]) -> Path:
    """`/sys` where the disk of `folder` is a partition of NAME."""
    number = os.stat(folder).st_dev
    disk = root / "devices" / name
    write(disk, {**files, f"{name}1/partition": "1"})
    link = root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(disk / f"{name}1")
    return root


@pytest.mark.skipif(not hasattr(os, "major"), reason="Linux's numbers of disks")
@pytest.mark.parametrize(
    ("name", "rotates", "kind"),
    [
        ("nvme0n1", "0", DiskKind.NVME),
        ("sda", "0", DiskKind.SSD),
        ("sda", "1", DiskKind.HDD),
        ("sda", "?", DiskKind.UNKNOWN),
        ("vda", "1", DiskKind.UNKNOWN),
    ],
)
def test_the_disk_behind_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rotates: str, kind: DiskKind
) -> None:
    monkeypatch.setattr(disk_module, "_mount", lambda folder: ("/dev/made-up", "ext4"))
    root = sys_with(tmp_path / "sys", tmp_path, name, {"queue/rotational": rotates, "device/model": "WD 850"})
    found = look(tmp_path / "not" / "yet", root)
    assert (found.kind, found.model, found.device) == (kind, "WD 850", name)
    assert found.folder == str(tmp_path)
    assert (found.free_bytes or 0) > 0


@pytest.mark.skipif(not hasattr(os, "major"), reason="Linux's numbers of disks")
def test_an_encrypted_disk_is_what_lies_below(tmp_path: Path) -> None:
    root = sys_with(tmp_path / "sys", tmp_path, "nvme1n1", {"queue/rotational": "0"})
    (link,) = (root / "dev" / "block").iterdir()
    partition = link.resolve()
    link.unlink()
    mapped = root / "devices" / "dm-0"
    (mapped / "slaves").mkdir(parents=True)
    (mapped / "slaves" / "nvme1n1p1").symlink_to(partition)
    link.symlink_to(mapped)
    found = block_device(tmp_path, root)
    assert found.name == "nvme1n1"


@pytest.mark.skipif(not hasattr(os, "major"), reason="Linux's numbers of disks")
@pytest.mark.parametrize(
    ("place", "removable", "stays"),
    [
        ("pci0000:00/nvme/nvme0/nvme0n1", "0", True),
        ("pci0000:00/ata1/host0/sda", "0", True),
        ("pci0000:00/ata1/host0/sda", "1", False),
        ("pci0000:00/usb2/2-1/host6/sdb", "0", False),
        ("pci0000:00/mmc_host/mmc0/mmcblk0", "0", False),
        ("platform/host4/session1/target4/sdc", "0", False),
        ("virtual/block/loop3", "0", False),
    ],
)
def test_a_disk_that_may_be_unplugged(tmp_path: Path, place: str, removable: str, stays: bool) -> None:
    root = tmp_path / "sys"
    write(root / "devices" / place, {"removable": removable})
    number = os.stat(tmp_path).st_dev
    link = root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / "devices" / place)
    assert stays_connected(tmp_path, root) is stays
    assert not stays_connected(tmp_path, tmp_path / "no-sys")
    assert not stays_connected(tmp_path / "gone", root)


@pytest.mark.parametrize(
    ("system", "kind"),
    [("nfs4", DiskKind.NETWORK), ("tmpfs", DiskKind.MEMORY), ("9p", DiskKind.HOST), ("zfs", DiskKind.UNKNOWN)],
)
def test_folders_without_a_disk_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, kind: DiskKind
) -> None:
    monkeypatch.setattr(disk_module, "_mount", lambda folder: ("made-up", system))
    assert look(tmp_path, tmp_path / "no-sys").kind == kind


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()
    monkeypatch.setattr(disk_module, "look", lambda folder: back.wait(30))
    monkeypatch.setattr(disk_module, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(disk_module, "_bounded", BoundedCalls("test-disk"))
    try:
        assert disk_info(tmp_path) is None
        assert disk_info(tmp_path) is None
    finally:
        back.set()


@pytest.mark.parametrize(
    ("release", "wsl"),
    [("6.1.0-18-amd64", None), ("5.15.133.1-microsoft-standard-WSL2", 2), ("4.4.0-19041-Microsoft", 1), ("", None)],
)
def test_windowss_linux(tmp_path: Path, release: str, wsl: int | None) -> None:
    (tmp_path / "release").write_text(release)
    (tmp_path / "cpuinfo").write_text("flags : fpu hypervisor")
    assert surroundings(tmp_path / "release", tmp_path / "cpuinfo").wsl == wsl
