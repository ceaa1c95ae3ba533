"""A processor without AVX2, as an emulator shows it: the kernels' library loads there, and has kernels for it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys

import pytest

from engine.kernels.native.library import _SELF_TEST, Isa
from tests.engine.native_isas import build

QEMU = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")

pytestmark = pytest.mark.skipif(
    QEMU is None or platform.machine() != "x86_64", reason="needs x86-64 and qemu-user to be another processor"
)
_ADVERTISED = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).switchyard_advertised_isas())"


@pytest.mark.parametrize(
    "processor",
    [
        "Nehalem",
        pytest.param("SandyBridge", marks=pytest.mark.exhaustive),
        pytest.param("Haswell", marks=pytest.mark.exhaustive),
    ],
)
def test_what_an_old_processor_can_run_is_offered_and_works(processor: str) -> None:
    """Of 2008, without AVX; of 2011, without AVX2; and of 2013, the first with all that the AVX2 kernels use."""
    assert QEMU is not None
    library = str(build.build())
    python = [QEMU, "-cpu", processor, sys.executable, "-I", "-S", "-c"]
    said = subprocess.run([*python, _ADVERTISED, library], capture_output=True, check=True).stdout
    newest = Isa.AVX2 if processor == "Haswell" else Isa.PORTABLE
    assert [isa for isa in Isa if int(said) >> isa & 1] == [isa for isa in Isa if isa <= newest]
    for isa in {Isa.PORTABLE, newest}:
        subprocess.run([*python, _SELF_TEST, library, str(int(isa))], capture_output=True, check=True, timeout=100)
