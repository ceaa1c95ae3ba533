"""Kernels that were compiled for other systems than this one: run on an emulated processor, or read.  Minutes."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.kernels.native.library import Isa
from tests.engine.native_programs import HEADERS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "installers"))

from packages.dlls import exports, missing_libraries
from packages.kernels import PLATFORMS, build_kernels_wheel

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("ziglang") is None or find_spec("pefile") is None, reason="needs ziglang and pefile"),
]
_CROSS, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_OF_ARM = ("-cpu", "max", "-L", "/usr/aarch64-linux-gnu")  # where the emulator finds the C library
_LOADER = """
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\\n", dlerror()), 3;
    unsigned (*advertised)(void) = dlsym(library, "switchyard_advertised_isas");
    int (*self_test)(int) = dlsym(library, "switchyard_self_test");
    if (count > 2) printf("%d\\n", self_test(atoi(words[2]))); else printf("%u\\n", advertised());
}
"""


def library_of(name: str, folder: Path) -> Path:
    """A platform's library, from its wheel."""
    with zipfile.ZipFile(build_kernels_wheel(PLATFORMS[name], folder)) as wheel:
        wheel.extractall(folder)
    (library,) = (path for path in folder.rglob("*") if path.suffix in (".so", ".dll"))
    return library


@pytest.mark.skipif(
    not (shutil.which(_CROSS) and shutil.which(_EMULATOR)), reason=f"{_CROSS} and {_EMULATOR} are not both here"
)
def test_kernels_for_arm_give_what_their_reference_gives(tmp_path: Path) -> None:
    library = library_of("linux-aarch64", tmp_path)
    (tmp_path / "loader.c").write_text(_LOADER)
    subprocess.run([_CROSS, "-O1", tmp_path / "loader.c", "-o", tmp_path / "loader", "-ldl"], check=True)

    def on_arm(*words: str) -> int:
        command = [_EMULATOR, *_OF_ARM, tmp_path / "loader", library, *words]
        return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout)

    advertised = on_arm()
    there = [isa for isa in Isa if advertised >> isa & 1]
    assert there == [Isa.PORTABLE, Isa.NEON, Isa.NEON_DOT, Isa.NEON_I8MM]
    assert [on_arm(str(int(isa))) for isa in there] == [0, 0, 0, 0]


def test_kernels_for_windows_have_every_function_and_need_windows_alone(tmp_path: Path) -> None:
    library = library_of("windows-x86_64", tmp_path)
    header = (HEADERS / "switchyard_kernels.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^SWITCHYARD_API [^;(]*?\b(switchyard_\w+)\(", header, re.MULTILINE))
    assert len(declared) > 10
    assert exports(library) >= declared
    assert missing_libraries(library.parent) == {}
