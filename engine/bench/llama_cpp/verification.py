"""Runs a small model of each kind in the peer's process: a build with trapping instructions dies here."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine.bench.gguf_export import Quantisation, write_gguf
from engine.bench.llama_cpp.peer import LlamaCppPeer, PeerError
from engine.bench.synthetic import make_synthetic

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
