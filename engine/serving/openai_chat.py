"""OpenAI's interface: models, chat completions, completions and embeddings.

Of what other servers add to it, this takes `continue_final_message`, `add_generation_prompt` and `ignore_eos` (vLLM),
the count of a conversation's tokens (llama.cpp), and says how many tokens a model holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.batch_files.openai_requests import (
    BadRequestError,
    read_constraint,
    read_messages,
    read_number,
    read_sampling,
    refuse_what_is_not_given,
)
from engine.checkpoint.library import LibraryEntry
from engine.common.chat import ChatMessage, PromptEnd
from engine.common.errors import EngineError, ErrorCode
from engine.common.installed import version
from engine.process.failures import as_engine_error, log_failure
from engine.protocol import Ask, Finished, Progress
from engine.serving.embeddings import MOST_DIMENSIONS, read_texts
from engine.serving.openai_answer import Wanted
from engine.serving.service import Service, body_of, gathered, of_engine, status_of, while_connected
from engine.serving.streams import WAITS, JSONResponse, Lines, event_line, opened, read_comment, server_sent
from engine.serving.tools import ToolUse, openai_tools

MOST_ANSWERS = 16
_CODES = {ErrorCode.MODEL_NOT_FOUND: "model_not_found", ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded"}

_KINDS = {401: "authentication_error", 403: "permission_error"}


def openai_error(error: EngineError | BadRequestError, status: int | None = None) -> Response:
    """An error in OpenAI's form, with a status that is its own or this."""
    error = of_engine(error)
    status = status or status_of(error)
    return JSONResponse({"error": _error(error, status)}, status)


def _error(error: EngineError, status: int | None = None) -> dict[str, Any]:
    status = status or status_of(error)
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    kind = _KINDS.get(status, kind)
    code = "invalid_api_key" if status == 401 else _CODES.get(error.code)
    return {"message": error.message, "type": kind, "param": None, "code": code}


def routes(service: Service) -> list[Route]:
    """The paths of this interface."""
    api = _OpenAi(service)
    found = []
    for path, method, endpoint in (
        ("/models", "GET", api.models),
        ("/models/{name:path}", "GET", api.model),
        ("/chat/completions", "POST", api.chat),
        ("/chat/completions/input_tokens", "POST", api.count),
        ("/completions", "POST", api.completions),
        ("/embeddings", "POST", api.embeddings),
    ):
        # Some clients are told the address without the version.
        found += [Route(f"{version}{path}", endpoint, methods=[method]) for version in ("/v1", "")]
    return found


class _OpenAi:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, _request: Request) -> Response:
        listed = [self._described(entry.name, entry) for entry in await self._service.models()]
        return JSONResponse({"object": "list", "data": listed, "version": version()})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._described(*await self._service.entry_of(request.path_params["name"])))

    def _described(self, name: str, entry: LibraryEntry) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.started_s,
            "owned_by": "switchyard",
            "max_model_len": entry.context_tokens or None,
            "architecture": {"input_modalities": ["text", "image"] if entry.sees else ["text"]},
        }

    async def embeddings(self, request: Request) -> Response:
        body = await body_of(request)
        texts = read_texts(body.get("input"))
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise BadRequestError("has an encoding_format other than float or base64")
        dimensions = None if body.get("dimensions") is None else _whole(body, "dimensions", 0, 1, MOST_DIMENSIONS)
        name, path = await self._service.path_of(body.get("model"))
        found = await self._service.embed(request, path, texts, dimensions=dimensions)
        vectors = found.in_base64() if form == "base64" else found.numbers()
        listed = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return JSONResponse({"object": "list", "data": listed, "model": name, "usage": usage})

    async def chat(self, request: Request) -> Response:
        body = await body_of(request)
        name, asked, uses = await self._conversation(body)
        return await self._answer(request, body, name, [asked], uses, is_chat=True)

    async def count(self, request: Request) -> Response:
        _name, asked, _uses = await self._conversation(await body_of(request))
        counting = self._service.prompt_length(asked)
        tokens = await while_connected(request, counting)
        return JSONResponse({"object": "chat.completion.input_tokens", "input_tokens": tokens})

    async def _conversation(self, body: Mapping[str, Any]) -> tuple[str, Ask, ToolUse]:
        uses, messages = openai_tools(body), read_messages(body.get("messages"))
        name, asked = await self._service.ask_of(body, "chat", messages, uses, read_end(body, messages))
        top = _whole(body, "top_logprobs", 0, 0, 20) if body.get("logprobs") else None
        return name, replace(asked, top_chances=top), uses

    async def completions(self, request: Request) -> Response:
        body = await body_of(request)
        refuse_what_is_not_given(body, "completions")
        name, path = await self._service.path_of(body.get("model"))
        top = _whole(body, "logprobs", 0, 0, 20) if body.get("logprobs") is not None else None
        only_echo = body.get("echo") is True and body.get("max_tokens") == 0
        if body.get("echo") and top is not None:
            raise BadRequestError(
                "asks for probabilities of the prompt's tokens (echo with logprobs), which are not here"
            )
        like = Ask(
            path,
            special=body.get("add_special_tokens") is not False,
            sampling=read_sampling({"max_tokens": 16, **body, **({"max_tokens": None} if only_echo else {})}),
            constraint=read_constraint(body),
            top_chances=top,
            ignores_end=body.get("ignore_eos") is True,
            wants="prompt" if only_echo else "answer",
        )
        return await self._answer(request, body, name, _prompts(like, body.get("prompt", "")), ToolUse(), is_chat=False)

    async def _echoes(self, request: Request, asked: list[Ask]) -> list[str]:
        """The prompts as texts."""
        seen = [self._service.prompt(ask) for ask in asked if ask.ids]
        texts = iter(await while_connected(request, gathered(seen)))
        return [next(texts).text if ask.ids else ask.text or "" for ask in asked]

    async def _answer(
        self, request: Request, body: Mapping[str, Any], name: str, asked: list[Ask], uses: ToolUse, *, is_chat: bool
    ) -> Response:
        count = _whole(body, "n", 1, 1, MOST_ANSWERS)
        if len(asked) * count > MOST_ANSWERS:
            raise BadRequestError(f"asks for {len(asked) * count} answers; at most {MOST_ANSWERS} are given at once")
        options = body.get("stream_options")
        echoes = await self._echoes(request, asked) if body.get("echo") else [""] * len(asked)
        wanted = Wanted(
            name,
            tuple(ask for prompt in asked for ask in _several(prompt, count)),
            count,
            uses,
            is_chat,
            bool(body.get("stream")),
            isinstance(options, Mapping) and bool(options.get("include_usage")),
            tuple(echo for echo in echoes for _ in range(count)),
        )
        if wanted.streams:
            lines = self._stream(wanted, says_read=body.get("return_progress") is True)
            return server_sent(
                await opened(request, lines, WAITS, lambda error: [event_line({"error": _error(error)})])
            )
        answers = wanted.answers()
        works = [self._service.whole(ask, answer.take) for ask, answer in zip(wanted.asks, answers, strict=True)]
        await while_connected(request, gathered(works))
        choices = [answer.choice(index) for index, answer in enumerate(answers)]
        return JSONResponse({**wanted.head(), "choices": choices, "usage": wanted.usage(answers)})

    async def _stream(self, wanted: Wanted, *, says_read: bool) -> Lines:
        """`says_read`: how much of a prompt has been read comes in chunks, as from llama.cpp, and not in comments."""
        head, began_s = wanted.head(chunk=True), time.monotonic()
        queue, left = asyncio.Queue[tuple[int, Any]](), len(wanted.asks)

        async def follow(index: int, ask: Ask) -> None:
            try:
                async for event in self._service.events(ask):
                    queue.put_nowait((index, event))
            except Exception as error:  # nobody may wait for ever
                if not isinstance(error, EngineError):
                    log_failure(error, "answering a request")
                queue.put_nowait((index, as_engine_error(error, "answering a request")))

        tasks = [asyncio.create_task(follow(index, ask)) for index, ask in enumerate(wanted.asks)]
        answers = wanted.answers()
        try:
            while left:
                index, event = await queue.get()
                if isinstance(event, EngineError):
                    raise event
                if isinstance(event, Progress):
                    ms = round(1000 * (time.monotonic() - began_s))
                    read = {"total": event.total, "cache": 0, "processed": event.done, "time_ms": ms}
                    chunk = {**head, "choices": [{"index": index, "delta": {}}], "prompt_progress": read}
                    yield event_line(chunk) if says_read else read_comment(event)
                    continue
                for delta in answers[index].take(event):
                    yield event_line({**head, "choices": [{"index": index, **delta}]})
                left -= isinstance(event, Finished)
            if wanted.counts:
                yield event_line({**head, "choices": [], "usage": wanted.usage(answers)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _several(asked: Ask, count: int) -> list[Ask]:
    """The same prompt `count` times, each with a seed of its own if there is one."""
    seed = asked.sampling.get("seed")
    seeds = [{} if seed is None else {"seed": seed + number} for number in range(count)]
    return [replace(asked, sampling={**asked.sampling, **seeded}) for seeded in seeds]


def _prompts(like: Ask, given: Any) -> list[Ask]:
    """A text, or tokens, or a list of either, each as a request like this one."""
    several = given if isinstance(given, list) and not are_tokens(given) else [given]
    prompts = []
    for one in several:
        if isinstance(one, str):
            prompts.append(replace(like, text=one))
        elif are_tokens(one):
            prompts.append(replace(like, ids=tuple(one)))
        else:
            raise BadRequestError("has a prompt that is neither a text nor a list of tokens")
    if not prompts:
        raise BadRequestError("has no prompt")
    return prompts


def are_tokens(given: Any) -> bool:
    """Whether it is a list of numbers of tokens."""
    is_list = isinstance(given, list) and bool(given)
    return is_list and all(isinstance(token, int) and not isinstance(token, bool) for token in given)


def read_end(body: Mapping[str, Any], messages: tuple[ChatMessage, ...]) -> PromptEnd:
    """How the prompt of a conversation is to end.

    Raises:
        BadRequestError: what is asked contradicts itself, or there is no answer that could be continued.
    """
    if [message.role for message in messages[-2:]] == ["assistant", "assistant"]:
        raise BadRequestError("ends with two answers in a row; join them, or ask something")
    opens = body.get("add_generation_prompt")
    if not body.get("continue_final_message"):
        return "whole" if opens is False else "answer"
    if opens:
        raise BadRequestError("has both continue_final_message and add_generation_prompt; leave one of them out")
    if messages[-1].role != "assistant":
        raise BadRequestError("has a continue_final_message, but does not end with an answer that could be continued")
    return "continue"


def _whole(body: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if value is True and name == "logprobs":
        return 0
    number: int = read_number(value, name, whole=True)
    if not least <= number <= most:
        raise BadRequestError(f"has {str(value)[:20]!r} as {name}; use a whole number from {least} to {most}")
    return number
