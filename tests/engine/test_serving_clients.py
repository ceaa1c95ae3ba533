"""Clients at large: a thousand that misbehave, and programs that people use, where they are installed.

`SWITCHYARD_CLIENTS` names a folder with an environment of Python (`bin/python`) that has litellm (with mcp, for tools),
langchain-openai and llm; `SWITCHYARD_AIDER` one with aider-chat, which wants older packages and a Python below 3.13;
`SWITCHYARD_NODE` a folder with `node_modules` that has `openai`, `ai` and `@ai-sdk/openai-compatible`.
"""

import json
import os
import random
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.engine.test_serve_verb import served
from tests.engine.test_serving import HELLO, Running, serving
from tests.refusals import until
from tests.starter import starter_for_tests

pytestmark = pytest.mark.exhaustive
MISBEHAVING = 1000
_CHAT = {"messages": HELLO, "max_tokens": 60, "temperature": 0}


def _head(length: int, path: str = "/v1/chat/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def _misbehave(port: int, number: int) -> None:
    """One of eight ways, by its number."""
    chance = random.Random(number)
    body = json.dumps({**_CHAT, "stream": number % 16 < 8}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        way = number % 8
        try:
            if way == 0:  # connects and vanishes
                return
            if way == 1:
                caller.sendall(chance.randbytes(300))
            elif way == 2:  # a head that never ends
                caller.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nX: ")
            elif way == 3:  # a body that never comes
                caller.sendall(_head(9999) + b'{"messages"')
            elif way == 4:  # vanishes in mid-answer
                caller.sendall(_head(len(body)) + body)
                caller.recv(40)
            elif way == 5:  # vanishes before the answer
                caller.sendall(_head(len(body)) + body)
            elif way == 6:  # a body that is too large, as far as anybody reads it
                caller.sendall(_head(2**26))
                for _ in range(40):
                    caller.sendall(b" " * 2**20)
            else:
                caller.sendall(_head(9) + b'{"model":')
                caller.recv(400)
        except OSError:
            return  # it was cut off


def test_a_thousand_that_misbehave_leave_nothing_behind() -> None:
    with serving() as running:
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(100)]
        try:
            assert running.chat().status_code == 200
            with ThreadPoolExecutor(24) as pool:
                list(pool.map(lambda number: _misbehave(running.port, number), range(200)))
                until(lambda: _is_idle(running))
                before = psutil.Process().memory_info().rss
                served = [pool.submit(lambda: running.chat(max_tokens=8).status_code) for _ in range(40)]
                rude = [pool.submit(_misbehave, running.port, number) for number in range(200, MISBEHAVING)]
                assert {each.result() for each in served} == {200}
                for each in rude:
                    each.result()
            until(lambda: _is_idle(running))
            together = running.engine.scheduler._batch
            assert together is not None
            until(lambda: together.pool.held == 0)
            assert running.chat().status_code == 200
            grown = psutil.Process().memory_info().rss - before
            assert grown < 100 * 2**20, f"{grown / 2**20:.0f} MiB more"
        finally:
            for caller in silent:
                caller.close()


def _is_idle(running: Running) -> bool:
    return running.broker.state.under_way + running.broker.state.waiting == 0


PYTHON = {
    "litellm": """
        import litellm
        asked = dict(model="openai/mixtral", api_base=URL + "/v1", api_key="any", messages=HELLO, max_tokens=6)
        whole = litellm.completion(**asked)
        assert whole.usage.completion_tokens == 6, whole
        stream = litellm.completion(**asked, stream=True, temperature=0)
        parts = [part.choices[0].delta.content or "" for part in stream]
        assert len("".join(parts)) > 0
        tools = [dict(type="function", function=dict(name="weather", parameters=dict(type="object", properties=dict(
            city=dict(enum=["Rome"])), required=["city"], additionalProperties=False)))]
        called = litellm.completion(**{**asked, "max_tokens": 200}, tools=tools, tool_choice="required")
        assert called.choices[0].message.tool_calls[0].function.name == "weather"
        claude = litellm.completion(**{**asked, "model": "anthropic/mixtral", "api_base": URL})
        assert claude.usage.completion_tokens == 6, claude
        ollama = litellm.completion(**{**asked, "model": "ollama_chat/mixtral", "api_base": URL})
        assert ollama.choices[0].message.content is not None
        try:
            litellm.completion(**{**asked, "model": "openai/nothing"})
            raise SystemExit("no error")
        except litellm.NotFoundError:
            pass
    """,
    "langchain_openai": """
        from langchain_openai import ChatOpenAI
        model = ChatOpenAI(model="mixtral", base_url=URL + "/v1", api_key="any", max_tokens=6, temperature=0)
        answer = model.invoke("Hello")
        assert answer.usage_metadata["output_tokens"] == 6, answer
        assert "".join(part.text for part in model.stream("Hello")) == answer.text
        from pydantic import BaseModel, ConfigDict
        from typing import Literal
        class City(BaseModel):
            model_config = ConfigDict(extra="forbid")  # made-up weights would add more until their limit
            name: Literal["Rome", "Oslo"]
        longer = ChatOpenAI(model="mixtral", base_url=URL + "/v1", api_key="any", max_tokens=200, temperature=0)
        assert longer.with_structured_output(City, method="json_schema").invoke("Hello").name in ("Rome", "Oslo")
        called = longer.bind_tools([City], tool_choice="City").invoke("Hello")
        assert called.tool_calls[0]["args"]["name"] in ("Rome", "Oslo")
    """,
    "llm": """
        import os, pathlib, subprocess, sys, tempfile
        home = tempfile.mkdtemp()
        models = pathlib.Path(home) / "extra-openai-models.yaml"
        models.write_text(f"- model_id: here\\n  model_name: mixtral\\n  api_base: {URL}/v1\\n  api_key_name: here\\n")
        env = {**os.environ, "LLM_USER_PATH": home}
        def run(*args):
            return subprocess.run([sys.executable, "-m", "llm", *args], env=env, capture_output=True, text=True)
        assert run("keys", "set", "here", "--value", "any").returncode == 0
        done = run("-m", "here", "Hello", "-o", "max_tokens", "6", "--no-log")
        assert done.returncode == 0 and done.stdout.strip(), done
        whole = run("-m", "here", "Hello", "-o", "max_tokens", "6", "--no-stream", "--no-log")
        assert whole.returncode == 0 and whole.stdout.strip(), whole
    """,
}
NODE = {
    "openai": """
        import OpenAI from "openai";
        const client = new OpenAI({baseURL: URL + "/v1", apiKey: "any", maxRetries: 0});
        const asked = {model: "mixtral", messages: HELLO, max_tokens: 6, temperature: 0};
        const whole = await client.chat.completions.create(asked);
        if (whole.usage.completion_tokens !== 6) throw new Error(JSON.stringify(whole));
        let text = "";
        for await (const part of await client.chat.completions.create({...asked, stream: true}))
            text += part.choices[0]?.delta?.content ?? "";
        if (text !== whole.choices[0].message.content) throw new Error(text);
        const response = await client.responses.create({model: "mixtral", input: "Hello", max_output_tokens: 6});
        if (!response.output_text) throw new Error(JSON.stringify(response));
        try { await client.chat.completions.create({...asked, model: "nothing"}); throw new Error("no error"); }
        catch (error) { if (error.status !== 404) throw error; }
    """,
    "ai": """
        import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
        import { generateText, streamText } from "ai";
        const here = createOpenAICompatible({name: "here", baseURL: URL + "/v1", apiKey: "any"});
        const model = here("mixtral");
        const { text, usage } = await generateText({model, prompt: "Hello", maxOutputTokens: 6, temperature: 0});
        if (usage.outputTokens !== 6) throw new Error(JSON.stringify(usage));
        let streamed = "";
        for await (const part of streamText({model, prompt: "Hello", maxOutputTokens: 6, temperature: 0}).textStream)
            streamed += part;
        if (streamed !== text) throw new Error(streamed);
    """,
}


@pytest.mark.parametrize("name", PYTHON)
def test_clients_of_python(name: str, tmp_path: Path) -> None:
    python = Path(os.environ.get("SWITCHYARD_CLIENTS", "/nowhere")) / "bin" / "python"
    if not python.exists():
        pytest.skip("SWITCHYARD_CLIENTS names no environment with the clients' packages")
    with serving() as running:
        lines = [line[8:] for line in PYTHON[name].splitlines()]
        program = "\n".join([f"URL = {running.url!r}", f"HELLO = {HELLO!r}", *lines])
        _run([str(python), "-c", program], tmp_path)


@pytest.mark.parametrize("name", NODE)
def test_clients_of_node(name: str, tmp_path: Path) -> None:
    folder, node = Path(os.environ.get("SWITCHYARD_NODE", "/nowhere")), shutil.which("node")
    if node is None or not (folder / "node_modules" / name).exists():
        pytest.skip(f"SWITCHYARD_NODE names no folder with the package {name}, or there is no node")
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    script = tmp_path / "client.mjs"
    with serving() as running:
        given = f"const URL = {json.dumps(running.url)}, HELLO = {json.dumps(HELLO)};\n"
        script.write_text(NODE[name].replace("        const", given + "        const", 1), encoding="utf-8")
        _run([node, str(script)], tmp_path)


def test_aider(tmp_path: Path) -> None:
    """It asks about a file and has it changed, by streams and whole; its prompts need a model with room for them."""
    python = Path(os.environ.get("SWITCHYARD_AIDER", "/nowhere")) / "bin" / "python"
    if not python.exists():
        pytest.skip("SWITCHYARD_AIDER names no environment with aider-chat")
    (tmp_path / "hello.py").write_text("print('hello')\n", encoding="utf-8")
    settings = tmp_path / "settings.yml"
    settings.write_text("- name: openai/starter\n  extra_params: {max_tokens: 40, temperature: 0}\n", encoding="utf-8")
    told = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-pretty"]
    told += ["--analytics-disable", "--map-tokens", "0", "--model-settings-file", str(settings)]

    def aider(model: str, *more: str) -> str:
        command = [str(python), "-m", "aider", "--model", model, *told, *more, "hello.py"]
        variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "any", "HOME": str(tmp_path), "PYTHONPATH": ""}
        variables |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment = {**os.environ, **variables}
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, cwd=tmp_path)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout + done.stderr

    with served(tmp_path, starter_for_tests()) as (url, _server):
        asked = aider("openai/starter", "--chat-mode", "ask", "--message", "What does this program print?")
        changed = aider(
            "openai/starter", "--no-stream", "--edit-format", "whole", "--message", "Print goodbye instead."
        )
        for said in (asked, changed):
            assert re.search(r"Tokens: .+ sent, [1-9][\d.k]* received", said), said[-2000:]
        assert "no model named" in aider("openai/nothing", "--chat-mode", "ask", "--message", "Hello")


def _run(command: list[str], folder: Path) -> None:
    variables = {"TMPDIR": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env={**os.environ, **variables})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
