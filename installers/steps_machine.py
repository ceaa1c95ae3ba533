"""Checks of this machine: display, graphics driver, disk space, system libraries and programs."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

from steps_console import SetupError, Step, run_logged, tail

# What Qt's window and its X11 plugin load on Linux, and the Debian package that holds it.
WINDOW_LIBRARIES = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libX11-xcb.so.1": "libx11-xcb1",
    "libdbus-1.so.3": "libdbus-1-3",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-render.so.0": "libxcb-render0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-shm.so.0": "libxcb-shm0",
    "libxcb-sync.so.1": "libxcb-sync1",
    "libxcb-util.so.1": "libxcb-util1",
    "libxcb-xfixes.so.0": "libxcb-xfixes0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
    "libxkbcommon.so.0": "libxkbcommon0",
}
# Builds the fast CPU kernels; without it PyTorch's operators are used, several times slower.
COMPILER = {"c++": "g++"}
# What the end-to-end tests of the real window need: a private X server, keys and clicks for it, and a private bus on
# which to see the window as a screen reader does.
E2E_PROGRAMS = {"Xvfb": "xvfb", "xdotool": "xdotool", "dbus-daemon": "dbus"}


def has_display() -> bool:
    """Whether a window can be shown.  An explicitly set Qt platform counts as one."""
    if platform.system() != "Linux":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "QT_QPA_PLATFORM"))


def has_compiler() -> bool:
    """Whether there is a C++ compiler.  On a Mac without Apple's tools, `c++` is a stub that offers to install them."""
    if platform.system() == "Darwin":
        found = subprocess.run(["xcode-select", "-p"], capture_output=True, check=False)
        return found.returncode == 0
    return bool(os.environ.get("CXX")) or any(map(shutil.which, ("c++", "g++", "clang++")))


def need_disk(folder: Path, gigabytes: float, what: str) -> None:
    """
    Raises:
        SetupError: if the disk under `folder` has less than that free.
    """
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise SetupError(
            f"{what} needs about {gigabytes:.0f} GB of disk, and {folder} has {free:.1f} GB free: "
            "free some space and run the same command again."
        )


def need_libraries(libraries: dict[str, str], what: str, log: Path) -> None:
    """Installs missing libraries if permitted.

    Raises:
        SetupError: if some are still missing; with the command that installs them.
    """
    if platform.system() != "Linux":
        return
    missing = missing_libraries(libraries)
    if missing:
        install_packages(missing, "{} needs {}".format(what, ", ".join(missing)), log)


def want_programs(programs: dict[str, str], what: str, log: Path) -> None:
    """Installs missing programs if permitted; otherwise reports that `what` will be skipped, and the remedy."""
    missing = {name: package for name, package in programs.items() if shutil.which(name) is None}
    if platform.system() != "Linux" or not missing:
        return
    try:
        install_packages(missing, "For {} there is no {}".format(what, " or ".join(missing)), log)
    except SetupError as stopped:
        print(f"{stopped}\nContinuing without {what}.", flush=True)


def missing_libraries(libraries: dict[str, str]) -> dict[str, str]:
    missing = {}
    for library, package in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing[library] = package
    return missing


def install_packages(missing: dict[str, str], complaint: str, log: Path) -> None:
    """Installs Debian packages as root; `missing` maps what is missing to its package.

    Raises:
        SetupError: if this is not Debian or not root, or apt-get fails.
    """
    packages = sorted(set(missing.values()))
    if not (may_install_packages() and is_debian(os_release())):
        raise SetupError(f"{complaint}: {how_to_install(packages, is_debian(os_release()))}")
    variables = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=120"]
    with Step("Installing {} with apt-get".format(", ".join(packages))) as step:
        run_logged(step, [*apt, "update"], log, variables)  # if it fails, the existing lists may suffice
        install = [*apt, "install", "--yes", "--no-install-recommends", *packages]
        code, output = run_logged(step, install, log, variables)
        if code != 0:
            raise SetupError(f"{complaint}, and apt-get could not install it.  {tail(output, log)}")


def how_to_install(packages: list[str], on_debian: bool) -> str:
    if on_debian:
        return "install it with `sudo apt-get install {}`, then run the same command again.".format(" ".join(packages))
    return (
        "install it with your system's package manager (Debian's names: {}), then run the same command again.".format(
            " ".join(packages)
        )
    )


def may_install_packages() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get") is not None


def os_release() -> str:
    try:
        return Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return ""


def is_debian(release: str) -> bool:
    """Whether /etc/os-release is that of Debian or a descendant, such as Ubuntu."""
    names = set()
    for line in release.splitlines():
        key, _, value = line.partition("=")
        if key in ("ID", "ID_LIKE"):
            names.update(value.strip().strip('"').split())
    return "debian" in names or "ubuntu" in names
