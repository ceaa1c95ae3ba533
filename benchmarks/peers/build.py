"""Builds llama.cpp and ik_llama.cpp from source for the instructions that work on this machine.

Everything is in one cache folder for each, and continues where it stopped: source, virtual environment, object files.
The result is tested before it counts as built: a small model of each kind runs in the peer's process, where a build
with trapping instructions dies.
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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.editions import INTERFACE, SERVER, Edition
from benchmarks.peers.instructions import GROUPS, TILE_CONFIG, Instructions, is_x86, working_instructions
from benchmarks.peers.peer import GgufPeer
from engine.bench.report import PeerError
from engine.checkpoint.gguf.export import Quantisation, write_gguf
from engine.checkpoint.synthetic import make_synthetic
from engine.common.files import take_lock

Say = Callable[[str], None]

_MODEL = "synthetic:qwen3-moe-small?experts=8&layers=1&vocab=512"
_PROMPT = range(3, 203)
_PYTHON_PACKAGES = (
    "cmake>=3.28,<5",
    "ninja>=1.11,<2",
    "numpy>=2,<3",
    "typing-extensions",
    "diskcache>=5.6,<6",
    "jinja2",
)
_SERVER_ON = ("LLAMA_BUILD_COMMON", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_SERVER")
_OFF = (*_SERVER_ON, "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI",
        "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")  # fmt: skip
_INTERFACE_SOURCE = Path(__file__).with_name("ik_interface.cpp")


class PeerBuildError(Exception):
    """A peer could not be built; the message is one sentence."""


def fault_of(edition: Edition) -> str | None:
    """Why its build cannot be used; `None` if it decodes and reads a prompt in every type."""
    checkpoint = make_synthetic(_MODEL)
    with tempfile.TemporaryDirectory(prefix="switchyard-verify-") as scratch:
        for quantisation in Quantisation:
            path = Path(scratch) / f"{quantisation.value}.gguf"
            write_gguf(checkpoint, path, quantisation)
            try:
                with GgufPeer(
                    edition.name, path, threads=2, context=256, edition=edition, python=edition.venv_python()
                ) as peer:
                    peer.greedy(_PROMPT, 8)
            except PeerError as failure:
                return f"{quantisation.value}: {failure}"
    return None


def find_sources(edition: Edition, folder: Path) -> Path:
    """The C++ sources in a folder that somebody named: the program's own, or the unpacked archive of its binding.

    Raises:
        PeerBuildError: there are none.
    """
    for candidate in (folder / edition.folder, folder):
        if (candidate / "CMakeLists.txt").is_file() and (candidate / "include" / "llama.h").is_file():
            if edition.binding is None or (folder / edition.binding).is_dir():
                return candidate
            raise PeerBuildError(
                f"{folder} has no Python binding: name the unpacked sources of {edition.package}, which have both"
            )
    raise PeerBuildError(f"{folder} holds no sources of {edition.name}")


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds one edition.

    Attributes:
        say: called with each step.
        jobs: compilers that run at once, at low priority.
        named: a folder with its sources; `None`: the archive on the package index, checked.
    """

    edition: Edition
    say: Say
    jobs: int = 2
    named: Path | None = None

    def build(self) -> list[str]:
        """Builds and tests it; returns the names of the special instructions used.

        Raises:
            PeerBuildError: no compiler, sources or network, or no build works.
            OSError: if the cache folder cannot be written.
        """
        self._compiler()
        self.edition.home().mkdir(parents=True, exist_ok=True)
        with self._exclusive():
            return self._build()

    def build_server(self) -> list[str]:
        """Builds its server as well, with what `build` has built; returns the names of the special instructions.

        Raises:
            PeerBuildError: there is no such build, or it cannot be compiled.
            OSError: if the cache folder cannot be written.
        """
        receipt = self._receipt()
        instructions = [group for group in GROUPS if group.name in receipt["instructions"]]
        with self._exclusive():
            self.say(f"compiling the server of {self.edition.name}: this takes some minutes")
            sources = Path(receipt.get("sources") or self._sources())
            self._compile(instructions, self.edition.home() / "build", sources, server=True)
        return [group.name for group in instructions]

    def _receipt(self) -> dict[str, Any]:
        """What `build` has left.

        Raises:
            PeerBuildError: nothing.
        """
        if not self.edition.receipt().is_file():
            raise PeerBuildError("the build for all of this machine's instructions comes first")
        receipt: dict[str, Any] = json.loads(self.edition.receipt().read_text(encoding="utf-8"))
        return receipt

    def build_for_avx2(self) -> None:
        """Builds its libraries for AVX2 alone as well, in addition to a build by `build`.

        Raises:
            PeerBuildError: there is no such build, or no AVX2, or it cannot be compiled.
            OSError: if the cache folder cannot be written.
        """
        receipt = self._receipt()
        instructions = [group for group in GROUPS if group.name == "AVX2" and group.name in receipt["instructions"]]
        if not instructions:
            raise PeerBuildError("this machine has no AVX2")
        tree = self.edition.avx2_tree()
        with self._exclusive():
            self.say(f"compiling {self.edition.name} with AVX2 alone: this takes some minutes")
            self._compile(instructions, tree, Path(receipt.get("sources") or self._sources()))
            (tree / "built").touch()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = take_lock(self.edition.home() / "lock")
        if lock is None:
            raise PeerBuildError("another process is building it just now")
        try:
            yield
        finally:
            lock.release()

    def _build(self) -> list[str]:
        edition = self.edition
        edition.receipt().unlink(missing_ok=True)
        self._make_environment()
        sources = self._sources()
        self.say("trying which instructions this machine runs")
        instructions = working_instructions(self._compiler())
        while True:
            names = [group.name for group in instructions]
            with_them = f"with {', '.join(names) or 'no special instructions'}"
            self.say(f"compiling {edition.name} {with_them}: this takes some minutes")
            self._compile(instructions, edition.home() / "build", sources)
            self._install()
            self.say("running it")
            fault = fault_of(edition)
            if fault is None:
                break
            if not instructions:
                raise PeerBuildError(f"what was built does not run: {fault}")
            self.say(f"what was built does not run ({fault}): trying it without {names[-1]}")
            instructions = instructions[:-1]
        partial = edition.receipt().with_suffix(".part")
        receipt = {"version": edition.version, "instructions": names, "sources": str(sources)}
        partial.write_text(json.dumps(receipt) + "\n", encoding="utf-8")
        partial.replace(edition.receipt())
        return names

    def _compiler(self) -> str:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise PeerBuildError("no C++ compiler was found (on Debian: apt-get install g++)")
        return compiler

    def _make_environment(self) -> None:
        if not self.edition.venv_python().is_file():
            self.say("making a virtual environment")
            self._run([sys.executable, "-m", "venv", "--clear", str(self.edition.home() / "venv")])
        self.say("installing what the build needs")
        self._run([*self._pip(), "install", "--quiet", *_PYTHON_PACKAGES])

    def _sources(self) -> Path:
        """The C++ sources: in the folder that was named, or those of the archive, fetched once."""
        if self.named is not None:
            return find_sources(self.edition, self.named.resolve())
        home, package = self.edition.home(), self.edition.package
        archive, source = home / f"{self.edition.archive}.tar.gz", home / "source"
        if not source.is_dir():
            if not (archive.is_file() and _sha256(archive) == self.edition.sha256):
                self.say(f"fetching {package} {self.edition.version} ({self.edition.megabytes} MB)")
                where = ["--dest", str(home), "--no-deps", "--no-binary", package]
                self._run([*self._pip(), "download", *where, f"{package}=={self.edition.version}"])
                if _sha256(archive) != self.edition.sha256:
                    raise PeerBuildError(f"{archive} is not the file that was expected: delete it and try again")
            unpacked = home / "unpacked"
            shutil.rmtree(unpacked, ignore_errors=True)
            with tarfile.open(archive) as tar:
                # Debian 12's Python 3.11.2 has no filters yet; the archive's checksum is known either way.
                tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
                tar.extractall(unpacked)
            (unpacked / self.edition.archive).replace(source)
            unpacked.rmdir()
        return source / self.edition.folder

    def _compile(
        self, instructions: Sequence[Instructions], tree: Path, sources: Path, *, server: bool = False
    ) -> None:
        programs = self.edition.venv_python().parent
        options = {"CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "ON"}
        options |= {"CMAKE_MAKE_PROGRAM": str(programs / "ninja"), **dict.fromkeys(_OFF, "OFF")}
        options |= dict.fromkeys(_SERVER_ON if server else (), "ON")
        options |= dict(self.edition.options)
        if is_x86():
            options["GGML_NATIVE"] = "OFF"
            used = {option for group in instructions for option in group.options}
            for option in sorted({option for group in GROUPS for option in group.options}):
                options[f"GGML_{option}"] = "ON" if option in used else "OFF"
            # ik_llama.cpp's options name fewer instructions than its kernels ask the compiler for.
            options["GGML_ARCH_FLAGS"] = ";".join(dict.fromkeys(flag for group in instructions for flag in group.flags))
        if os.name == "posix":
            header = self.edition.home() / TILE_CONFIG.name
            if not header.is_file() or header.read_bytes() != TILE_CONFIG.read_bytes():
                shutil.copyfile(TILE_CONFIG, header)
            options["CMAKE_CXX_FLAGS"] = f'-include "{header}"'
        if _made_from(tree) not in (None, sources):
            shutil.rmtree(tree)
        defines = [f"-D{key}={value}" for key, value in options.items()]
        self._run([str(programs / "cmake"), "-S", str(sources), "-B", str(tree), "-G", "Ninja", *defines])
        target = SERVER if server else "llama"
        self._run([str(programs / "cmake"), "--build", str(tree), "--target", target, "-j", str(self.jobs)])
        if self.edition.binding is None and not server:
            self._compile_interface(tree, sources)

    def _compile_interface(self, tree: Path, sources: Path) -> None:
        """The library through which it is run, by the header of these sources."""
        made = [path for path in sorted(tree.rglob("*llama.*")) if path.suffix in (".so", ".dylib", ".lib", ".a")]
        if not made:
            raise PeerBuildError(f"its build left no library in {tree}")
        headers = [f"-I{sources / folder / 'include'}" for folder in ("", "ggml")]
        paths = [str(made[0]), *(f"-Wl,-rpath,{made[0].parent}" for _ in range(os.name == "posix"))]
        out = ["-shared", "-o", str(tree / INTERFACE)]
        self._run([self._compiler(), "-std=c++17", "-O2", "-fPIC", *headers, str(_INTERFACE_SOURCE), *paths, *out])

    def _install(self) -> None:
        """Installs the binding and its libraries into the environment."""
        if self.edition.binding is None:
            return
        home = self.edition.home()
        site = sysconfig.get_path("platlib", "venv", {"base": str(home / "venv"), "platbase": str(home / "venv")})
        target, bindings = Path(site) / self.edition.binding, self.named or home / "source"
        shutil.rmtree(target, ignore_errors=True)
        ignored = shutil.ignore_patterns("lib", "server")
        shutil.copytree(bindings / self.edition.binding, target, ignore=ignored)
        (target / "lib").mkdir()
        for library in sorted((home / "build" / "bin").iterdir()):
            if library.name.split(".")[0].removeprefix("lib").startswith(("llama", "ggml")):
                shutil.copy2(library, target / "lib" / library.name, follow_symlinks=False)

    def _pip(self) -> list[str]:
        return [str(self.edition.venv_python()), "-m", "pip", "--disable-pip-version-check"]

    def _run(self, command: Sequence[str]) -> None:
        """Runs it at low priority, all its output in a log; says the compiler's progress lines (`[17/78] ...`)."""
        log_path = self.edition.home() / "build.log"
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
                        self.say(line.split(" Building ")[0].strip())
        if process.returncode:
            raise PeerBuildError(f"{Path(command[0]).name} failed: its output is in {log_path}")


def _made_from(tree: Path) -> Path | None:
    cache = tree / "CMakeCache.txt"
    if not cache.is_file():
        return None
    lines = cache.read_text(encoding="utf-8", errors="replace").splitlines()
    mark = "CMAKE_HOME_DIRECTORY:INTERNAL="
    return next((Path(line.removeprefix(mark)) for line in lines if line.startswith(mark)), None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
