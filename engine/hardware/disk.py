"""The disk behind a folder: its kind, name and free space."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from engine.hardware.surroundings import BoundedCalls, number_of, text_of

SYS = Path("/sys")
_NETWORK_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "sshfs", "fuse.sshfs", "afpfs", "webdav", "davfs", "ceph", "glusterfs")
)
_MEMORY_SYSTEMS = frozenset(("tmpfs", "ramfs"))
_HOST_SYSTEMS = frozenset(("9p", "drvfs", "virtiofs"))
"""File systems for folders of the host of a virtual machine; in WSL, of Windows."""
_TIMEOUT_S = 3.0
_bounded = BoundedCalls("disk")


class DiskKind(StrEnum):
    """Kinds of disks, by how they read."""

    NVME = "nvme"
    SSD = "ssd"
    HDD = "hdd"
    NETWORK = "network"
    MEMORY = "memory"
    HOST = "host"
    """A folder of the virtual machine's host: every read goes through both systems."""
    UNKNOWN = "unknown"


_NOT_BUILT_IN = ("/usb", "/mmc", "/session", "/virtual/")
"""Parts of the path in `/sys` of disks that may go: USB, cards, iSCSI, and what is made of a file or of the network."""


@dataclass(frozen=True, slots=True)
class DiskInfo:
    """The disk behind a folder; unknown values are None.

    Attributes:
        folder: the requested folder, or its nearest existing ancestor.
        model: the manufacturer's name.
        device: the system's name of the whole disk, such as `nvme0n1`.
        file_system: such as `ext4`.
    """

    folder: str
    kind: DiskKind
    total_bytes: int | None
    free_bytes: int | None
    model: str | None = None
    device: str | None = None
    file_system: str | None = None


def disk_info(folder: Path) -> DiskInfo | None:
    """The disk that holds `folder`, which need not exist yet; None if it does not respond (a lost network share)."""
    try:
        return _bounded(lambda: look(folder), _TIMEOUT_S)
    except (TimeoutError, OSError, ValueError):
        return None


def free_disk_bytes(folder: Path) -> int | None:
    """Free space of the disk that holds `folder`, which need not exist yet."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def look(folder: Path, sys_root: Path = SYS) -> DiskInfo:
    """`disk_info` without a timeout."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), Path(folder.anchor or "."))
    usage = shutil.disk_usage(existing)
    mount = _mount(existing)
    file_system = mount[1] if mount else None
    device = block_device(existing, sys_root, mount[0] if mount else None)
    kind, model = _kind(file_system, device)
    return DiskInfo(
        str(existing), kind, usage.total, usage.free, model, device.name if device else None, file_system
    )  # fmt: skip


def block_device(folder: Path, sys_root: Path = SYS, source: str | None = None) -> Path | None:
    """`/sys/block/NAME` of the whole disk that holds an existing folder, resolving partitions, encryption and LVM.

    Args:
        source: the mounted device, for file systems whose device number is no help (btrfs, overlays).
    """
    entry: Path | None = None
    if sys.platform != "win32":
        number = os.stat(folder).st_dev
        entry = sys_root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if entry is None or not entry.exists():
        entry = sys_root / "class" / "block" / Path(source or "").name if (source or "").startswith("/dev/") else None
    if entry is None or not entry.exists():
        return None
    device = entry.resolve()
    if (device / "partition").exists():
        device = device.parent
    for _ in range(8):  # a mapped device may have several below it: use the first
        below = sorted((device / "slaves").iterdir()) if (device / "slaves").is_dir() else []
        if not below:
            return device
        device = below[0].resolve()
        if (device / "partition").exists():
            device = device.parent
    return device


def stays_connected(path: Path, sys_root: Path = SYS) -> bool:
    """Whether an existing file is on a disk that is built into this machine, as far as the system tells: none that is
    plugged in or reached over a network.
    """
    try:
        device = block_device(path, sys_root)
    except OSError:
        return False
    return (
        device is not None
        and not any(part in f"{device}/" for part in _NOT_BUILT_IN)
        and number_of(device / "removable") == 0
    )


def _kind(file_system: str | None, device: Path | None) -> tuple[DiskKind, str | None]:
    if file_system in _NETWORK_SYSTEMS:
        return DiskKind.NETWORK, None
    if file_system in _MEMORY_SYSTEMS:
        return DiskKind.MEMORY, None
    if file_system in _HOST_SYSTEMS:
        return DiskKind.HOST, None
    if device is None:
        return DiskKind.UNKNOWN, None
    model = text_of(device / "device" / "model")
    if device.name.startswith("nvme"):
        return DiskKind.NVME, model
    if device.name.startswith(("vd", "xvd", "zram", "loop", "ram")):
        return DiskKind.UNKNOWN, model  # a virtual disk does not reveal the real one
    rotates = number_of(device / "queue" / "rotational")
    if rotates is None:
        return DiskKind.UNKNOWN, model
    return (DiskKind.HDD if rotates else DiskKind.SSD), model


def _mount(folder: Path) -> tuple[str, str] | None:
    """(device, file system) of the mount that contains the folder.

    On Windows, a mapped share has `remote` among its options.
    """
    place = folder.resolve()
    best: tuple[int, str, str] | None = None
    for part in psutil.disk_partitions(all=True):
        if place.is_relative_to(part.mountpoint) and (best is None or len(part.mountpoint) >= best[0]):
            system = "smbfs" if sys.platform == "win32" and "remote" in part.opts else part.fstype.lower()
            best = (len(part.mountpoint), part.device, system)
    return None if best is None else best[1:]
