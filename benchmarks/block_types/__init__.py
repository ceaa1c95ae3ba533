"""`switchyard bench blocks`: ticks for a weight of each block type, from the cache, beside ggml's own dot products.

Our rows' kernels and a small program are compiled together; ggml is that of llama.cpp's build.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.editions import LLAMA_CPP
from engine.bench.report import PeerError, Report, in_turn
from engine.common.errors import EngineError, ErrorCode
from engine.formats.ggml import TYPES
from engine.kernels.native.build import BuildError, architecture, compile_object, find_compiler

_COLUMNS = 2048
_KERNELS = {"x86": ("rows_avx512vnni", "rows_avx2"), "arm": ("rows_neon",)}
_SOURCE = Path(__file__).with_name("ticks.cpp")
_HEADERS = Path(__file__).parents[2] / "engine" / "kernels" / "native" / "src"


def bench_blocks(repeats: int, report: Report, say: Callable[[str], None]) -> None:
    """Adds rows of ticks for each type and instruction set: with one vector, against ggml's, four, and a prompt."""
    ggml = next(LLAMA_CPP.home().rglob("libggml-cpu.so"), None) if LLAMA_CPP.home().is_dir() else None
    if ggml is None:
        report.skip_peer("ggml", f"it is not built: run {LLAMA_CPP.how_to_build()}")
    with tempfile.TemporaryDirectory(prefix="switchyard-blocks-") as scratch:
        say("compiling our kernels and the program that times them")
        program = _compiled(Path(scratch))

        def run(_repeat: int) -> dict[tuple[int, str, int], float]:
            command = [str(program), str(_COLUMNS), "" if ggml is None else str(ggml.parent)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerError(f"it ended with {done.returncode}: {done.stderr.strip()[:200]}")
            lines = (line.split() for line in done.stdout.splitlines())
            return {(int(kind), name, int(vectors)): float(ticks) for kind, name, vectors, ticks in lines}

        found = in_turn({"all types": run}, repeats, report, say, warm_ups=0).get("all types")
    if not found:
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, f"Nothing was timed: {report.peers_not_run[-1]['reason']}.")
    names = {kind.id: kind.name for kind in TYPES}
    for kind, name, vectors in found[0]:
        if name == "ggml":
            continue
        values = [each[kind, name, vectors] for each in found]
        theirs = [each[kind, "ggml", 1] for each in found] if vectors == 1 and (kind, "ggml", 1) in found[0] else None
        isa, _, prompt = name.partition("-")
        how = f"each of {vectors} in a prompt" if prompt else "one vector" if vectors == 1 else "four vectors"
        label = f"{names[kind]}, {isa}, {how}"
        peer = None if theirs is None else "ggml"
        report.add(label, values, "ticks", peer=peer, peer_values=theirs, higher_is_better=False)


def _compiled(folder: Path) -> Path:
    kind, program = architecture(platform.machine()), folder / "ticks"
    try:
        compiler = find_compiler()
        objects = [compile_object(compiler, f"{name}.cpp", folder) for name in (*_KERNELS[kind], "rows_portable")]
        compiler.run("-std=c++17", "-O2", f"-I{_HEADERS}", str(_SOURCE), *map(str, objects), "-ldl", "-o", str(program))
    except (BuildError, KeyError) as failure:
        why = f"The program that times block types cannot be compiled: {failure}."
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, why) from failure
    return program
