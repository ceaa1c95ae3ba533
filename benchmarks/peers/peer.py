"""llama.cpp and ik_llama.cpp in a child process: if it dies, that peer is missing and the bench continues."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gguf import LlamaFileType
from numpy.typing import NDArray

from benchmarks.peers.editions import LLAMA_CPP, Edition, Flags
from engine.bench.report import PeerError
from engine.checkpoint.gguf.file import read_gguf

_CHILD = Path(__file__).with_name("child.py")
_FAREWELL_S = 20


class _Child:
    """The process that runs it.  Close it, or use it as a context manager.

    Raises:
        PeerError: it is not built, or cannot be started.
    """

    def __init__(self, edition: Edition, python: Path | None = None) -> None:
        python = python or edition.python()
        if python is None:
            raise PeerError(f"it is not built: run {edition.how_to_build()}")
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
        try:
            # -I: neither our path nor the user's settings reach the child.
            self._process = subprocess.Popen(
                [str(python), "-I", "-X", "utf8", str(_CHILD), edition.interface()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                encoding="utf-8",
                env=edition.environment(),
            )
        except OSError as error:
            self._words.close()
            raise PeerError(f"{python} cannot be started ({error.strerror})") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
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

    def _seconds(self, **request: Any) -> float:
        return float(self._ask(**request)["seconds"])

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


class GgufPeer(_Child):
    """One GGUF file run on the CPU, greedy.  Close it, or use it as a context manager.

    Attributes:
        opening_s: seconds of the last loading of the file, and of making an empty context.

    Args:
        name: its name in the report.
        gguf: the file.
        threads: of prefill and decode.
        context: total tokens of prompts and answers of all sequences.
        sequences: number decoded in parallel.
        edition: the program that runs it.
        flags: how; by default the first of the edition's.
        python: an interpreter that can run it; by default that of our build.

    Raises:
        PeerError: it is not built, or cannot load the file.
    """

    def __init__(
        self,
        name: str,
        gguf: Path,
        threads: int,
        context: int,
        *,
        sequences: int = 1,
        edition: Edition = LLAMA_CPP,
        flags: Flags | None = None,
        python: Path | None = None,
    ) -> None:
        super().__init__(edition, python)
        self.name, self.edition = name, edition
        self._gguf, self._threads = gguf, threads
        self.opening_s = 0.0
        self._repacked: bool | None = None
        self._filled: list[int] = []
        try:
            self.set_up(flags or edition.flags[0], context, sequences)
        except BaseException:
            self.close()
            raise

    def set_up(self, flags: Flags, context: int, sequences: int = 1) -> None:
        """An empty context with these flags; loads the file again where they ask for it.

        Raises:
            PeerError: if it dies or refuses; also raised by the methods below.
        """
        self._filled = []
        if self._repacked != flags.repack:
            self._repacked = None
            self.opening_s = self._seconds(do="load", path=str(self._gguf), repack=flags.repack)
            self._repacked = flags.repack
        self.opening_s += self._seconds(
            do="open",
            threads=self._threads,
            context=context,
            sequences=max(2, sequences),  # one is for copies of keys and values
            flash=flags.flash,
            fused=flags.fused,
            latent=flags.latent,
        )

    def decode_rate(self, prompt: Sequence[int], tokens: int) -> float:
        """Tokens per second of `tokens` further greedy steps: after the prompt, then after the ones before.

        A long prompt's keys and values are copies of those of its beginning: reading it in full takes minutes, and
        decoding after it as long.
        """
        if self._filled != list(prompt):
            self._ask(do="fill", ids=list(prompt))
            self._filled = list(prompt)
        return tokens / self._seconds(do="decode", tokens=tokens)

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Prompt tokens per second, from an empty context; after a short warm-up prompt."""
        self.prefill_seconds(prompt[:80])
        return len(prompt) / self.prefill_seconds(prompt)

    def prefill_seconds(self, prompt: Sequence[int]) -> float:
        """Seconds from an empty context to the token after the prompt."""
        self._filled = []
        return self._seconds(do="prefill", ids=list(prompt))

    def parallel_rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Tokens per second of all prompts together, each continued greedily by `tokens`, including prompt time."""
        self._filled = []
        ids = [list(prompt) for prompt in prompts]
        return len(ids) * tokens / self._seconds(do="parallel", prompts=ids, tokens=tokens)

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The `tokens` most probable ids after the prompt, one after the other."""
        self.prefill_seconds(prompt)
        return list(self._ask(do="decode", tokens=tokens - 1)["ids"])

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[len(ids), vocabulary]: logits after each token, from an empty context."""
        self._filled = []
        with tempfile.TemporaryDirectory(prefix="switchyard-logits-") as scratch:
            path = Path(scratch) / "logits"
            vocabulary = int(self._ask(do="logits", ids=list(ids), path=str(path))["vocabulary"])
            return np.fromfile(path, np.float32).reshape(len(ids), vocabulary)


def chosen_types(source: Path, kind: str, target: Path | None = None) -> dict[str, str]:
    """ggml's types by tensor that llama.cpp chooses for a GGUF file of plain numbers and `kind` ("Q4_K_M").

    With a `target`, the quantised file is written there instead, and no types are told.

    For the IQ types it wants to know how important columns are: they are all said to be alike.

    Raises:
        PeerError: llama.cpp is not built, or it cannot quantise the file.
    """
    matrices = read_gguf(source).tensors.items() if kind.startswith(("IQ1", "IQ2", "IQ3")) else ()
    columns = {
        name: entry.shape[-1] * (entry.shape[0] if len(entry.shape) == 3 else 1)
        for name, entry in matrices
        if len(entry.shape) > 1
    }
    request = {"path": str(source), "type": FILE_TYPES[kind], "columns": columns, "target": str(target or "")}
    with _Child(LLAMA_CPP) as child:
        types: dict[str, str] = child._ask(do="types", **request)["types"]
    return types


FILE_TYPES = {kind.name.removeprefix("MOSTLY_"): int(kind) for kind in LlamaFileType} | {"Q2_0": 41}
"""llama.cpp's numbers for the types of whole files."""
