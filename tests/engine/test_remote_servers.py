"""Jobs and pictures at servers as people run them: llama.cpp's, vLLM and our own, one of which is killed."""

import base64
import json
import os
import random
import shutil
import signal
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.opening import open_source
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Answer, Constraint
from engine.common.chat import ChatMessage, Picture, Tool, parts_with
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import ErrorCode
from engine.common.installed import version
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import Endpoint, endpoint_at, save_endpoint
from engine.remote.failures import RemoteError, Trouble
from engine.remote.job import run_remote_job
from engine.serving.server import Address
from tests.engine.test_serving import TOOL, serving
from tests.real_servers import (
    cut_starter,
    gguf_of,
    llama_program,
    llama_server,
    note,
    switchyard,
    vllm_python,
    vllm_server,
)
from tests.refusals import refused
from tests.starter import starter_for_tests

ROWS, TOKENS = 500, 16
KILLS = int(os.environ.get("SWITCHYARD_TEST_KILLS", "20"))
_SEED = int(os.environ.get("SWITCHYARD_TEST_SEED", "21"))


class Standing:
    """A job's three servers, with two layers of the starter: one that was killed is started again in another folder.

    Args:
        folder: of all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        model = cut_starter(folder)
        self._starts: dict[str, Callable[[Path], AbstractContextManager[tuple[str, int]]]] = {
            "ours": lambda at: switchyard(at, model)
        }
        if llama_program() is not None:
            gguf = gguf_of(model, folder)
            self._starts["llama"] = lambda at: llama_server(at, gguf, "-np", "4", "-c", "4096")
        if vllm_python() is not None:
            self._starts["vllm"] = lambda at: vllm_server(at, model)
        for name in ("second", "third")[: 3 - len(self._starts)]:
            self._starts[name] = lambda at: switchyard(at, model)
        self._opened: dict[str, ExitStack] = {}
        self.processes: dict[str, int] = {}

    def start(self) -> None:
        """Starts those that do not run."""
        for name, start in self._starts.items():
            if name in self._opened:
                continue
            self._number += 1
            at = self._folder / f"{self._number}-{name}"
            at.mkdir()
            opened = self._opened[name] = ExitStack()
            url, self.processes[name] = opened.enter_context(start(at))
            save_endpoint(Endpoint(name, url))

    def bury(self, name: str) -> None:
        """It was killed: what is left of it ends."""
        self._opened.pop(name).close()

    def close(self) -> None:
        for name in list(self._opened):
            self.bury(name)


class Killer:
    """Looks on, and kills a server once so many rows have been answered."""

    def __init__(self, process: int, at: int) -> None:
        self._process, self._at = process, at
        self.answered = 0

    def on_answer(self, _answer: Answer, _question: str) -> None:
        self.answered += 1
        if self.answered == self._at:
            os.kill(self._process, signal.SIGKILL)

    def watcher(self) -> JobWatcher:
        return JobWatcher(
            on_pace=lambda _pace, _blocked: None,
            on_answer=self.on_answer,
            should_yield=lambda: False,
            give_way=lambda: None,
            cancelled=lambda: False,
            patience_s=300,
        )


def run(folder: Path, endpoints: Sequence[str], watcher: JobWatcher) -> JobEnding:
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"Say something about {row}."}) + "\n" for row in range(ROWS)))
    sampling = SamplingParams(max_tokens=TOKENS)
    job = BatchJob(str(source), str(output), sampling=sampling, endpoints=tuple(endpoints))
    ending = run_remote_job(prepare(job), watcher)
    rows = [dict(row.fields) for row in open_source(output).rows()]
    assert [row["text"] for row in rows] == [f"Say something about {row}." for row in range(ROWS)]
    assert all(row["generated_tokens"] > 0 and not row["problem"] for row in rows)
    return ending


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(os.name != "posix", reason="servers are killed by a signal")
def test_a_server_that_is_killed_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, llama.cpp's and vLLM, as far as they are here; more of ours for the others."""
    left = Path(tempfile.mkdtemp(prefix="k"))  # short, for sockets: a server that is killed leaves its own behind
    monkeypatch.setenv("TMPDIR", str(left))
    chance = random.Random(_SEED)
    standing = Standing(tmp_path)
    try:
        for number in range(KILLS):
            standing.start()
            folder = tmp_path / f"job-{number}"
            folder.mkdir()
            victim, at = chance.choice(list(standing.processes)), chance.randrange(1, ROWS * 8 // 10)
            killer = Killer(standing.processes[victim], at)
            begun_s = time.monotonic()
            ending = run(folder, list(standing.processes), killer.watcher())
            assert (ending.finished, ending.pace.done, killer.answered) == (True, ROWS, ROWS)
            places = ", ".join(f"{place.name} {place.rows} ({place.state})" for place in ending.pace.places)
            seconds = time.monotonic() - begun_s
            note(f"kill {number + 1}: {victim} after {at} rows; {places}; {seconds:.1f} s")
            standing.bury(victim)
    finally:
        standing.close()
        shutil.rmtree(left, ignore_errors=True)


SIDE, PATCH, WIDTH = 56, 14, 32


def write_projector(path: Path, width: int) -> Path:
    """A vision tower of two layers (LLaVA's form) and its projector into a model of this width."""
    random = np.random.default_rng(21)
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "block_count": 2,
        "projection_dim": width,
        "attention.head_count": 2,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))

    add("v.patch_embd.weight", WIDTH, 3, PATCH, PATCH)
    add("v.class_embd", WIDTH)
    add("v.position_embd.weight", (SIDE // PATCH) ** 2 + 1, WIDTH)
    for layer in range(2):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"v.blk.{layer}.{part}.weight", WIDTH, WIDTH)
            add(f"v.blk.{layer}.{part}.bias", WIDTH)
        for part in ("ln1", "ln2"):
            add(f"v.blk.{layer}.{part}.weight", WIDTH)
            add(f"v.blk.{layer}.{part}.bias", WIDTH)
        for part, rows, columns in (("ffn_up", 2 * WIDTH, WIDTH), ("ffn_down", WIDTH, 2 * WIDTH)):
            add(f"v.blk.{layer}.{part}.weight", rows, columns)
            add(f"v.blk.{layer}.{part}.bias", rows)
    for number, columns in ((0, WIDTH), (2, width)):
        add(f"mm.{number}.weight", width, columns)
        add(f"mm.{number}.bias", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pictured(shade: int) -> ChatMessage:
    rows = zlib.compress(b"".join(b"\0" + bytes([shade, 255 - shade, 90]) * 64 for _ in range(64)))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    picture = Picture("image/png", base64.b64encode(file).decode("ascii"))
    return ChatMessage("user", "What is it?", parts=parts_with("What is it?", (picture,)))


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_a_model_that_sees_and_one_that_does_not(tmp_path: Path) -> None:
    model = gguf_of(starter_for_tests(), tmp_path)
    width = json.loads((starter_for_tests() / "config.json").read_text("utf-8"))["hidden_size"]
    projector = write_projector(tmp_path / "mmproj.gguf", width)
    few = SamplingParams(max_tokens=4, temperature=0.0)
    plain = ChatMessage("user", "What is it?")
    with llama_server(tmp_path, model, "--mmproj", str(projector)) as (url, _), Client(endpoint_at(url)) as client:
        assert about(client).found.blind == ()
        read = [client.ask(RemoteRequest((message,), few)).prompt_tokens or 0 for message in (plain, pictured(30))]
        assert read[1] >= read[0] + (SIDE // PATCH) ** 2  # a token for each patch
    with llama_server(tmp_path, model) as (url, _), Client(endpoint_at(url)) as client:
        assert about(client).found.blind == ("starter",)
        with refused(ErrorCode.PICTURES_NOT_READ, kind=RemoteError):
            client.ask(RemoteRequest((pictured(30),), few))
        assert client.ask(RemoteRequest((plain,), few)).finish_reason in ("stop", "length")


KEY = "0123456789abcdef"
HELLO = (ChatMessage("user", "Hello"),)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(Address(port=0, key=KEY)) as running, Client(endpoint_at(running.url, model="mixtral"), KEY) as found:
        found.models()  # its thread is there before the first test
        yield found


def test_it_says_who_it_is_and_lacks_nothing(client: Client) -> None:
    seen = about(client)
    assert (seen.found.server, seen.found.version, seen.found.lacks) == ("switchyard", version(), ())
    assert "mixtral" in seen.found.models
    assert seen.found.blind == ("broken", "mixtral")
    assert seen.problem == ""


def test_the_same_answer_every_time_with_its_counts(client: Client) -> None:
    told: list[str] = []
    request = RemoteRequest(HELLO, SamplingParams(max_tokens=6, top_k=20, min_p=0.01, repetition_penalty=1.1))
    first = client.ask(request, lambda delta: told.append(delta.text + delta.reasoning))
    again = client.ask(request)
    assert (first.text, first.reasoning) == (again.text, again.reasoning)
    assert "".join(told) == first.reasoning + first.text
    assert first.generated_tokens == 6
    assert first.prompt_tokens
    assert first.finish_reason == "length"
    assert set(first.left_out) <= {"dry"}


def test_schemas_choices_and_tools(client: Client) -> None:
    limits = SamplingParams(max_tokens=200)
    choices = Constraint(choices=("red", "blue"))
    assert client.ask(RemoteRequest(HELLO, limits, constraint=choices)).text in ("red", "blue")
    tool = Tool("weather", "Of a city.", json.dumps(TOOL["function"]["parameters"]))  # type: ignore[index]
    answer = client.ask(RemoteRequest(HELLO, limits, tools=(tool,), must_call=True))
    assert [call.name for call in answer.tool_calls] == ["weather"], answer


def test_its_refusals_are_understood(client: Client) -> None:
    with pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest(HELLO, model="nobody"))
    assert failed.value.kind is Trouble.WRONG_MODEL
    with pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest((ChatMessage("user", "word " * 300),)))
    assert (failed.value.kind, failed.value.code) == (Trouble.REFUSED, ErrorCode.PROMPT_TOO_LONG)
    with Client(client.endpoint, "") as stranger, pytest.raises(RemoteError) as failed:
        stranger.models()
    assert failed.value.kind is Trouble.KEY
