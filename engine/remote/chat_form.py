"""A conversation as OpenAI's interface takes it, and what comes back: chunks of a stream, or a whole answer.

What a server takes beyond the interface depends on which server it is; what it would not take is left out, and said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from engine.batch_files.openai_requests import NO_LIMIT
from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, FinishReason, Tool, ToolCall, calls_listed, tool_described
from engine.common.config import SamplingParams
from engine.common.untrusted import json_text
from engine.families.replies.reader import Spoken, Thought, reply_reader
from engine.protocol import Token
from engine.remote.endpoint import Found, Lack, Server

_TAKES_MORE: frozenset[Server] = frozenset(("switchyard", "vllm", "sglang", "llama.cpp", "llama-cpp-python"))
"""Servers known to take `top_k`, `min_p` and a repetition penalty."""
_TAKES_TEMPLATE_VALUES: frozenset[Server] = frozenset(("switchyard", "vllm", "sglang", "llama.cpp"))
_FINISHES: dict[str, FinishReason] = {"length": "length", "max_tokens": "length"}


@dataclass(frozen=True, slots=True)
class RemoteRequest:
    """One answer that is wanted.

    Attributes:
        chosen: the fields of `sampling` that somebody chose; the others are left to the server. None: all are meant.
        model: its id; empty for the endpoint's own choice.
        must_call: the answer is a call of a tool.
        own_tools: in the place of both: the request's fields about tools, as JSON.
        constraint: what the whole answer must satisfy.
    """

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    model: str = ""
    tools: tuple[Tool, ...] = ()
    must_call: bool = False
    constraint: Constraint | None = None
    chosen: tuple[str, ...] | None = None
    own_tools: str = ""


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """A whole answer.

    Attributes:
        prompt_tokens, generated_tokens: as the server counted them; None if it did not say.
        reused_tokens: of the prompt, which it need not read again.
        pieces: how many pieces with text have come, most servers send one per token: the `generated_tokens` of its
            `Token`s.
        first_token_s, total_s: since the request was sent; `first_token_s` is None if nothing came.
        model: as the server calls it.
        left_out: settings that the server would not take, by their names in `SamplingParams`.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    reused_tokens: int = 0
    pieces: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    model: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def written(self) -> int:
        """Tokens of the answer, or the pieces that came where the server does not count."""
        return self.pieces if self.generated_tokens is None else self.generated_tokens

    @property
    def tokens_per_s(self) -> float:
        """Since the first token; 0 if fewer than two came."""
        writing_s = self.total_s - (self.first_token_s or 0.0)
        return (self.written - 1) / writing_s if self.written > 1 and self.first_token_s and writing_s > 0 else 0.0


def request_body(
    request: RemoteRequest, model: str, server: Server, lacks: tuple[Lack, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the request's body, the settings left out of it)."""
    body: dict[str, Any] = {"model": model, "messages": [_message(each) for each in request.messages]}
    sampling, left_out = _sampling(request.sampling, request.chosen, server, lacks)
    body |= sampling
    if "stream" not in lacks:
        body["stream"] = True
        if "usage" not in lacks:
            body["stream_options"] = {"include_usage": True}
    if request.tools and "tools" not in lacks:
        body["tools"] = list(map(tool_described, request.tools))
        if request.must_call:
            body["tool_choice"] = "required"
    if request.own_tools:
        body |= json.loads(request.own_tools)
    constraint = request.constraint
    if constraint is not None and "schema" not in lacks:
        if constraint.grammar:  # who knows no grammars answers without: whoever asks checks what comes
            body["structured_outputs"] = {"grammar": constraint.grammar}
        elif constraint.choices and server == "vllm":
            # A bare string is no JSON object, which OpenAI's interface asks for; these know choices.
            body["structured_outputs"] = {"choice": list(constraint.choices)}
        else:
            schema = {"name": "answer", "schema": schema_of(constraint), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body, left_out


def not_taken(sampling: SamplingParams, found: Found) -> tuple[str, ...]:
    """The settings that a server would not take, by their names in `SamplingParams`."""
    return _sampling(sampling, None, found.server, found.lacks)[1]


def schema_of(constraint: Constraint) -> Any:
    """The JSON schema that an answer is to satisfy; choices stand in an object, as `answer`."""
    if constraint.schema:
        return json.loads(constraint.schema)
    return {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": list(constraint.choices)}},
        "required": ["answer"],
        "additionalProperties": False,
    }


def chosen(constraint: Constraint, text: str) -> str:
    """An answer as one of the constraint's choices; other answers as they are."""
    if not constraint.choices or text in constraint.choices:
        return text
    try:
        answer = json.loads(text)["answer"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return text.strip()
    return answer if isinstance(answer, str) else text


def _message(message: ChatMessage) -> dict[str, Any]:
    content = json.loads(message.parts) if message.parts else message.content
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        found["content"] = content or None
        found["tool_calls"] = calls_listed(message.tool_calls)
    if message.role == "tool":
        found["tool_call_id"] = message.answers
    return found  # what an assistant thought is its own: most servers refuse or ignore it


def _sampling(
    sampling: SamplingParams, chosen: tuple[str, ...] | None, server: Server, lacks: tuple[Lack, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    limit = "max_completion_tokens" if server == "openai" else "max_tokens"
    found: dict[str, Any] = {limit: sampling.max_tokens} if sampling.max_tokens < NO_LIMIT else {}
    if chosen is not None:
        wanted = {name: getattr(sampling, name) for name in chosen if name != "max_tokens"}
        sampling = SamplingParams(**wanted)
    if chosen is None or "temperature" in chosen:
        found["temperature"] = sampling.temperature
    left_out: list[str] = []
    if sampling.top_p < 1:
        found["top_p"] = sampling.top_p
    if sampling.seed is not None:
        found["seed"] = sampling.seed
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name):
            found[name] = getattr(sampling, name)
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    takes_more = server in _TAKES_MORE and "sampling" not in lacks
    is_llama = server in ("llama.cpp", "llama-cpp-python")
    repetition = "repeat_penalty" if is_llama else "repetition_penalty"
    for name, theirs, is_on in (
        ("top_k", "top_k", sampling.top_k > 0),
        ("min_p", "min_p", sampling.min_p > 0),
        ("repetition_penalty", repetition, sampling.repetition_penalty != 1),
    ):
        if is_on and takes_more:
            found[theirs] = getattr(sampling, name)
        elif is_on:
            left_out.append(name)
    if takes_more and is_llama and chosen is None:
        # Its own standard is another: 0 is off here.
        found |= {"top_k": sampling.top_k or 0, "min_p": sampling.min_p, "top_p": sampling.top_p}
    if sampling.uses_dry and server == "llama.cpp" and takes_more:
        found |= {
            "dry_multiplier": sampling.dry_multiplier,
            "dry_base": sampling.dry_base,
            "dry_allowed_length": sampling.dry_allowed_length,
            "dry_penalty_last_n": sampling.dry_range,
            "dry_sequence_breakers": list(sampling.dry_breakers),
        }
    elif sampling.uses_dry:
        left_out.append("dry")
    if sampling.beams > 1:
        left_out.append("beams")
    if sampling.thinking != "auto":
        _set_thinking(found, left_out, sampling, server)
    return found, tuple(left_out)


def _set_thinking(found: dict[str, Any], left_out: list[str], sampling: SamplingParams, server: Server) -> None:
    thinking = sampling.thinking
    if thinking in ("low", "medium", "high"):
        found["reasoning_effort"] = thinking
    if server in _TAKES_TEMPLATE_VALUES:
        found["chat_template_kwargs"] = {"enable_thinking": thinking != "off"}
    elif server == "ollama" and thinking == "off":
        found["reasoning_effort"] = "none"
    elif thinking in ("on", "off"):
        left_out.append("thinking")


@dataclass(slots=True)
class Gathered:
    """An answer while it arrives.  Reasoning comes apart from the text, or in it between marks."""

    has_ended: bool = False
    finish: str = ""
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    reused_tokens: int = 0
    model: str = ""
    pieces: int = 0
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, list[str]] = field(default_factory=dict)
    _reader: Any = field(default_factory=lambda: reply_reader("", (), thinks=False, is_call=False))

    def take(self, chunk: dict[str, Any]) -> Token | None:
        """What a chunk of a stream, or a whole answer, adds; None if it is nothing to show."""
        if isinstance(usage := chunk.get("usage"), dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.generated_tokens = _count(usage.get("completion_tokens"))
            details = usage.get("prompt_tokens_details")
            self.reused_tokens = _count(details.get("cached_tokens")) or 0 if isinstance(details, dict) else 0
        self.model = self.model or str(chunk.get("model") or "")
        choices = chunk.get("choices")
        if not choices:
            return None
        choice = choices[0]
        part = choice.get("delta") or choice.get("message") or {}
        thought = part.get("reasoning_content") or part.get("reasoning")
        said = part.get("content")
        shown = self._shown(said if isinstance(said, str) else "", thought if isinstance(thought, str) else "")
        for number, call in enumerate(part.get("tool_calls") or ()):
            self._call(call, number)
            self.pieces += 1
        if choice.get("finish_reason"):
            self.finish = str(choice["finish_reason"])
        return shown

    def end(self) -> Token | None:
        """Nothing comes any more: what was held back, if anything was."""
        return self._split(self._reader.end(), "")

    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call_id or f"call_{index}", name, arguments or "{}")
            for index, (call_id, name, arguments) in sorted(self._calls.items())
        )

    @property
    def reason(self) -> FinishReason:
        return _FINISHES.get(self.finish, "stop")

    def _shown(self, said: str, thought: str) -> Token | None:
        if said or thought:
            self.pieces += 1
        return self._split(self._reader.feed(said) if said else [], thought)

    def _split(self, parts: list[Any], thought: str) -> Token | None:
        thought += "".join(part.text for part in parts if isinstance(part, Thought))
        said = "".join(part.text for part in parts if isinstance(part, Spoken))
        if thought:
            self.reasoning.append(thought)
        if said:
            self.text.append(said)
        return Token("", said, self.pieces, thought) if said or thought else None

    def _call(self, call: dict[str, Any], number: int) -> None:
        index = call.get("index")
        known = self._calls.setdefault(index if type(index) is int else number, ["", "", ""])
        function = call.get("function") or {}
        known[0] = known[0] or str(call.get("id") or "")
        known[1] += str(function.get("name") or "")
        arguments = function.get("arguments")
        known[2] += arguments if isinstance(arguments, str) else json_text(arguments) if arguments else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
