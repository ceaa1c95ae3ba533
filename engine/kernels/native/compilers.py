"""The C++ compilers for the native kernels, and their options."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_OPTIONS = (
    *("-std=c++17", "-O3", "-fvisibility=hidden", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_WINDOWS_OPTIONS = ("/nologo", "/EHsc", "/MT")
_TIMEOUT_S = 300
_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


class BuildError(Exception):
    """The kernels could not be built; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """GCC or Clang, under one of their names.

    Attributes:
        command: its program.
        environment: variables to add to this process's environment.
        for_windows: whether it builds Windows libraries.
    """

    command: str
    environment: Mapping[str, str] | None = None
    for_windows: bool = sys.platform == "win32"

    @property
    def is_clang_cl(self) -> bool:
        """Whether it is clang-cl, which takes Microsoft's options, and Clang's only with a prefix."""
        return Path(self.command.replace("\\", "/")).stem.lower().startswith("clang-cl")

    def compile(self, source: Path, target: Path, options: tuple[str, ...]) -> None:
        """Compiles an object file.  Raises `BuildError` on errors."""
        if self.is_clang_cl:
            marked = (f"/clang:{option}" for option in (*_OPTIONS, *options) if option != "-pthread")
            self.run(*_WINDOWS_OPTIONS, *marked, "/c", str(source), f"/Fo{target}")
        else:
            anywhere = () if self.for_windows else ("-fPIC",)  # implied on Windows
            self.run(*_OPTIONS, *anywhere, *options, "-c", str(source), "-o", str(target))

    def link(self, objects: list[Path], target: Path) -> None:
        """Links a shared library.  Raises `BuildError` on errors."""
        if self.is_clang_cl:
            self.run("/nologo", "/LD", "/MT", *map(str, objects), f"/Fe{target}")
        else:
            # On Windows, Python would not find this compiler's C++ library.
            alone = ("-static",) if self.for_windows else ()
            self.run("-shared", "-pthread", *alone, *map(str, objects), "-o", str(target))

    def run(self, *arguments: str) -> None:
        """Runs the compiler; raises `BuildError` with its first error."""
        command = [self.command, *arguments]
        environment = {**os.environ, **self.environment} if self.environment else None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
                env=environment,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{self.command} could not be run ({error})") from error
        if done.returncode:
            said = done.stderr + done.stdout  # Microsoft's reports errors on stdout
            first = next((line for line in said.splitlines() if "error" in line), said[:200])
            raise BuildError(f"{self.command} failed: {first}")


def find_compiler() -> Compiler:
    """The machine's C++ compiler, or that of the environment's `CXX`.

    Raises:
        BuildError: there is none.
    """
    command = os.environ.get("CXX")
    if not command:
        command = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if command:
        return Compiler(command)
    if sys.platform == "win32" and (found := _visual_studio()) is not None:
        return found
    raise BuildError(f"no C++ compiler was found ({_ADVICE.get(sys.platform, 'on Debian: apt-get install g++')})")


_ADVICE = {
    "win32": "install the Build Tools for Visual Studio with 'C++ Clang Compiler for Windows': "
    "Microsoft's own lacks the vector types that the kernels use",
    "darwin": "run xcode-select --install",
}


def architecture(machine: str | None = None) -> str:
    """`x86`, `arm` or `other`: of this Python, which loads the library.

    Args:
        machine: as named by `platform.machine()`; `None`: this machine.
    """
    name = (machine or platform.machine()).lower()
    if sys.maxsize < 2**32:
        return "other"  # a 32-bit Python on a 64-bit system
    return "x86" if name in _X86 else "arm" if name in _ARM else "other"


def _visual_studio() -> Compiler | None:
    """Visual Studio's Clang, with the variables of its developer prompt, or `None`."""
    programs = Path(os.environ.get("PROGRAMFILES(X86)", r"C:\Program Files (x86)"))
    finder = programs / "Microsoft Visual Studio" / "Installer" / "vswhere.exe"
    kind, folder = ("arm64", "ARM64") if architecture() == "arm" else ("x64", "x64")
    wanted = "Microsoft.VisualStudio.Component.VC.Llvm.Clang"
    try:
        found = subprocess.run(
            [finder, "-latest", "-products", "*", "-requires", wanted, "-property", "installationPath"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        prompt = Path(found) / "VC" / "Auxiliary" / "Build" / "vcvarsall.bat"
        command = Path(found) / "VC" / "Tools" / "Llvm" / folder / "bin" / "clang-cl.exe"
        if not found or not prompt.exists() or not command.exists():
            return None
        listing = subprocess.run(
            f'call "{prompt}" {kind} >nul && set', shell=True, capture_output=True, text=True, timeout=120, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return Compiler(str(command), environment=parse_variables(listing))


def parse_variables(listing: str) -> dict[str, str]:
    """Parses the output of Windows' `set`; names in upper case."""
    pairs = (line.partition("=") for line in listing.splitlines())
    return {name.upper(): value for name, equals, value in pairs if equals and name}
