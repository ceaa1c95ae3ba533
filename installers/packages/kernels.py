"""`switchyard-kernels`: the CPU's kernels, compiled for each platform; users have no compiler.

Zig is the cross compiler: Clang with the headers and libraries of all platforms. Each library has all instruction sets
of its processor, of which the engine takes the best that works.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from engine.kernels.native.build import BuildError, Compiler, compile_sources, library_name
from packages.project import CHECKOUT, PackagingError, Project, read_project
from packages.wheels import wheel_of

sys.path.insert(0, str(CHECKOUT))

PACKAGE = "switchyard_kernels"


@dataclass(frozen=True)
class Platform:
    """Where a package runs.

    Attributes:
        name: in file names.
        zig: Zig's name, with the oldest C library.
        machine: as Python's `platform.machine()` names it there, in lower case.
        wheel: the wheels' tag.
        suffix: of libraries.
    """

    name: str
    zig: str
    machine: str
    wheel: str
    suffix: str = ".so"

    @property
    def is_windows(self) -> bool:
        """Whether it is Windows."""
        return self.suffix == ".dll"


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("linux-x86_64", "x86_64-linux-gnu.2.28", "x86_64", "manylinux_2_28_x86_64"),
        Platform("linux-aarch64", "aarch64-linux-gnu.2.28", "aarch64", "manylinux_2_28_aarch64"),
        Platform("windows-x86_64", "x86_64-windows-gnu", "amd64", "win_amd64", ".dll"),
        Platform("macos-arm64", "aarch64-macos.14.0", "arm64", "macosx_14_0_arm64"),
    )
}


def compile_library(platform: Platform, folder: Path) -> Path:
    """The library for a platform, in `folder`.

    Raises:
        PackagingError: no Zig, or a compile error.
    """
    target = folder / library_name(platform.machine, platform.suffix)
    compiler = zig(platform)
    with tempfile.TemporaryDirectory(prefix="switchyard-kernels-") as name:
        try:
            objects = compile_sources(compiler, Path(name), machine=platform.machine)
            compiler.link(objects, target)
        except BuildError as error:
            raise PackagingError(f"The kernels for {platform.name} could not be compiled: {error}.") from error
    for extra in (*folder.glob("*.lib"), *folder.glob("*.pdb")):  # beside a DLL; nobody links to it
        extra.unlink()
    return target


def zig(platform: Platform) -> Compiler:
    """Zig's Clang for a platform.

    Raises:
        PackagingError: it is not installed.
    """
    package = find_spec("ziglang")
    if package is None or package.origin is None:
        raise PackagingError("Zig is missing: run `pip install ziglang`, then the same command again.")
    program = Path(package.origin).with_name("zig.exe" if sys.platform == "win32" else "zig")
    # Symbols of nobody's interest are most of a library; position-independent code is Zig's default.
    first = ("c++", "-target", platform.zig, "-s")
    # Everything but the system's own libraries is inside anyway; with `-static` Zig would make an archive.
    instead = {
        "-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod",
        "-march=armv8.2-a+dotprod+i8mm": "-mcpu=generic+v8_2a+dotprod+i8mm",
        "-static": "-static-libstdc++",
    }
    # The first link for a system also compiles the C++ library for it.
    return Compiler(str(program), for_windows=platform.is_windows, first=first, instead=instead, within_s=3600)


def build_kernels_wheel(platform: Platform, target: Path, checkout: Path = CHECKOUT) -> Path:
    """The wheel of a platform, in `target`.

    Raises:
        PackagingError: see `compile_library`.
    """
    project = read_project(checkout)
    with tempfile.TemporaryDirectory(prefix="switchyard-wheel-") as name:
        tree, built = Path(name) / "tree", Path(name) / "built"
        package = tree / PACKAGE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('"""The CPU\'s kernels of Switchyard, compiled."""\n', encoding="utf-8")
        compile_library(platform, package)
        (tree / "LICENSE").write_bytes((checkout / "LICENSE").read_bytes())
        (tree / "pyproject.toml").write_text(_pyproject(project), encoding="utf-8")
        # The library belongs to a platform, but to no version of Python.
        (tree / "setup.cfg").write_text(f"[bdist_wheel]\nplat_name = {platform.wheel}\n", encoding="utf-8")
        return wheel_of(tree, built, target)


def _pyproject(project: Project) -> str:
    return f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "switchyard-kernels"
version = "{project.version}"
description = "The CPU's kernels of Switchyard, compiled."
license = "{project.license}"
license-files = ["LICENSE"]
requires-python = "{project.requires_python}"
[tool.setuptools]
packages = ["{PACKAGE}"]
[tool.setuptools.package-data]
{PACKAGE} = ["*.so", "*.dll"]
"""
