"""Limits of a Linux container: `psutil` reports the whole machine, and allocating that gets us killed."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def memory_limits(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """(bytes that this process's control groups allow, bytes still available); None if unlimited."""
    limits: list[tuple[int, int]] = []
    for folder in _own_groups(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= 2**60:  # version 1 writes "unlimited" as a number near 2^63
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Cached file pages count as used but are reclaimed on demand.
        reclaimable = _statistic(folder / "memory.stat", ("inactive_file", "total_inactive_file"))
        limits.append((limit, max(0, limit - used + min(used, reclaimable))))
    if not limits:
        return None, None
    return min(limit for limit, _ in limits), min(free for _, free in limits)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPU time, in CPUs, that this process's control groups allow; None if unlimited."""
    quotas = []
    for folder in _own_groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(word.isdecimal() for word in words) and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas) if quotas else None


def _own_groups(root: Path, controller: str) -> list[Path]:
    """Folders of our control group and its ancestors, in the v2 tree or in the v1 tree of `controller`."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tree = root / controller if controllers else root
        path = tree / group.strip("/")
        folders += [path, *(parent for parent in path.parents if parent.is_relative_to(tree))]
    # Inside a container this may be the host's path, of which only the root is visible.
    return [folder for folder in dict.fromkeys([*folders, root, root / controller]) if folder.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, names: tuple[str, ...]) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name in names and value.isdecimal():
            return int(value)
    return 0
