"""Chats and rows through servers as people run them, with the starter: llama.cpp's, vLLM and `switchyard serve`."""

import json
import os
from pathlib import Path

import pytest

from engine.batch_files.job_watcher import JobWatcher
from engine.batch_files.prepared_job import prepare
from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Tool
from engine.common.config import BatchJob, SamplingParams
from engine.common.errors import ErrorCode, RequestCancelled
from engine.protocol import Token
from engine.remote.capabilities import about
from engine.remote.chat_form import RemoteRequest
from engine.remote.client import Client
from engine.remote.endpoint import Endpoint, endpoint_at
from engine.remote.failures import RemoteError, Trouble
from engine.remote.job import run_remote_job
from tests.engine.test_serve_verb import served
from tests.real_servers import gguf_of, llama_server, needs_vllm, vllm_server
from tests.starter import starter_for_tests

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.name != "posix", reason="asked to end by a signal"),
]
KEY = "0123456789abcdef"
CAPITAL = (ChatMessage("user", "What is the capital of France?"),)


def check(endpoint: Endpoint, key: str) -> None:
    """What every server must give."""
    told: list[Token] = []
    with Client(endpoint, key) as client:
        answer = client.ask(RemoteRequest(CAPITAL, SamplingParams(max_tokens=30)), told.append)
        assert "Paris" in answer.text
        assert "".join(delta.text for delta in told) == answer.text
        assert len(told) > 2
        assert answer.prompt_tokens
        assert answer.generated_tokens
        assert answer.first_token_s


def check_refusals(endpoint: Endpoint) -> None:
    """What every server with a context of 2,048 tokens must refuse, and what it may answer in part."""
    with Client(endpoint, "wrong-key") as client, pytest.raises(RemoteError) as failed:
        client.ask(RemoteRequest(CAPITAL))
    assert failed.value.kind is Trouble.KEY
    with Client(endpoint, KEY) as client:
        with pytest.raises(RemoteError) as failed:
            client.ask(RemoteRequest((ChatMessage("user", "word " * 3000),)))
        assert (failed.value.kind, failed.value.code) == (Trouble.REFUSED, ErrorCode.PROMPT_TOO_LONG)
        # More than there is room for is no reason to refuse.
        assert "Paris" in client.ask(RemoteRequest(CAPITAL, SamplingParams(max_tokens=5000, stop=(".",)))).text
        told: list[Token] = []
        with pytest.raises(RequestCancelled):
            client.ask(RemoteRequest(CAPITAL, SamplingParams(max_tokens=1500)), told.append, lambda: len(told) > 3)
        assert client.ask(RemoteRequest(CAPITAL, SamplingParams(max_tokens=5))).text


def test_llama_cpps_server(tmp_path: Path) -> None:
    with llama_server(tmp_path, gguf_of(starter_for_tests(), tmp_path), "--api-key", KEY, "-c", "2048") as (url, _pid):
        endpoint = endpoint_at(url, "llama")
        with Client(endpoint, KEY) as client:
            seen = about(client)
        # It takes tools with the starter's chat template, which has no place for them, and then does without: that is
        # seen if the answer is short.
        assert (seen.found.server, seen.found.models) == ("llama.cpp", ("starter",))
        assert set(seen.found.lacks) <= {"tools"}
        assert seen.found.version
        assert seen.problem == ""
        check(endpoint, KEY)
        check_refusals(endpoint)


TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = Tool(
    "weather", "Of a city.", '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}'
)


@needs_vllm
def test_vllm(tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS_TEMPLATE, encoding="utf-8")
    options = ["--api-key", KEY, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--chat-template", str(template), "--enable-prompt-tokens-details"]
    with vllm_server(tmp_path, starter_for_tests(), *options) as (url, _pid):
        endpoint = endpoint_at(url, "rack")
        with Client(endpoint, KEY) as client:
            seen = about(client)
            assert (seen.found.server, seen.found.models, seen.found.contexts) == ("vllm", ("starter",), (2048,))
            assert (seen.found.lacks, seen.problem) == ((), "")
            assert seen.found.version
            check(endpoint, KEY)
            check_refusals(endpoint)
            check_what_is_bound(client)
            with pytest.raises(RemoteError) as failed:
                client.ask(RemoteRequest(CAPITAL, model="nobody"))
            assert failed.value.kind is Trouble.WRONG_MODEL
            long = RemoteRequest((ChatMessage("user", "word " * 300),), SamplingParams(max_tokens=1))
            client.ask(long)
            assert client.ask(long).reused_tokens
        answer_rows(tmp_path, endpoint)


def check_what_is_bound(client: Client) -> None:
    """Settings, choices, schemas and calls of a server that lacks nothing."""
    sampling = SamplingParams(temperature=0.7, top_k=20, min_p=0.05, repetition_penalty=1.1, seed=3, max_tokens=6)
    assert set(client.ask(RemoteRequest(CAPITAL, sampling)).left_out) == set()
    limits = SamplingParams(max_tokens=60)
    choices = Constraint(choices=("Rome", "Paris"))
    assert client.ask(RemoteRequest(CAPITAL, limits, constraint=choices)).text == "Paris"
    schema = Constraint(
        schema='{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}'
    )
    assert json.loads(client.ask(RemoteRequest(CAPITAL, limits, constraint=schema)).text)["city"] == "Paris"
    called = client.ask(RemoteRequest(CAPITAL, limits, tools=(WEATHER,), must_call=True))
    assert [call.name for call in called.tool_calls] == ["weather"]
    conversation = (*CAPITAL, ChatMessage("assistant", "", tool_calls=called.tool_calls[:1]))
    said = ChatMessage("tool", "Sunny.", answers=called.tool_calls[0].id)
    assert client.ask(RemoteRequest((*conversation, said), limits, tools=(WEATHER,))).finish_reason


def answer_rows(folder: Path, endpoint: Endpoint) -> None:
    """A small job, with a schema."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"Is {row} even?"}) + "\n" for row in range(12)))
    job = BatchJob(
        str(source),
        str(output),
        sampling=SamplingParams(max_tokens=20),
        choices=("yes", "no"),
        endpoints=(endpoint.url,),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.remote.client.read_key", lambda _endpoint: KEY)
        nobody_waits = JobWatcher(lambda *_: None, lambda *_: None, lambda: False, lambda: None, lambda: False)
        ending = run_remote_job(prepare(job), nobody_waits)
    assert (ending.finished, ending.pace.done, ending.pace.failed) == (True, 12, 0)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(row["answer"] in ("yes", "no") for row in rows)


def test_another_switchyard_with_the_starter(tmp_path: Path) -> None:
    with served(tmp_path, starter_for_tests()) as (url, _pid):
        endpoint = endpoint_at(url, "other", model="starter")
        with Client(endpoint, "") as client:
            seen = about(client, client.models().models[0])
        # The starter's chat template has no place for tools, which the server says.
        assert (seen.found.server, seen.found.lacks, seen.problem) == ("switchyard", ("tools",), "")
        check(endpoint_at(url, "other", model=seen.model), "")
