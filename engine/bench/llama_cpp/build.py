"""Builds llama-cpp-python from its source for the instructions that work on this machine.

Everything is in one cache folder, and continues where it stopped: source, virtual environment, object files. The result
is tested before it counts as built.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.bench.llama_cpp.installation import SDIST_SHA256, VERSION, avx2_tree, home, receipt, venv_python
from engine.bench.llama_cpp.instructions import GROUPS, TILE_CONFIG, Instructions, is_x86, working_instructions
from engine.bench.llama_cpp.verification import fault_of
from engine.common.files import try_lock, unlock

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


class BuildError(Exception):
    """llama.cpp could not be built; the message is one sentence."""


def build(say: Say, jobs: int = 2) -> list[str]:
    """Builds and tests it, at low priority; returns the names of the special instructions used.

    Args:
        say: called with each step.
        jobs: compilers that run at once.

    Raises:
        BuildError: no compiler or network, or no build works.
        OSError: if the cache folder cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler was found (on Debian: apt-get install g++)")
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "lock").open("a+b") as lock:
        if not try_lock(lock.fileno()):
            raise BuildError("another process is building it just now")
        try:
            return _build(say, jobs, compiler)
        finally:
            unlock(lock.fileno())


def build_for_avx2(say: Say, jobs: int = 2) -> None:
    """Builds its libraries for AVX2 alone as well, in addition to a build by `build`.

    Raises:
        BuildError: there is no such build, or no AVX2, or it cannot be compiled.
        OSError: if the cache folder cannot be written.
    """
    if not receipt().is_file():
        raise BuildError("the build for all of this machine's instructions comes first")
    used = json.loads(receipt().read_text(encoding="utf-8"))["instructions"]
    instructions = [group for group in GROUPS if group.name == "AVX2" and group.name in used]
    if not instructions:
        raise BuildError("this machine has no AVX2")
    with (home() / "lock").open("a+b") as lock:
        if not try_lock(lock.fileno()):
            raise BuildError("another process is building it just now")
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
            raise BuildError(f"what was built does not run: {fault}")
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
            raise BuildError(f"{archive} is not the file that was expected: delete it and try again")
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
            raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from error
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if line.startswith("["):
                    say(line.split(" Building ")[0].strip())
    if process.returncode:
        raise BuildError(f"{Path(command[0]).name} failed: its output is in {log_path}")
