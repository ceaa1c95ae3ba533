"""Which groups of instructions work on this machine.

`-march=native` trusts what the CPU advertises; a virtual machine may trap on some of it, and a compiler may miscompile
some of it. So every instruction group that llama.cpp uses is compiled into a small test program, and used if that gives
the right result.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

TILE_CONFIG = Path(__file__).with_name("tile_config.h")


@dataclass(frozen=True, slots=True)
class Instructions:
    """One group: the options of ggml's build that use it, the compiler's flags, and the body of a program whose exit
    status is 0 if they work (`c` is 1 there, unknown to the compiler).
    """

    name: str
    options: tuple[str, ...]
    flags: tuple[str, ...]
    program: str


_DOTS = "_mm{0}_set1_epi8(c), _mm{0}_set1_epi8(c)"
GROUPS = (
    Instructions(
        "AVX2",
        ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"),
        ("-mavx2", "-mfma", "-mf16c", "-mbmi2"),
        "__m256 a = _mm256_set1_ps(c); a = _mm256_fmadd_ps(a, a, a); a = _mm256_cvtph_ps(_mm256_cvtps_ph(a, 0));"
        "return _mm256_cvtss_f32(a) != 2 || _pext_u32(5, c + 4) != 3;",
    ),
    Instructions(
        "AVX-VNNI",
        ("AVX_VNNI",),
        ("-mavx2", "-mavxvnni"),
        f"__m256i a = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), {_DOTS.format(256)});"
        "return _mm256_extract_epi32(a, 7) != 4;",
    ),
    Instructions(
        "AVX-512",
        ("AVX512",),
        ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
        "__m512 a = _mm512_set1_ps(c); a = _mm512_fmadd_ps(a, a, a);"
        f"__m512i b = _mm512_maddubs_epi16({_DOTS.format(512)});"
        "return _mm512_reduce_add_ps(a) != 32 || _mm512_cvtsi512_si32(b) != 0x20002;",
    ),
    Instructions(
        "AVX-512 VBMI",
        ("AVX512_VBMI",),
        ("-mavx512f", "-mavx512vbmi"),
        f"return _mm512_cvtsi512_si32(_mm512_permutexvar_epi8({_DOTS.format(512)})) != 0x01010101;",
    ),
    Instructions(
        "AVX-512 VNNI",
        ("AVX512_VNNI",),
        ("-mavx512f", "-mavx512vl", "-mavx512vnni"),
        f"__m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), {_DOTS.format(512)});"
        f"__m256i b = _mm256_dpbusd_epi32(_mm256_setzero_si256(), {_DOTS.format(256)});"
        "return _mm512_reduce_add_epi32(a) != 64 || _mm256_extract_epi32(b, 7) != 4;",
    ),
    Instructions(
        "AVX-512 BF16",
        ("AVX512_BF16",),
        ("-mavx512f", "-mavx512bf16"),
        "__m512 a = _mm512_set1_ps(c); __m512bh b = _mm512_cvtne2ps_pbh(a, a);"
        "return _mm512_reduce_add_ps(_mm512_dpbf16_ps(a, b, b)) != 48;",
    ),
    Instructions(
        "AMX",
        ("AMX_TILE", "AMX_INT8", "AMX_BF16"),
        ("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        "if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;"  # asks Linux for the tiles' room in saved states
        "alignas(64) unsigned char config[64] = {1}; int sums[256]; signed char ones[1024]; memset(ones, c, 1024);"
        "for (int i = 0; i < 3; i++) { config[16 + 2 * i] = 64; config[48 + i] = 16; }"
        "_tile_loadconfig(config); _tile_zero(0); _tile_loadd(1, ones, 64); _tile_loadd(2, ones, 64);"
        "_tile_dpbusd(0, 1, 2); _tile_stored(0, sums, 64); _tile_dpbf16ps(0, 1, 2); _tile_release();"
        "return sums[255] != 64;",
    ),
)
_SOURCE = """#include <immintrin.h>
#include <string.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
int main(int c, char **) {{ {program} }}
"""


def is_x86() -> bool:
    """Whether these groups apply to this machine."""
    return platform.machine().lower() in ("x86_64", "amd64")


def working_instructions(compiler: str) -> list[Instructions]:
    """The groups that this machine runs, simplest first; none on other machines than x86-64."""
    if not is_x86():
        return []
    with tempfile.TemporaryDirectory(prefix="switchyard-probe-") as scratch:
        return [group for group in GROUPS if _works(group, compiler, Path(scratch))]


def _works(group: Instructions, compiler: str, scratch: Path) -> bool:
    source, program = scratch / "probe.cpp", scratch / "probe.exe"
    source.write_text(_SOURCE.format(program=group.program), encoding="utf-8")
    build = [compiler, "-std=c++17", "-O1", *group.flags, "-include", str(TILE_CONFIG), str(source), "-o", str(program)]
    try:
        if subprocess.run(build, capture_output=True, timeout=120, check=False).returncode:
            return False
        return subprocess.run([str(program)], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
