"""llama.cpp in a child process: if it dies, that peer is missing and the bench continues."""

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
from numpy.typing import NDArray

from engine.bench.llama_cpp.installation import how_to_build, peer_environment, peer_python

_CHILD = Path(__file__).with_name("child.py")
_FAREWELL_S = 20


class PeerError(Exception):
    """The peer cannot run, or died; the message is one sentence."""


class LlamaCppPeer:
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
        self.name = name
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
