"""Servers of other projects, and our own, as people run them: each one's address and process, which may be killed."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.gguf import texts_of
from benchmarks.peers.editions import LLAMA_CPP
from engine.checkpoint.gguf.export import Quantisation, write_gguf
from tests import plain_http
from tests.engine.test_serve_verb import served
from tests.peers import users_home
from tests.starter import starter_for_tests

VLLM_VARIABLE = "SWITCHYARD_TEST_VLLM"
"""Environment variable: the Python that has vLLM, where its program `vllm` is not found on the path."""
_LOOKS, _LOOK_S = 3000, 0.1
"""How often a server that starts is looked for: no clock, since all of it may be stopped meanwhile."""


@contextlib.contextmanager
def switchyard(folder: Path, model: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of `switchyard serve`, which may be dead in the end."""
    with contextlib.suppress(AssertionError), served(folder, model) as (url, server):
        yield f"{url}/v1", server


def llama_program() -> Path | None:
    """llama.cpp's server, if this machine's user has built it."""
    program = users_home(LLAMA_CPP) / LLAMA_CPP.server().relative_to(LLAMA_CPP.home())
    return program if program.is_file() else None


def cut_starter(folder: Path) -> Path:
    """The starter's first two layers, which write nonsense fast, as a checkpoint in that folder."""
    starter, cut = starter_for_tests(), folder / "cut"
    shutil.copytree(starter, cut, ignore=shutil.ignore_patterns("*.safetensors", "switchyard-manifest.json"))
    config = json.loads((cut / "config.json").read_text(encoding="utf-8"))
    (cut / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}), encoding="utf-8")
    with safe_open(starter / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if not re.search(r"layers\.(?![01]\.)", name)]  # noqa: SIM118
        save_file({name: tensors.get_tensor(name) for name in names}, cut / "model.safetensors", {"format": "pt"})
    return cut


def gguf_of(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint as a GGUF file, made in that folder."""
    path = folder / "model.gguf"
    write_gguf(checkpoint, path, Quantisation.BF16, vocabulary=texts_of(checkpoint))
    return path


@contextlib.contextmanager
def llama_server(folder: Path, model: Path, *more: str) -> Iterator[tuple[str, int]]:
    """The same of llama.cpp's server with a GGUF file; skips where it is not built."""
    program = llama_program()
    if program is None:
        pytest.skip(f"llama.cpp's server is not built: {LLAMA_CPP.how_to_build()}")
    port = _free_port()
    command = [str(program), "-m", str(model), "--port", str(port), "--alias", "starter", "-t", "1", "--no-webui"]
    with _running([*command, *more], port, folder / "llama.log") as found:
        yield found


def vllm_python() -> Path | None:
    """The Python that runs vLLM: the one that the environment names, or that of the program on the path."""
    given, program = os.environ.get(VLLM_VARIABLE), shutil.which("vllm")
    if given:
        return Path(given)
    return Path(program).resolve().with_name("python") if program else None


needs_vllm = pytest.mark.skipif(
    vllm_python() is None, reason=f"vLLM is not here: name the Python that has it in {VLLM_VARIABLE}"
)


@contextlib.contextmanager
def vllm_server(folder: Path, model: Path, *more: str) -> Iterator[tuple[str, int]]:
    """The same of vLLM with a checkpoint, on the CPU if its build is one for it."""
    python = vllm_python()
    assert python is not None
    port = _free_port()
    # Its program looks for a package called vllm, which builds for CPUs from the package index do not have.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "starter", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--max-num-seqs", "16", *more]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CONFIG_ROOT": str(folder / "config"),
    }
    with tempfile.TemporaryDirectory(prefix="v-") as sockets:  # their names must be short
        variables["TMPDIR"] = sockets
        with _running(command, port, folder / "vllm.log", variables) as found:
            yield found


@contextlib.contextmanager
def _running(
    command: Sequence[str], port: int, log: Path, variables: dict[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """A server in a group of its own, which ends as a whole: vLLM's engine is another process than its server."""
    environment = {**os.environ, **(variables or {})}
    environment.pop("PYTHONPATH", None)  # our packages are not the server's
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(_LOOKS):
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx2.HTTPError):
            if plain_http.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        time.sleep(_LOOK_S)
    said = log.read_text(encoding="utf-8", errors="replace")[-4000:]
    pytest.fail(f"The server did not come up: {' '.join(process.args)}\n{said}")  # type: ignore[arg-type]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def note(text: str) -> None:
    """For who measures: shown with `-s`."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
