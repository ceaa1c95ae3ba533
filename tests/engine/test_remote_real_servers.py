"""Chats through servers as people run them: llama.cpp's own, and `switchyard serve` with the starter."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from engine.bench.gguf_export import Quantisation, write_gguf
from engine.bench.gguf_texts import add_texts
from engine.bench.peers.editions import LLAMA_CPP
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.remote.chat_form import RemoteDelta, RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import Endpoint, endpoint_at
from engine.remote.failures import RemoteError, Trouble
from engine.remote.look import about
from tests.engine.test_serve_verb import served
from tests.peers import users_peers
from tests.starter import starter_for_tests

__all__ = ["users_peers"]

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.name != "posix", reason="asked to end by a signal"),
]
KEY = "0123456789abcdef"
CAPITAL = (ChatMessage("user", "What is the capital of France?"),)


@contextlib.contextmanager
def llama_server(folder: Path) -> Iterator[Endpoint]:
    """llama.cpp's server with the starter."""
    program = LLAMA_CPP.server()
    if not program.is_file():
        pytest.skip(f"llama.cpp's server is not built: {LLAMA_CPP.how_to_build()}")
    starter = starter_for_tests()
    write_gguf(
        starter, folder / "starter.gguf", Quantisation.BF16, add_vocabulary=lambda writer: add_texts(writer, starter)
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [str(program), "-m", str(folder / "starter.gguf"), "--port", str(port), "--api-key", KEY]
    command += ["--alias", "starter", "--threads", "1", "-c", "2048"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        is_ready = False
        while not is_ready:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(httpx2.HTTPError):
                is_ready = httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
            time.sleep(0.1)
        yield endpoint_at(f"http://127.0.0.1:{port}", "llama")
    finally:
        process.kill()
        process.wait()


def check(endpoint: Endpoint, key: str) -> None:
    """What every server must give."""
    told: list[RemoteDelta] = []
    with Client(endpoint, key) as client:
        answer = client.ask(RemoteRequest(CAPITAL, SamplingParams(max_tokens=30)), told.append)
        assert "Paris" in answer.text
        assert "".join(delta.text for delta in told) == answer.text
        assert len(told) > 2
        assert answer.prompt_tokens
        assert answer.generated_tokens
        assert answer.first_token_s


@pytest.mark.usefixtures("users_peers")
def test_llama_cpps_server(tmp_path: Path) -> None:
    with llama_server(tmp_path) as endpoint:
        with Client(endpoint, KEY) as client:
            seen = about(client)
        # It takes tools with the starter's chat template, which has no place for them, and then does without: that is
        # seen if the answer is short.
        assert (seen.found.server, seen.found.models) == ("llama.cpp", ("starter",))
        assert set(seen.found.lacks) <= {"tools"}
        assert seen.found.version
        assert seen.problem == ""
        check(endpoint, KEY)
        with Client(endpoint, "wrong-key") as client, pytest.raises(RemoteError) as failed:
            client.ask(RemoteRequest(CAPITAL))
        assert failed.value.kind is Trouble.KEY


def test_another_switchyard_with_the_starter(tmp_path: Path) -> None:
    with served(tmp_path, starter_for_tests()) as (url, _pid):
        endpoint = endpoint_at(url, "other", model="starter")
        with Client(endpoint, "") as client:
            seen = about(client, client.models().models[0])
        # The starter's chat template has no place for tools, which the server says.
        assert (seen.found.server, seen.found.lacks, seen.problem) == ("switchyard", ("tools",), "")
        check(endpoint_at(url, "other", model=seen.model), "")
