"""Looks at an endpoint before it is used: which server it is, which models it has, and what it cannot do.

What a server can do is asked of the server: a handful of requests for one or a few tokens each, to one model.
"""

from __future__ import annotations

import base64
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Picture, Tool, parts_with
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, never_cancelled
from engine.common.plain_text import plain_line
from engine.protocol import Token
from engine.remote.chat_form import RemoteAnswer, RemoteRequest
from engine.remote.client import Client, lacking
from engine.remote.endpoint import Found, Lack, Server
from engine.remote.failures import RemoteError, Trouble

LACKS: dict[Lack, str] = {
    "stream": "answers come whole, not as they are written",
    "usage": "it does not count tokens",
    "tools": "it calls no tools",
    "schema": "it does not keep to a schema",
    "sampling": "it takes temperature and top-p, but no top-k, min-p or repetition penalty",
}
"""What a server cannot do, for people."""

SERVERS: dict[Server, str] = {
    "": "unknown",
    "switchyard": "Switchyard",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama-cpp-python",
    "ollama": "Ollama",
    "openai": "OpenAI",
    "other": "a server with OpenAI's interface",
}

_QUESTION = (ChatMessage("user", "Say hello."),)
_TOOL = Tool("hello", "Says hello.", '{"type": "object", "properties": {}}')
_SCHEMA = Constraint(
    schema='{"type": "object", "properties": {"hello": {"type": "string", "enum": ["you"]}}, "required": ["hello"],'
    ' "additionalProperties": false}'
)


def _pictured() -> ChatMessage:
    """A question about a grey picture of 64 x 64 pixels: some models refuse smaller ones."""
    rows = zlib.compress(b"".join(b"\0" + b"\x80" * 64 for _ in range(64)))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    text = "What colour is this?"
    picture = Picture("image/png", base64.b64encode(file).decode("ascii"))
    return ChatMessage("user", text, parts=parts_with(text, (picture,)))


@dataclass(frozen=True, slots=True)
class About:
    """What a look at an endpoint found.

    Attributes:
        model: the one that was tried; empty if there are several and none was named.
        latency_s: until its list of models was here; first_token_s: until the first token of a short answer; None if
            no model was tried.
        problem: why the model that was tried gave no answer, as a sentence; empty if it did.
    """

    found: Found
    model: str
    latency_s: float
    first_token_s: float | None = None
    problem: str = ""


def about(client: Client, model: str = "", cancelled: CancelCheck = never_cancelled) -> About:
    """Looks at the endpoint, and tries the model, the endpoint's own, or the only one there."""
    began = time.monotonic()
    found = client.models(cancelled)
    latency_s = time.monotonic() - began
    found = _with_version(client, found, cancelled)
    model = model or client.endpoint.model or (found.models[0] if len(found.models) == 1 else "")
    found = lacking(found, set())
    if model:
        found = replace(found, blind=tuple(each for each in found.blind if each != model))  # it is asked again
    client.found = found
    if not model:
        return About(found, "", latency_s)
    lacks: set[Lack] = set()
    deltas: list[Token] = []
    try:
        answer = _first_answer(client, model, lacks, deltas, cancelled)
    except RemoteError as error:
        if error.kind in (Trouble.KEY, Trouble.ADDRESS, Trouble.CERTIFICATE):
            raise
        return About(found, model, latency_s, problem=error.message)
    if answer.generated_tokens is None:
        lacks.add("usage")
    few = SamplingParams(max_tokens=1)
    trials: tuple[tuple[Lack, RemoteRequest], ...] = (
        ("tools", RemoteRequest(_QUESTION, few, model, tools=(_TOOL,))),
        ("tools", RemoteRequest(_QUESTION, SamplingParams(max_tokens=32), model, tools=(_TOOL,), must_call=True)),
        ("schema", RemoteRequest(_QUESTION, SamplingParams(max_tokens=12), model, constraint=_SCHEMA)),
        ("sampling", RemoteRequest(_QUESTION, SamplingParams(top_k=20, min_p=0.01, max_tokens=1), model)),
    )
    for lack, request in trials:
        if lack not in lacks and not _can(client, request, cancelled):
            lacks.add(lack)
    found = lacking(found, lacks)
    if not _can(client, RemoteRequest((_pictured(),), few, model), cancelled):
        found = replace(found, blind=(*found.blind, model))
    client.found = found
    return About(found, model, latency_s, answer.first_token_s, "")


def _first_answer(
    client: Client, model: str, lacks: set[Lack], deltas: list[Token], cancelled: CancelCheck
) -> RemoteAnswer:
    """A short answer, as a stream if the server gives one."""
    request = RemoteRequest(_QUESTION, SamplingParams(max_tokens=4), model)
    for lack in ("usage", "stream", None):
        try:
            return client.ask(request, deltas.append, cancelled)
        except RemoteError as error:
            if error.kind is not Trouble.REFUSED or lack is None:
                raise
            lacks.add(lack)
            client.found = lacking(client.found, lacks)
    raise AssertionError


def _can(client: Client, request: RemoteRequest, cancelled: CancelCheck) -> bool:
    """Whether the server takes a request, and does as it says where that can be seen."""
    try:
        answer = client.ask(request, cancelled=cancelled)
    except RemoteError as error:
        return error.kind not in (Trouble.REFUSED, Trouble.SERVER)
    if answer.left_out:
        return False
    if request.must_call:  # some take it and answer in words; one that was cut off may have been about to call
        return bool(answer.tool_calls) or answer.finish_reason == "length"
    if request.constraint is None or not answer.text.strip():
        return True
    return answer.text.lstrip().startswith("{")


_VERSIONS: tuple[tuple[str, Server | None, Callable[[Any], Any]], ...] = (
    ("/version", "vllm", lambda said: said["version"]),
    ("/server_info", "sglang", lambda said: said["version"]),
    ("/get_server_info", "sglang", lambda said: said["version"]),  # before 0.5.6
    ("/props", "llama.cpp", lambda said: said["build_info"]),
    ("/api/version", "ollama", lambda said: said["version"]),
)
"""Where servers tell their version, below the address without its path."""


def _with_version(client: Client, found: Found, cancelled: CancelCheck) -> Found:
    """The version, and which server it is if its list of models did not tell."""
    if found.version or found.server == "openai":
        return found
    for path, server, version_in in _VERSIONS:
        if found.server in (server, "other"):
            with suppress(RemoteError, LookupError, TypeError):
                version = plain_line(str(version_in(client.get(f"{client.endpoint.root}{path}", cancelled))))[:60]
                return replace(found, server=server or found.server, version=version)
    if found.server == "other":
        with suppress(RemoteError, LookupError, TypeError):
            described = client.get(f"{client.endpoint.root}/openapi.json", cancelled)["info"]
            if "llama.cpp Python" in str(described["title"]):
                version = plain_line(str(described["version"]))[:60]
                return replace(found, server="llama-cpp-python", version=version)
    return found
