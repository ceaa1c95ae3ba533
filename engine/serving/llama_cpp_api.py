"""What clients of llama.cpp's server ask beside OpenAI's interface: whether it is there, and what a prompt is made of.

`/health`, `/tokenize`, `/detokenize` and `/apply-template`.  Its own `/completion`, its slots, `/infill`, adapters and
metrics are not here: their clients can use OpenAI's interface, or they are about the insides of that program.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.batch_files.openai_requests import BadRequestError, read_messages
from engine.protocol import Ask, Prompt
from engine.serving.openai_chat import are_tokens, read_end
from engine.serving.service import Service, body_of, while_connected
from engine.serving.streams import JSONResponse
from engine.serving.tools import openai_tools

HEALTH = ("/health", "/v1/health")
"""Whoever watches over servers asks there, without a key."""


def routes(service: Service) -> list[Route]:
    """The paths of this interface."""
    api = _LlamaCpp(service)
    return [
        *(Route(path, api.health, methods=["GET"]) for path in HEALTH),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/apply-template", api.apply_template, methods=["POST"]),
    ]


class _LlamaCpp:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def tokenize(self, request: Request) -> Response:
        body = await body_of(request)
        text = body.get("content", "")
        if not isinstance(text, str):
            raise BadRequestError("has a content that is not text")
        seen = await self._seen(request, body, text=text, special=bool(body.get("add_special")))
        if not body.get("with_pieces"):
            return JSONResponse({"tokens": list(seen.ids)})
        pieces = [{"id": token, "piece": _piece(bytes(raw))} for token, raw in zip(seen.ids, seen.raw, strict=True)]
        return JSONResponse({"tokens": pieces})

    async def detokenize(self, request: Request) -> Response:
        body = await body_of(request)
        tokens = body.get("tokens", [])
        if tokens == []:
            return JSONResponse({"content": ""})
        if not are_tokens(tokens):
            raise BadRequestError("has tokens that are not a list of whole numbers")
        return JSONResponse({"content": (await self._seen(request, body, ids=tuple(tokens))).text})

    async def apply_template(self, request: Request) -> Response:
        body = await body_of(request)
        messages = read_messages(body.get("messages"))
        _name, ask = await self._service.ask_of(body, "chat", messages, openai_tools(body), read_end(body, messages))
        return JSONResponse({"prompt": (await while_connected(request, self._service.prompt(ask))).text})

    async def _seen(self, request: Request, body: dict[str, Any], **asked: Any) -> Prompt:
        _name, path = await self._service.path_of(body.get("model"))
        return await while_connected(request, self._service.prompt(Ask(path, **asked)))


def _piece(raw: bytes) -> str | list[int]:
    """The text of a token, or its bytes where they are a part of a character only."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
