"""Builds llama-cpp-python from its source for the instructions that work on this machine.

Everything is in one cache folder, and continues where it stopped: source, virtual environment, object files. The result
is tested before it counts as built: a small model of each kind runs in the peer's process, where a build with trapping
instructions dies.

`-march=native` trusts what the CPU advertises; a virtual machine may trap on some of it, and a compiler may miscompile
some of it. So every instruction group that llama.cpp uses is compiled into a small test program, and used if that gives
the right result.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.gguf_export import Quantisation, write_gguf
from engine.bench.llama_cpp.peer import (
    SDIST_SHA256,
    VERSION,
    LlamaCppPeer,
    PeerError,
    avx2_tree,
    home,
    receipt,
    venv_python,
)
from engine.bench.synthetic import make_synthetic
from engine.common.files import try_lock, unlock

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


_MODEL = "synthetic:qwen3-moe-small?experts=8&layers=1&vocab=512"
_PROMPT = range(3, 203)


def fault_of(python: Path) -> str | None:
    """Why llama.cpp cannot be used through this interpreter; `None` if it decodes and reads a prompt in every type."""
    checkpoint = make_synthetic(_MODEL)
    with tempfile.TemporaryDirectory(prefix="switchyard-verify-") as scratch:
        for quantisation in Quantisation:
            path = Path(scratch) / f"{quantisation.value}.gguf"
            write_gguf(checkpoint, path, quantisation)
            try:
                with LlamaCppPeer("llama.cpp", path, threads=2, context=256, python=python) as peer:
                    peer.greedy(_PROMPT, 8)
            except PeerError as failure:
                return f"{quantisation.value}: {failure}"
    return None


Say = Callable[[str], None]

_PYTHON_PACKAGES = (
    "cmake>=3.28,<5",
    "ninja>=1.11,<2",
    "numpy>=2,<3",
    "typing-extensions",
    "diskcache>=5.6,<6",
    "jinja2",
)
_OFF = ("LLAMA_BUILD_COMMON", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER",
        "LLAMA_BUILD_APP", "LLAMA_OPENSSL")  # fmt: skip


class PeerBuildError(Exception):
    """llama.cpp could not be built; the message is one sentence."""


def build(say: Say, jobs: int = 2) -> list[str]:
    """Builds and tests it, at low priority; returns the names of the special instructions used.

    Args:
        say: called with each step.
        jobs: compilers that run at once.

    Raises:
        PeerBuildError: no compiler or network, or no build works.
        OSError: if the cache folder cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise PeerBuildError("no C++ compiler was found (on Debian: apt-get install g++)")
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "lock").open("a+b") as lock:
        if not try_lock(lock.fileno()):
            raise PeerBuildError("another process is building it just now")
        try:
            return _build(say, jobs, compiler)
        finally:
            unlock(lock.fileno())


def build_for_avx2(say: Say, jobs: int = 2) -> None:
    """Builds its libraries for AVX2 alone as well, in addition to a build by `build`.

    Raises:
        PeerBuildError: there is no such build, or no AVX2, or it cannot be compiled.
        OSError: if the cache folder cannot be written.
    """
    if not receipt().is_file():
        raise PeerBuildError("the build for all of this machine's instructions comes first")
    used = json.loads(receipt().read_text(encoding="utf-8"))["instructions"]
    instructions = [group for group in GROUPS if group.name == "AVX2" and group.name in used]
    if not instructions:
        raise PeerBuildError("this machine has no AVX2")
    with (home() / "lock").open("a+b") as lock:
        if not try_lock(lock.fileno()):
            raise PeerBuildError("another process is building it just now")
        try:
            say("compiling llama.cpp with AVX2 alone: this takes some minutes")
            _compile(say, jobs, instructions, avx2_tree())
            (avx2_tree() / "built").touch()
        finally:
            unlock(lock.fileno())


def _build(say: Say, jobs: int, compiler: str) -> list[str]:
    receipt().unlink(missing_ok=True)
    _make_environment(say)
    _fetch_source(say)
    say("trying which instructions this machine runs")
    instructions = working_instructions(compiler)
    while True:
        names = [group.name for group in instructions]
        say(f"compiling llama.cpp with {', '.join(names) or 'no special instructions'}: this takes some minutes")
        _compile(say, jobs, instructions, home() / "build")
        _install()
        say("running it")
        fault = fault_of(venv_python())
        if fault is None:
            break
        if not instructions:
            raise PeerBuildError(f"what was built does not run: {fault}")
        say(f"what was built does not run ({fault}): trying it without {names[-1]}")
        instructions = instructions[:-1]
    partial = receipt().with_suffix(".part")
    partial.write_text(json.dumps({"version": VERSION, "instructions": names}) + "\n", encoding="utf-8")
    partial.replace(receipt())
    return names


def _make_environment(say: Say) -> None:
    if not venv_python().is_file():
        say("making a virtual environment")
        _run([sys.executable, "-m", "venv", "--clear", str(home() / "venv")], say)
    say("installing what the build needs")
    _run([*_pip(), "install", "--quiet", *_PYTHON_PACKAGES], say)


def _fetch_source(say: Say) -> None:
    archive, source = home() / f"llama_cpp_python-{VERSION}.tar.gz", home() / "source"
    if source.is_dir():
        return
    if not (archive.is_file() and _sha256(archive) == SDIST_SHA256):
        say(f"fetching llama-cpp-python {VERSION} (77 MB)")
        where = ["--dest", str(home()), "--no-deps", "--no-binary", "llama-cpp-python"]
        _run([*_pip(), "download", *where, f"llama-cpp-python=={VERSION}"], say)
        if _sha256(archive) != SDIST_SHA256:
            raise PeerBuildError(f"{archive} is not the file that was expected: delete it and try again")
    unpacked = home() / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (unpacked / archive.name.removesuffix(".tar.gz")).replace(source)
    unpacked.rmdir()


def _compile(say: Say, jobs: int, instructions: Sequence[Instructions], tree: Path) -> None:
    programs = venv_python().parent
    options = {"CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON", "CMAKE_MAKE_PROGRAM": str(programs / "ninja")}
    options |= dict.fromkeys(_OFF, "OFF")
    if is_x86():
        options["GGML_NATIVE"] = "OFF"
        used = {option for group in instructions for option in group.options}
        for option in sorted({option for group in GROUPS for option in group.options}):
            options[f"GGML_{option}"] = "ON" if option in used else "OFF"
    if os.name == "posix":
        header = home() / TILE_CONFIG.name
        if not header.is_file() or header.read_bytes() != TILE_CONFIG.read_bytes():
            shutil.copyfile(TILE_CONFIG, header)
        options["CMAKE_CXX_FLAGS"] = f'-include "{header}"'
    defines = [f"-D{key}={value}" for key, value in options.items()]
    source = str(home() / "source" / "vendor" / "llama.cpp")
    _run([str(programs / "cmake"), "-S", source, "-B", str(tree), "-G", "Ninja", *defines], say)
    _run([str(programs / "cmake"), "--build", str(tree), "--target", "llama", "-j", str(jobs)], say)


def _install() -> None:
    """Installs the binding and its libraries into the environment."""
    site = sysconfig.get_path("platlib", "venv", {"base": str(home() / "venv"), "platbase": str(home() / "venv")})
    target = Path(site) / "llama_cpp"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home() / "source" / "llama_cpp", target, ignore=shutil.ignore_patterns("lib", "server"))
    (target / "lib").mkdir()
    for library in sorted((home() / "build" / "bin").iterdir()):
        if library.name.split(".")[0].removeprefix("lib").startswith(("llama", "ggml")):
            shutil.copy2(library, target / "lib" / library.name, follow_symlinks=False)


def _pip() -> list[str]:
    return [str(venv_python()), "-m", "pip", "--disable-pip-version-check"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(command: Sequence[str], say: Say) -> None:
    """Runs it at low priority, all its output in a log; says the compiler's progress lines (`[17/78] ...`)."""
    log_path = home() / "build.log"
    politely = ["nice", "-n", "15"] if shutil.which("nice") else []
    with log_path.open("a", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                [*politely, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            raise PeerBuildError(f"{command[0]} cannot be run ({error.strerror})") from error
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if line.startswith("["):
                    say(line.split(" Building ")[0].strip())
    if process.returncode:
        raise PeerBuildError(f"{Path(command[0]).name} failed: its output is in {log_path}")
