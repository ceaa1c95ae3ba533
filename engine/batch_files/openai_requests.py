"""What a request asks for, by the names of every interface: for rows of a batch file and clients of the server alike.

A field that changes the answer is in one of three tables: `_NUMBERS` (sampling), `_CONSTRAINTS` (what the answer must
satisfy) or `_NOT_GIVEN` (what is refused, and where it is not).  Other fields are ignored, as OpenAI's, Anthropic's and
Ollama's servers do: they are about users, caches and the machine (`user`, `metadata`, `store`, `service_tier`,
`num_ctx`), ask for more beside the answer (`include`), or are hints (`verbosity`, `prediction`, `budget_tokens`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from engine.batch_files.rows import Constraint
from engine.common.chat import ChatMessage, Picture, Role, ToolCall, picture_part
from engine.common.config import SamplingParams, Thinking
from engine.common.errors import EngineError
from engine.common.pictures import local_path, picture_at, picture_in_base64, picture_in_file
from engine.common.untrusted import DEEPEST, json_text, parse_json

Interface = Literal["chat", "completions", "responses", "messages", "ollama", "generate", "batch"]
"""How a request came: `messages` is Anthropic's; `ollama` and `generate` are Ollama's two."""
NO_LIMIT = 2**31
"""As `max_tokens`: the context ends the answer."""
_MOST_SEED = 2**63
_LEAST_TOP_P = 1e-6
"""Greedy: only the most likely token, as 0 means."""
MOST_STOPS = 100
_MOST_BIASES = 2**18
"""As many as a large vocabulary has tokens."""


class BadRequestError(ValueError):
    """A request that cannot be answered; the message completes a sentence about it."""


def read_messages(value: Any, *, elsewhere: bool = False, local_files: Path | None = None) -> tuple[ChatMessage, ...]:
    """The conversation.

    Args:
        elsewhere: another server reads it, pictures and all: what is more than text goes along as it is.
        local_files: see `read_content`.

    Raises:
        BadRequestError: it is empty, or not one of texts and pictures.
    """
    if not isinstance(value, list) or not value:
        raise BadRequestError("has no messages")
    return tuple(_message(entry, elsewhere=elsewhere, local_files=local_files) for entry in value)


def _message(entry: Any, *, elsewhere: bool, local_files: Path | None) -> ChatMessage:
    if not isinstance(entry, Mapping):
        raise BadRequestError("has a message that is not an object")
    role = entry.get("role")
    role = {"developer": "system", "function": "tool"}.get(str(role), role)
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequestError(f"has a message with the role {str(role)[:20]!r}; use system, user, assistant or tool")
    calls = _calls(entry) if role == "assistant" else ()
    content, parts = entry.get("content"), ""
    if entry.get("images"):  # Ollama's stand beside the text
        content = with_pictures(content, entry["images"])
    if elsewhere and isinstance(content, list) and _are_more_than_text(content):
        parts = json.dumps(content, ensure_ascii=False)
        content = [part for part in content if part.get("type") in _TEXTS]
    if content is None and (calls or role == "assistant"):
        content = ""
    text, parts = (read_text(content), parts) if elsewhere else read_content(content, role, local_files=local_files)
    thought = next((entry[name] for name in _THOUGHTS if isinstance(entry.get(name), str)), "")
    answers = entry.get("tool_call_id") or entry.get("tool_name") or entry.get("name")
    return ChatMessage(
        cast("Role", role),
        text,
        thought if role == "assistant" else "",
        calls,
        read_id(answers) if role == "tool" else "",
        parts,
    )


_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Where an assistant's message has what was thought before: in most servers' answers, in some's, and in Ollama's."""


_TEXTS = frozenset(("text", "input_text", "output_text"))


def _are_more_than_text(content: list[Any]) -> bool:
    """Whether these are parts in OpenAI's form, and some are something else."""
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in content]
    return all(isinstance(kind, str) for kind in kinds) and not _TEXTS.issuperset(kinds)


def read_text(value: Any) -> str:
    """A content that is text, or a list of texts.

    Raises:
        BadRequestError: it is something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else "" for part in value}
        if kinds <= _TEXTS:
            texts = [part.get("text") for part in value]
            if all(isinstance(text, str) for text in texts):
                return "".join(texts)
            raise BadRequestError("has a part of a message whose text is not text")
        if kinds & _PICTURES:
            raise BadRequestError("has a picture where only text can be; put it into a message of the user")
    raise BadRequestError("has a message that is not text")


_PICTURES = frozenset(("image_url", "input_image", "image"))
"""Kinds of parts: in OpenAI's chats, in its responses, and in Anthropic's messages."""
MOST_PICTURES = 64
"""In one turn: of more, no context holds the tokens."""


def has_pictures(content: Any) -> bool:
    """Whether some parts of a content are pictures, in any interface's form."""
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and str(part.get("type")) in _PICTURES for part in content
    )


def without_pictures(content: Any) -> tuple[Any, list[Any]]:
    if not has_pictures(content):
        return content, []
    pictures = [part for part in content if has_pictures([part])]
    return [part for part in content if not has_pictures([part])], pictures


def with_pictures(text: Any, images: Any) -> list[Any]:
    """A text and Ollama's `images`, which are files in base64, as a content in OpenAI's form.

    Raises:
        BadRequestError: they are no such list.
    """
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise BadRequestError("has images that are not a list of files in base64")
    urls = [each if each[:5].lower() == "data:" else f"data:;base64,{each}" for each in images]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": text or ""}]


def read_content(value: Any, role: Any = "user", *, local_files: Path | None = None) -> tuple[str, str]:
    """A content's text, and `ChatMessage.parts` if it has pictures, in whichever interface's form.

    Args:
        local_files: pictures may also be `file:` addresses and paths relative to this folder; no client of a server
            may name such.

    Raises:
        BadRequestError: it is something else, or a picture cannot be read.
    """
    if not has_pictures(value):
        return read_text(value), ""
    if role != "user":
        raise BadRequestError(f"has a picture in a message of the role {role}; put it into a message of the user")
    count = sum(has_pictures([part]) for part in value)
    if count > MOST_PICTURES:
        raise BadRequestError(f"has {count:,} pictures in a message; at most {MOST_PICTURES} are taken")
    parts, texts, number = list[dict[str, Any]](), list[str](), 0
    for part in value:
        if has_pictures([part]):
            number += 1
            which = f" (number {number} of {count} in its message)" if count > 1 else ""
            parts.append(picture_part(_picture(part, f"has a picture{which} that", local_files)))
        else:
            texts.append(read_text([part]))
            parts.append({"type": "text", "text": texts[-1]})
    return "".join(texts), json.dumps(parts, ensure_ascii=False)


def _picture(part: Mapping[str, Any], where: str, local_files: Path | None) -> Picture:
    found = part.get("source") if part.get("type") == "image" else part.get("image_url")
    if isinstance(found, Mapping) and isinstance(found.get("data"), str):  # Anthropic's
        return in_words(lambda: picture_in_base64(found["data"], where))
    address = found.get("url") if isinstance(found, Mapping) else found
    if not isinstance(address, str):
        raise BadRequestError(f"{where} is neither an address nor a file in base64; send data:image/png;base64,…")
    if local_files is not None and address[:5].lower() != "data:":
        return in_words(lambda: picture_in_file(local_path(address, local_files, where), where))
    return in_words(lambda: picture_at(address, where))


def in_words(read: Callable[[], Picture]) -> Picture:
    """The picture that `read` reads; what is wrong with it, as this module says such things."""
    try:
        return read()
    except EngineError as error:
        raise BadRequestError(error.message.removesuffix(".")) from None


def read_id(value: Any) -> str:
    """What names a call of a tool; empty if nothing does.

    Raises:
        BadRequestError: it is no name.
    """
    if value is None or isinstance(value, str):
        return value or ""
    raise BadRequestError("has the id of a tool call that is not text")


def _calls(entry: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    value = entry.get("tool_calls")
    entries: list[Any] = value if isinstance(value, list) else [] if value is None else [None]
    if entry.get("function_call") is not None:  # as it was before there were tools: its result names the function
        function = entry["function_call"]
        name = function.get("name") if isinstance(function, Mapping) else None
        entries = [*entries, {"id": name, "function": function}]
    calls = []
    for each in entries:
        function = each.get("function") if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping):
            raise BadRequestError("has a tool call without a function")
        calls.append(read_call(each.get("id"), function.get("name"), function.get("arguments")))
    return tuple(calls)


def read_call(call_id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call that an assistant made earlier; its arguments are an object, or one as JSON text.

    Raises:
        BadRequestError: one of them is not what it should be.
    """
    if not isinstance(name, str):
        raise BadRequestError("has a tool call without a function name")
    try:
        known = parse_json(arguments or "{}", deepest=DEEPEST) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        known = None
    if not isinstance(known, Mapping):
        raise BadRequestError(f"has a call of {name[:40]!r} whose arguments are not a JSON object")
    return ToolCall(read_id(call_id), name, json_text(known))


_NUMBERS: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_range",
    "seed": "seed",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Fields of a request, and those of `SamplingParams`; of several for one, the last counts."""
_WHOLE = frozenset(("top_k", "dry_allowed_length", "dry_range", "seed", "max_tokens"))


def read_number(value: Any, name: str, *, whole: bool = False) -> Any:
    """A number of any request.  A whole one may be written as 3.0, as many clients write all their numbers."""
    if whole and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise BadRequestError(f"has {str(value)[:20]!r} as {name}; use a {'whole ' if whole else ''}number")
    return value


def _sampling_number(name: str, value: Any) -> Any:
    """A number of sampling, with what -1 and the like mean to llama.cpp's, vLLM's and Ollama's clients."""
    ours = _NUMBERS[name]
    number = read_number(value, name, whole=ours in _WHOLE)
    if ours == "seed":
        return number % _MOST_SEED
    if ours == "top_p" and number == 0:
        return _LEAST_TOP_P
    if ours == "top_k" and number == -1:
        return 0
    ends_nowhere = number in (-1, -2) if ours == "max_tokens" else ours == "dry_range" and number == -1
    if ends_nowhere or (name == "num_predict" and number <= 0):
        return NO_LIMIT
    return min(number, NO_LIMIT)


def read_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that a request sets.

    Raises:
        BadRequestError: one of them makes no sense.
    """
    asked = {ours: _sampling_number(name, body[name]) for name, ours in _NUMBERS.items() if body.get(name) is not None}
    for name in ("stop_sequences", "stop"):
        if body.get(name) is not None:
            asked["stop"] = read_stop(body[name])
    if (breakers := body.get("dry_sequence_breakers")) is not None:
        if not isinstance(breakers, list) or not all(isinstance(each, str) for each in breakers):
            raise BadRequestError("has dry_sequence_breakers that are not a list of strings")
        asked["dry_breakers"] = tuple(breakers)
    if body.get("logit_bias"):
        asked["logit_bias"] = _bias(body["logit_bias"])
    if (thinking := _thinking(body)) is not None:
        asked["thinking"] = thinking
    try:
        SamplingParams(**asked)
    except EngineError as error:
        raise BadRequestError(f"has an invalid option: {error.message.rstrip('.')}") from None
    return asked


_EFFORTS: dict[str, Thinking] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


def _thinking(body: Mapping[str, Any]) -> Thinking | None:
    """How much to think: Ollama's `think`, Anthropic's `thinking`, OpenAI's efforts, or a value for the template."""
    think, thinking, values = body.get("think"), body.get("thinking"), body.get("chat_template_kwargs")
    kind = thinking.get("type") if isinstance(thinking, Mapping) else thinking
    if kind not in (None, True, False, "enabled", "disabled", "adaptive"):
        raise BadRequestError(f"has {str(kind)[:20]!r} as thinking; use enabled, disabled or adaptive")
    for switch in (think, kind == "enabled" if kind in ("enabled", "disabled") else kind):
        if isinstance(switch, bool):
            return "on" if switch else "off"
    efforts = [("think", think), ("reasoning_effort", body.get("reasoning_effort"))]
    efforts += [(name, _at(body, name)) for name in ("reasoning.effort", "output_config.effort")]
    for name, effort in efforts:
        if (effort is not None and not isinstance(effort, str)) or effort not in (None, *_EFFORTS):
            raise BadRequestError(f"has {str(effort)[:20]!r} as {name}; use {', '.join(_EFFORTS)}")
        # Anthropic's is about all that is written, and thinking must be asked for as well.
        if effort is not None and (name != "output_config.effort" or kind == "adaptive"):
            return _EFFORTS[effort]
    if isinstance(values, Mapping):
        for name in ("enable_thinking", "thinking"):
            if isinstance(values.get(name), bool):
                return "on" if values[name] else "off"
    return None


def _at(body: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of one in an object, as in `text.format`; None if it is not there."""
    head, _, rest = name.partition(".")
    value = body.get(head)
    if not rest or value is None:
        return value
    if not isinstance(value, Mapping):
        raise BadRequestError(f"has a {head} that is not an object")
    return value.get(rest)


def read_stop(value: Any) -> tuple[str, ...]:
    """Strings that end an answer: one, or a list.

    Raises:
        BadRequestError: they are neither, or too many.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(entry, str) and entry for entry in texts):
        raise BadRequestError("has a stop that is neither a string nor a list of strings")
    if len(texts) > MOST_STOPS:
        raise BadRequestError(f"has {len(texts):,} stop strings; at most {MOST_STOPS} are taken")
    return tuple(texts)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping) and len(value) > _MOST_BIASES:
        raise BadRequestError(f"has a logit_bias for {len(value):,} tokens; at most {_MOST_BIASES:,} are taken")
    try:
        return tuple((int(token), float(read_number(bias, "logit_bias"))) for token, bias in value.items())
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise BadRequestError("has a logit_bias that is not an object of token ids and numbers") from None


# --- what the answer must satisfy -----------------------------------------------------------------


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """What a request wants of the whole answer, under whichever name.

    Raises:
        BadRequestError: it cannot be read, or there are several.
    """
    found: dict[str, Constraint] = {}
    for name, read in _CONSTRAINTS.items():
        value = _at(body, name)
        constraint = None if value is None or value == "" else read(name, value)
        if constraint is not None:
            found[name] = constraint
    if len(found) > 1:
        raise BadRequestError(f"has both {' and '.join(list(found)[:2])}; leave one of them out")
    return next(iter(found.values()), None)


def _form(name: str, form: Any) -> Constraint | None:
    """OpenAI's forms, flat as in its newer interface and in Anthropic's, or not."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's clients may add a schema
        return _schema(name, {"type": "object"} if form.get("schema") is None else form["schema"])
    described = form.get("json_schema", form) if kind == "json_schema" else None
    if not isinstance(described, Mapping):
        raise BadRequestError(f"has an unsupported {name} type {str(kind)[:20]!r}")
    return _schema(name, described.get("schema", {"type": "object"}))


def _ollama_form(name: str, form: Any) -> Constraint:
    return _schema(name, {"type": "object"} if form == "json" else form)


def _json_object(name: str, wanted: Any) -> Constraint | None:
    return _schema(name, {"type": "object"}) if wanted else None


def _schema(name: str, schema: Any) -> Constraint:
    if isinstance(schema, str):
        try:
            schema = parse_json(schema, deepest=DEEPEST)
        except ValueError:
            schema = None
    if not isinstance(schema, Mapping):
        raise BadRequestError(f"has a {name} that is not a JSON schema")
    return Constraint(schema=json_text(schema))


def _choices(name: str, choices: Any) -> Constraint:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise BadRequestError(f"has a {name} that is not a list of texts")
    return Constraint(choices=tuple(choices))


def _regex(name: str, pattern: Any) -> Constraint:
    if not isinstance(pattern, str):
        raise BadRequestError(f"has a {name} that is not text")
    escaped = re.sub(r"(?s)\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), pattern)
    return Constraint(grammar=f"start: /{escaped}/")


_IN_LARK = {"/": r"\/", "\n": r"\n"}


def _grammar(name: str, grammar: Any) -> Constraint:
    """A grammar in Lark's form, or in llama.cpp's (GBNF)."""
    if not isinstance(grammar, str):
        raise BadRequestError(f"has a {name} that is not text")
    if len(grammar) > _MOST_GRAMMAR or grammar.count("::=") > _MOST_RULES:
        raise BadRequestError(f"has a {name} of more than {_MOST_GRAMMAR:,} characters or {_MOST_RULES} rules")
    from llguidance.gbnf_to_lark import any_to_lark  # with the native library

    try:
        return Constraint(grammar=any_to_lark(_CODED.sub(_plain_character, grammar)))
    except Exception as error:  # its own kinds, bare ones, and what Python makes of a text that ends too soon
        words = " ".join(str(error).split())[:100] or "it ends too soon"
        raise BadRequestError(f"has a {name} that cannot be read ({words})") from None


_MOST_GRAMMAR, _MOST_RULES = 2**16, 500
"""What is read at once; the time grows with the square of the rules."""
_CODED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _plain_character(found: re.Match[str]) -> str:
    """A character in the place of its code, which the reader of grammars mistakes for a shorter one."""
    code = int(found[1] or found[2] or found[3] or "-1", 16)
    if code < 0 or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return found[0]
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02x}"


_CONSTRAINTS: dict[str, Callable[[str, Any], Constraint | None]] = {
    "response_format": _form,
    "text.format": _form,  # OpenAI's responses
    "output_config.format": _form,  # Anthropic's, and what it was called before
    "output_format": _form,
    "format": _ollama_form,
    "json_schema": _schema,  # llama.cpp's
    "grammar": _grammar,
    "structured_outputs.json": _schema,  # vLLM's, and what they were called before
    "structured_outputs.json_object": _json_object,
    "structured_outputs.regex": _regex,
    "structured_outputs.choice": _choices,
    "structured_outputs.grammar": _grammar,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choices,
    "guided_grammar": _grammar,
    "regex": _regex,  # SGLang's
    "ebnf": _grammar,
}


# --- what is refused ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that changes the answer.

    Attributes:
        words: what it asks for.
        given: the interfaces that give it.
        nothing: values that ask for nothing.
    """

    words: str
    given: tuple[Interface, ...] = ()
    nothing: tuple[Any, ...] = (None, False, "", [], {})


_CHATS: tuple[Interface, ...] = ("chat", "responses", "messages", "ollama")
_NOT_STORED: tuple[Interface, ...] = ("chat", "completions", "messages", "ollama", "generate", "batch")
_NOT_GIVEN: dict[str, _Field] = {
    "stream": _Field("a stream", (*_CHATS, "completions", "generate")),
    "n": _Field("several answers", ("chat", "completions"), (None, 1)),
    "best_of": _Field("the best of several answers", (), (None, 0, 1)),
    "tools": _Field("tools", _CHATS),
    "functions": _Field("functions", ("chat",)),
    "logprobs": _Field("probabilities of tokens", ("chat", "completions")),
    "top_logprobs": _Field("probabilities of tokens", ("chat", "completions")),
    "prompt_logprobs": _Field("probabilities of tokens"),
    "n_probs": _Field("probabilities of tokens"),
    "echo": _Field("the prompt before the answer", ("completions",)),
    "suffix": _Field("text between a beginning and an end"),
    "audio": _Field("sound"),
    "modalities": _Field("answers other than text", (), (None, [], ["text"])),
    "images": _Field("the reading of pictures beside the messages", ("generate",)),
    "web_search_options": _Field("a web search"),
    "mcp_servers": _Field("tools of other servers"),
    "container": _Field("a container for code"),
    "previous_response_id": _Field("the continuation of an earlier answer; send all turns instead"),
    "conversation": _Field("the continuation of an earlier answer; send all turns instead"),
    "context": _Field("the continuation of an earlier answer; send all turns instead"),
    "background": _Field("an answer in the background"),
    "prompt": _Field("a stored prompt", _NOT_STORED),
    "template": _Field("another template"),
    "chat_template": _Field("another template"),
    "documents": _Field("documents for the template"),
    "truncate_prompt_tokens": _Field("a prompt that is cut", (), (None, -1)),
    "use_beam_search": _Field("beam search"),
    "length_penalty": _Field("a penalty on length", (), (None, 1)),
    "min_tokens": _Field("answers of a least length"),
    "min_new_tokens": _Field("answers of a least length"),
    "stop_token_ids": _Field("tokens that end the answer; use stop"),
    "stop_regex": _Field("patterns that end the answer; use stop"),
    "include_stop_str_in_output": _Field("the stop string in the answer"),
    "skip_special_tokens": _Field("control tokens in the answer", (), (None, True)),
    "bad_words": _Field("words that must not come"),
    "allowed_token_ids": _Field("tokens that alone may come"),
    "logits_processors": _Field("code for the choice of tokens"),
    "structural_tag": _Field("a structure of tags"),
    "structured_outputs.structural_tag": _Field("a structure of tags"),
    "structured_outputs.whitespace_pattern": _Field("a pattern of spaces"),
    "structured_outputs.disable_additional_properties": _Field("objects without further properties"),
    "guided_whitespace_pattern": _Field("a pattern of spaces"),
    "grammar_lazy": _Field("a grammar that begins later"),
    "samplers": _Field("an order of its own of sampling"),
    "mirostat": _Field("mirostat"),
    "typical_p": _Field("typical sampling", (), (None, 0, 1)),
    "tfs_z": _Field("tail-free sampling", (), (None, 0, 1)),
    "xtc_probability": _Field("XTC"),
    "dynatemp_range": _Field("a temperature that changes"),
    "top_n_sigma": _Field("top-n-sigma sampling", (), (None, 0, -1)),
    "top_a": _Field("top-a sampling"),
    "t_max_predict_ms": _Field("a limit of time", (), (None, 0, -1)),
    "thinking_budget_tokens": _Field("a limit of thoughts", (), (None, -1)),
    "thinking_token_budget": _Field("a limit of thoughts", (), (None, -1)),
    "reasoning_format": _Field("thoughts in the answer's text", (), (None, "", "auto", "deepseek", "deepseek-legacy")),
    "lora": _Field("adapters"),
}


def refuse_what_is_not_given(body: Mapping[str, Any], interface: Interface) -> None:
    """Raises BadRequestError if a request asks for an answer of a kind that nobody gives who has this interface."""
    for name, field in _NOT_GIVEN.items():
        if interface not in field.given and _at(body, name) not in field.nothing:
            words, _, instead = field.words.partition("; ")
            who = "a batch" if interface == "batch" else "this server"
            raise BadRequestError(
                f"asks for {words} ({name}), which {who} does not give{'; ' if instead else ''}{instead}"
            )
