"""OpenAI's interface: models, chat completions, completions, responses and embeddings.

Of what other servers add to it, this takes `continue_final_message`, `add_generation_prompt` and `ignore_eos` (vLLM),
says how many tokens a model holds, and answers what clients of llama.cpp's server ask beside it: a conversation's
tokens, `/health`, `/tokenize`, `/detokenize` and `/apply-template`.  That server's own `/completion`, its slots,
`/infill`, adapters and metrics are not here: their clients can use this interface, or they are about the insides of
that program.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from engine.batch_files.openai_format import FINISH
from engine.batch_files.openai_requests import (
    BadRequestError,
    read_call,
    read_constraint,
    read_content,
    read_id,
    read_messages,
    read_number,
    read_sampling,
    read_text,
    refuse_what_is_not_given,
    without_pictures,
)
from engine.checkpoint.library import LibraryEntry
from engine.common.chat import ChatMessage, PromptEnd, ToolCall, calls_listed
from engine.common.errors import EngineError, ErrorCode
from engine.common.installed import version
from engine.families.replies.reader import Part, Spoken, Thought
from engine.protocol import Ask, Began, Finished, NamedChances, NamedToken, Progress, Prompt, Token
from engine.serving.answers import (
    Answer,
    Blocks,
    Call,
    Endpoint,
    Kind,
    Reply,
    counted,
    event_line,
    openai_tools,
    respond,
    versioned,
)
from engine.serving.embeddings import MOST_DIMENSIONS, is_tokens, read_texts
from engine.serving.link import AnswerEvent

MOST_ANSWERS = 16
HEALTH = ("/health", "/v1/health")
"""Whoever watches over servers asks there, without a key."""
_CODES = {ErrorCode.MODEL_NOT_FOUND: "model_not_found", ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded"}
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 429 else "server_error")
    code = "invalid_api_key" if status == 401 else _CODES.get(error.code)
    return {"error": {"message": error.message, "type": kind, "param": None, "code": code}}


async def models(call: Call) -> Any:
    """OpenAI's list, and Anthropic's, which its clients ask for at the same address."""
    listed = [_described(call, entry.name, entry) for entry in await call.service.models()]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    return {"object": "list", "data": listed, "version": version(), "has_more": False, **ends}


async def model(call: Call) -> Any:
    return _described(call, *await call.service.entry_of(call.request.path_params["name"]))


def _described(call: Call, name: str, entry: LibraryEntry) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": call.service.started_s,
        "owned_by": "switchyard",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(call.service.started_s, UTC).isoformat(),
        "max_model_len": entry.context_tokens or None,
        "architecture": {"input_modalities": ["text", "image"] if entry.sees else ["text"]},
    }


async def embeddings(call: Call) -> Any:
    body = call.body
    texts = read_texts(body.get("input"))
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise BadRequestError("has an encoding_format other than float or base64")
    dimensions = None if body.get("dimensions") is None else _whole(body, "dimensions", 0, 1, MOST_DIMENSIONS)
    name, path = await call.service.path_of(body.get("model"))
    found = await call.service.embed(call.request, path, texts, dimensions=dimensions)
    vectors = found.in_base64() if form == "base64" else found.numbers()
    listed = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return {"object": "list", "data": listed, "model": name, "usage": usage}


async def chat(call: Call) -> Any:
    body = call.body
    name, ask = await _conversation(call)
    top = _whole(body, "top_logprobs", 0, 0, 20) if body.get("logprobs") else None
    return await _answer(call, name, [replace(ask, top_chances=top)], is_chat=True)


async def _conversation(call: Call) -> tuple[str, Ask]:
    body = call.body
    offer, messages = openai_tools(body), read_messages(body.get("messages"))
    return await call.service.ask_of(body, "chat", messages, offer, _read_end(body, messages))


async def completions(call: Call) -> Any:
    body = call.body
    refuse_what_is_not_given(body, "completions")
    name, path = await call.service.path_of(body.get("model"))
    top = _whole(body, "logprobs", 0, 0, 20) if body.get("logprobs") is not None else None
    only_echo = body.get("echo") is True and body.get("max_tokens") == 0
    if body.get("echo") and top is not None:
        raise BadRequestError("asks for probabilities of the prompt's tokens (echo with logprobs), which are not here")
    like = Ask(
        path,
        special=body.get("add_special_tokens") is not False,
        sampling=read_sampling({"max_tokens": 16, **body, **({"max_tokens": None} if only_echo else {})}),
        constraint=read_constraint(body),
        top_chances=top,
        ignores_end=body.get("ignore_eos") is True,
        wants="prompt" if only_echo else "answer",
    )
    return await _answer(call, name, _prompts(like, body.get("prompt", "")), is_chat=False)


async def _answer(call: Call, name: str, prompts: list[Ask], *, is_chat: bool) -> Any:
    body = call.body
    count = _whole(body, "n", 1, 1, MOST_ANSWERS)
    if len(prompts) * count > MOST_ANSWERS:
        raise BadRequestError(f"asks for {len(prompts) * count} answers; at most {MOST_ANSWERS} are given at once")
    echoes = [""] * len(prompts)
    if body.get("echo"):
        texts = iter(await call.service.prompts(call.request, *(ask for ask in prompts if ask.ids)))
        echoes = [next(texts).text if ask.ids else ask.text or "" for ask in prompts]
    choices = [
        _Choice(_seeded(ask, number), echo, is_chat=is_chat, is_legacy=bool(body.get("functions")))
        for ask, echo in zip(prompts, echoes, strict=True)
        for number in range(count)
    ]
    reply = _Choices(name, body, choices, count, is_chat=is_chat)
    asks = [choice.ask for choice in choices]
    return await respond(call, asks, reply, streams=body.get("stream"))


async def respond_as_items(call: Call) -> Any:
    name, ask = await _asked_for(call)
    return await respond(call, [ask], _Response(name, call.body, ask), streams=call.body.get("stream"))


async def _asked_for(call: Call) -> tuple[str, Ask]:
    offer = openai_tools(call.body, flat=True)
    return await call.service.ask_of(call.body, "responses", _turns_of(call.body), offer)


# --- what clients of llama.cpp's server ask ---------------------------------------------------------


async def health(_call: Call) -> Any:
    return {"status": "ok"}


async def tokenize(call: Call) -> Any:
    body = call.body
    text = body.get("content", "")
    if not isinstance(text, str):
        raise BadRequestError("has a content that is not text")
    seen = await _seen(call, text=text, special=bool(body.get("add_special")))
    if not body.get("with_pieces"):
        return {"tokens": list(seen.ids)}
    pieces = [{"id": token, "piece": _piece(bytes(raw))} for token, raw in zip(seen.ids, seen.raw, strict=True)]
    return {"tokens": pieces}


async def detokenize(call: Call) -> Any:
    body = call.body
    tokens = body.get("tokens", [])
    if tokens == []:
        return {"content": ""}
    if not is_tokens(tokens):
        raise BadRequestError("has tokens that are not a list of whole numbers")
    return {"content": (await _seen(call, ids=tuple(tokens))).text}


async def apply_template(call: Call) -> Any:
    _name, ask = await _conversation(call)
    (prompt,) = await call.service.prompts(call.request, ask)
    return {"prompt": prompt.text}


async def _seen(call: Call, **asked: Any) -> Prompt:
    _name, path = await call.service.path_of(call.body.get("model"))
    (prompt,) = await call.service.prompts(call.request, Ask(path, **asked))
    return prompt


_PATHS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/models", models),
    Endpoint("GET", "/models/{name:path}", model),
    Endpoint("POST", "/chat/completions", chat),
    Endpoint("POST", "/chat/completions/input_tokens", counted(_conversation, object="chat.completion.input_tokens")),
    Endpoint("POST", "/completions", completions),
    Endpoint("POST", "/responses", respond_as_items),
    Endpoint("POST", "/responses/input_tokens", counted(_asked_for, object="response.input_tokens")),
    Endpoint("POST", "/embeddings", embeddings),
    Endpoint("GET", "/health", health),
)
PATHS = (
    *versioned(_PATHS),
    Endpoint("POST", "/tokenize", tokenize),
    Endpoint("POST", "/detokenize", detokenize),
    Endpoint("POST", "/apply-template", apply_template),
)


class _Choices(Reply):
    """All answers to a request, those to the same prompt behind each other."""

    error_body = staticmethod(error_body)
    closes = "data: [DONE]\n\n"

    def __init__(
        self, name: str, body: Mapping[str, Any], choices: list[_Choice], to_each: int, *, is_chat: bool
    ) -> None:
        options = body.get("stream_options")
        self._counts = isinstance(options, Mapping) and bool(options.get("include_usage"))
        self._says_read = body.get("return_progress") is True
        self._began_s = time.monotonic()
        self._choices, self._to_each, self._left = choices, to_each, len(choices)
        kind = "chat.completion" if is_chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if is_chat and body.get("stream") else kind,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": None,
        }

    def take(self, event: AnswerEvent, index: int = 0) -> list[dict[str, Any]]:
        deltas = self._choices[index].take(event)
        lines = [{**self._head, "choices": [{"index": index, **delta}]} for delta in deltas]
        self._left -= isinstance(event, Finished)
        return lines if self._left or not self._counts else [*lines, {**self._head, "choices": [], **self._usage()}]

    def whole(self) -> dict[str, Any]:
        choices = [{"index": index, **choice.whole()} for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, **self._usage()}

    def wire(self, line: dict[str, Any]) -> str:
        return event_line(line)

    def reads(self, read: Progress, index: int) -> str:
        if not self._says_read:
            return super().reads(read, index)
        ms = round(1000 * (time.monotonic() - self._began_s))
        progress = {"total": read.total, "cache": 0, "processed": read.done, "time_ms": ms}
        return event_line({**self._head, "choices": [{"index": index, "delta": {}}], "prompt_progress": progress})

    def _usage(self) -> dict[str, Any]:
        """The tokens of all answers; a prompt counts once, however often it is answered."""
        prompts = [choice.ended for choice in self._choices[:: self._to_each]]
        prompt = sum(each.prompt_tokens for each in prompts)
        generated = sum(choice.ended.generated_tokens for choice in self._choices)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in prompts)},
            "completion_tokens_details": {"reasoning_tokens": sum(each.thought_tokens for each in self._choices)},
        }
        return {"usage": usage}


class _Choice(Answer):
    """One answer.

    Args:
        echo: what stands before it.
        is_chat: or else a text is continued.
        is_legacy: tools were offered as `functions`, whose calls have another form.
    """

    def __init__(self, ask: Ask, echo: str, *, is_chat: bool, is_legacy: bool) -> None:
        super().__init__(ask)
        self._echo, self._is_chat, self._is_legacy = echo, is_chat, is_legacy
        self._chances: list[NamedChances] = []
        self._named_characters = 0

    def take(self, event: AnswerEvent, _index: int = 0) -> list[dict[str, Any]]:
        deltas = super().take(event)
        if isinstance(event, Token) and event.chances:
            deltas = deltas or [self._spoken("")]
            deltas[0]["logprobs"] = self._logprobs(event.chances, self._named_characters)
            self._chances += event.chances
            self._named_characters += sum(len(each.token.text) for each in event.chances)
        return deltas

    def _read(self, event: Token | Finished) -> list[Part]:
        if self._is_chat:
            return super()._read(event)
        return [Spoken(event.text)] if isinstance(event, Token) else []

    def begins(self, _began: Began) -> list[dict[str, Any]]:
        if self._is_chat:
            return [_delta({"role": "assistant", "content": None})]
        self.parts.append(Spoken(self._echo))
        return self.says(self.parts[0])

    def says(self, part: Part) -> list[dict[str, Any]]:
        if isinstance(part, ToolCall):
            return [_delta(self._called([part], index=len(self.calls) - 1))]
        if isinstance(part, Thought):
            return [_delta({"reasoning_content": part.text})]
        return [self._spoken(part.text)] if part.text else []

    def ends(self) -> list[dict[str, Any]]:
        last: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        return [{**last, "logprobs": None, "finish_reason": self._reason}]

    def whole(self) -> dict[str, Any]:
        said, calls = self.text(Spoken), self.calls
        logprobs = self._logprobs(self._chances, 0) if self._chances else None
        chosen: dict[str, Any] = {"logprobs": logprobs, "finish_reason": self._reason}
        if not self._is_chat:
            return {**chosen, "text": said}
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if thought := self.text(Thought):
            message["reasoning_content"] = thought
        if calls:
            message |= {"content": said.strip() or None, **self._called(calls)}
        return {**chosen, "message": message}

    @property
    def _reason(self) -> str:
        called = "function_call" if self._is_legacy else "tool_calls"
        return called if self.calls else FINISH[self.ended.finish_reason]

    def _called(self, calls: list[ToolCall], **place: int) -> dict[str, Any]:
        listed = calls_listed(calls)
        return (
            {"function_call": listed[0]["function"]}
            if self._is_legacy
            else {"tool_calls": [place | each for each in listed]}
        )

    def _spoken(self, text: str) -> dict[str, Any]:
        return _delta({"content": text}) if self._is_chat else {"text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, chances: Sequence[NamedChances], begins: int) -> dict[str, Any]:
        if self._is_chat:
            told = [_logprob(each.token) | {"top_logprobs": list(map(_logprob, each.likeliest))} for each in chances]
            return {"content": told, "refusal": None}
        tokens = [each.token.text for each in chances]
        return {
            "tokens": tokens,
            "token_logprobs": [each.token.logprob for each in chances],
            "top_logprobs": [{token.text: token.logprob for token in each.likeliest} for each in chances],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=begins)),
        }


def _delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, "finish_reason": None}


def _logprob(token: NamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


def _seeded(ask: Ask, number: int) -> Ask:
    """The same, with a seed of its own if there is one."""
    seed = ask.sampling.get("seed")
    return ask if seed is None else replace(ask, sampling={**ask.sampling, "seed": seed + number})


def _prompts(like: Ask, given: Any) -> list[Ask]:
    """A text, or tokens, or a list of either, each as a request like this one."""
    several = given if isinstance(given, list) and (not given or not is_tokens(given)) else [given]
    prompts = []
    for one in several:
        if isinstance(one, str):
            prompts.append(replace(like, text=one))
        elif one and is_tokens(one):
            prompts.append(replace(like, ids=tuple(one)))
        else:
            raise BadRequestError("has a prompt that is neither a text nor a list of tokens")
    if not prompts:
        raise BadRequestError("has no prompt")
    return prompts


def _read_end(body: Mapping[str, Any], messages: tuple[ChatMessage, ...]) -> PromptEnd:
    """How the prompt of a conversation is to end."""
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


def _piece(raw: bytes) -> str | list[int]:
    """The text of a token, or its bytes where they are a part of a character only."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


# --- responses: the same answers as a list of items and their events; nothing is stored between requests ---


_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_THOUGHT: dict[str, Any] = {"type": "reasoning_text", "text": ""}


class _Response(Blocks):
    """One response, as a list of items of which the last may be open."""

    def __init__(self, name: str, body: Mapping[str, Any], ask: Ask) -> None:
        super().__init__(ask)
        self._number = 0
        self._is_open = False
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "model": name,
            "output": [],
            "parallel_tool_calls": ask.choice.several,
            "temperature": body.get("temperature"),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [tool for tool in body.get("tools") or [] if tool["type"] == "function"],
            "top_p": body.get("top_p"),
            "usage": None,
        }

    def begins(self, _began: Began) -> list[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        return [self._line(kind, response=dict(self._response)) for kind in kinds]

    def ends(self) -> list[dict[str, Any]]:
        is_cut = self.ended.finish_reason in ("length", "context")
        status = self._response["status"] = "incomplete" if is_cut else "completed"
        lines = self.closed(status)
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["usage"] = _items_usage(self.ended, self.thought_tokens)
        return [*lines, self._line(f"response.{status}", response=self._response)]

    def whole(self) -> dict[str, Any]:
        return self._response

    def breaks(self, error: EngineError) -> str:
        if self._is_open:
            self._item["status"] = "incomplete"
        self._response |= {"status": "failed", "error": {"code": "server_error", "message": error.message}}
        return self.wire(self._line("response.failed", response=self._response))

    def opened(self, kind: Kind) -> list[dict[str, Any]]:
        if kind == "thinking":
            return self._begun({"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}, _THOUGHT)
        head = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
        begun = self._begun(head, _TEXT)
        return [*begun, self._at("response.content_part.added", content_index=0, part=dict(_TEXT))]

    def more(self, _kind: Kind, text: str) -> dict[str, Any]:
        (part,) = self._item["content"]
        part["text"] += text
        return self._of_part("delta", part, delta=text)

    def called(self, call: ToolCall) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name}
        lines = self._begun({**item, "arguments": "", "status": "in_progress"})
        self._item["arguments"] = call.arguments
        lines.append(self._at("response.function_call_arguments.delta", delta=call.arguments))
        lines.append(self._at("response.function_call_arguments.done", arguments=call.arguments, name=call.name))
        return [*lines, *self.closed()]

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self._response["output"][-1]
        return item

    def _begun(self, item: dict[str, Any], *content: dict[str, Any]) -> list[dict[str, Any]]:
        if content:
            item["content"] = []
        place = len(self._response["output"])
        begun = self._line("response.output_item.added", output_index=place, item=deepcopy(item))
        item |= {"content": [dict(part) for part in content]} if content else {}
        self._response["output"].append(item)
        self._is_open = True
        return [begun]

    def closed(self, status: str = "completed") -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open, item, lines = False, self._item, []
        for part in item.get("content", ()):
            lines.append(self._of_part("done", part, text=part["text"]))
            if item["type"] == "message":
                lines.append(self._at("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        place = len(self._response["output"]) - 1
        return [*lines, self._line("response.output_item.done", output_index=place, item=item)]

    def _of_part(self, what: str, part: dict[str, Any], **fields: Any) -> dict[str, Any]:
        more: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
        return self._at(f"response.{part['type']}.{what}", content_index=0, **fields, **more)

    def _at(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = len(self._response["output"]) - 1
        return self._line(kind, item_id=self._item["id"], output_index=place, **fields)

    def _line(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _items_usage(ended: Finished, thought_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": ended.prompt_tokens,
        "input_tokens_details": {"cached_tokens": ended.reused_tokens},
        "output_tokens": ended.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": ended.prompt_tokens + ended.generated_tokens,
    }


def _turns_of(body: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    messages = []
    if body.get("instructions"):
        messages.append(ChatMessage("system", read_text(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
        return (*messages, ChatMessage("user", given))
    if not isinstance(given, list) or not given:
        raise BadRequestError("has no input")
    for item in given:
        for turn in _turn(item):
            last = messages[-1] if messages else None
            if turn.tool_calls and last is not None and last.role == "assistant":
                # One turn of the model may be several items: what it says, and each of its calls.
                messages[-1] = replace(last, tool_calls=(*last.tool_calls, *turn.tool_calls))
            else:
                messages.append(turn)
    return tuple(messages)


def _turn(item: Any) -> list[ChatMessage]:
    if not isinstance(item, Mapping):
        raise BadRequestError("has an input item that is not an object")
    kind = item.get("type", "message")
    if kind == "message":
        return list(read_messages([item]))
    if kind == "function_call":
        call = read_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        return [ChatMessage("assistant", "", tool_calls=(call,))]
    if kind == "function_call_output":
        output, pictures = without_pictures(item.get("output"))
        turns = [ChatMessage("tool", read_text(output), answers=read_id(item.get("call_id")))]
        text, parts = read_content(pictures)  # of the user, as templates have no others
        return [*turns, ChatMessage("user", text, parts=parts)] if parts else turns
    if kind == "reasoning":
        return []
    raise BadRequestError(f"has an input item of the type {str(kind)[:40]!r}, which this server does not take")
