"""A conversation as the tokens that its model was trained to read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from engine.common.chat import ChatMessage, PromptEnd, Tool, tool_described
from engine.common.config import Thinking
from engine.common.errors import CancelCheck, EngineError, ErrorCode, never_cancelled
from engine.common.pictures import pictures_of
from engine.families.replies.reader import takes_tools, template_text, thinking_values
from engine.runtime.load.tokenizer import knows_chatml
from engine.runtime.pictures import Sight
from engine.untrusted_text.process import UNTRUSTED_TEXT, Rendered, TooManyTokensError, UntrustedTextError
from engine.untrusted_text.templates import Spans, TemplateRefusedError, is_control, own_bytes

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"  # quotes keep the line break
)
_PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Result"}


def implied_stops(tokenizer: Any) -> tuple[str, ...]:
    """Stop strings that the format of the prompt brings with it: plain text has no token that ends a turn."""
    if tokenizer.chat_template is not None or knows_chatml(tokenizer):
        return ()
    return ("\nUser:", "\nSystem:")


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    cancelled: CancelCheck = never_cancelled,
    tools: Sequence[Tool] = (),
    thinking: Thinking = "auto",
    end: PromptEnd = "answer",
    most_tokens: int | None = None,
    sight: Sight | None = None,
) -> list[int]:
    """Token ids of the conversation, ready for the assistant's answer unless `end` says otherwise.

    What was thought before earlier answers is the template's to keep or to leave out; most leave it out.

    The checkpoint's own template and tokenizer run in a process that can be stopped.  A system message that the
    template refuses or leaves out becomes the beginning of the first user message.  Control tokens are those that the
    template itself wrote; all that others wrote is text, wherever it stands.

    Args:
        sight: reads the pictures in messages; without it there may be none.

    Raises:
        EngineError: `INVALID_REQUEST` if there is no message; `MODEL_UNSUPPORTED` if the template cannot be rendered,
            or it or the tokenizer takes too much time or memory; `PROMPT_TOO_LONG` if there are clearly more tokens
            than `most_tokens`, which is then known before all of them are made.
        RequestCancelled: `cancelled()` came true meanwhile.
    """
    if not messages:
        raise EngineError(ErrorCode.INVALID_REQUEST, "There is no message to answer: write one first.")
    if tools and not takes_tools(template_text(tokenizer)):
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            "This model's chat template has no place for tools, so that it would never see them: ask without tools, or "
            "use a model that can call them.",
        )
    pictures = [sight.see(each) for message in messages for each in pictures_of(message)] if sight is not None else []
    messages = [replace(message, content=encodable(message.content)) for message in messages]
    if tokenizer.chat_template is None and not knows_chatml(tokenizer):
        text = _plain(messages, end)
        if sight is not None and pictures:
            raise sight.no_place()
        ids = encode(tokenizer, text, special=True, written=(), cancelled=cancelled, most_tokens=most_tokens)
        # Some tokenizers close every text; a prompt must stay open.
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids

    turns = [_turn(message) for message in messages]

    def render(turns: list[dict[str, Any]]) -> Rendered:
        prompt = _render(tokenizer, turns, cancelled, tools, thinking, answers=end == "answer")
        return _reopened(prompt, messages[-1].content) if end == "continue" else prompt

    folded = _fold_system(turns)
    try:
        try:
            prompt = render(turns)
            said = _untrusted(prompt)
            accepted = folded is None or all(_is_in(turn, said) for turn in turns if turn["role"] == "system")
        except TemplateRefusedError:
            if folded is None:
                raise
            accepted = False
        if not accepted:
            assert folded is not None
            prompt = render(folded)
    except TemplateRefusedError as error:
        raise _template_at_fault(f"cannot write this conversation ({str(error).rstrip('.')})") from error
    if sight is not None and pictures:
        prompt = _with_pictures(prompt, sight.mark, list(map(sight.text_of, pictures)))
    text, written = prompt.text, prompt.written
    ids = encode(tokenizer, text, special=False, written=written, cancelled=cancelled, most_tokens=most_tokens)
    return sight.with_ids(ids, pictures) if sight is not None and pictures else ids


def _with_pictures(prompt: Rendered, mark: str, texts: Sequence[str]) -> Rendered:
    """With what stands for each picture in place of its mark, where the template itself wrote that."""
    pieces, written, at, left, grown = list[str](), list[tuple[int, int]](), 0, list(texts), 0
    for begin, end in prompt.written:
        since = begin
        span = begin + grown
        while left and (found := prompt.text.find(mark, since, end)) >= 0:
            text = left.pop(0)
            pieces += [prompt.text[at:found], text]
            grown += len(text) - len(mark)
            at = since = found + len(mark)
        written.append((span, end + grown))
    return Rendered("".join([*pieces, prompt.text[at:]]), written)


def encode(
    tokenizer: Any,
    text: str,
    *,
    special: bool,
    written: Spans | None = None,
    cancelled: CancelCheck = never_cancelled,
    most_tokens: int | None = None,
) -> list[int]:
    """Tokens of a text, with what the tokenizer adds at its ends if `special`.

    Args:
        written: the parts of the text in which a control token is read as such, and not as text; None for all.

    Raises:
        EngineError: `MODEL_UNSUPPORTED` if the tokenizer fails, or takes too much time or memory; `PROMPT_TOO_LONG` as
            `chat_prompt`.
        RequestCancelled: `cancelled()` came true meanwhile.
    """
    try:
        if isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            return UNTRUSTED_TEXT.encode(
                tokenizer, text, special=special, written=written, cancelled=cancelled, most_tokens=most_tokens
            )
        # One of transformers' own programs, which cannot be sent; only its vocabulary is the checkpoint's.
        return _encode_here(tokenizer, text, special=special, written=written)
    except TooManyTokensError as error:
        tokens, most = error.tokens, error.most_tokens
        raise _too_long(f"about {tokens:,}", most, f"about {tokens - most:,}") from None
    except UntrustedTextError as error:
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"The model's tokenizer {error}: download or copy its tokenizer files again, or use another model.",
        ) from error


def encodable(text: str) -> str:
    """`text` without half surrogate pairs, which come from broken arguments and which no tokenizer takes."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def check_length(prompt_tokens: int, context_tokens: int) -> None:
    """Raises `PROMPT_TOO_LONG` unless at least one token of answer fits behind the prompt."""
    if prompt_tokens >= context_tokens:
        raise _too_long(f"{prompt_tokens:,}", context_tokens, f"at least {prompt_tokens - context_tokens + 1:,}")


def _too_long(tokens: str, context_tokens: int, by: str) -> EngineError:
    return EngineError(
        ErrorCode.PROMPT_TOO_LONG,
        f"The prompt is {tokens} tokens long, but this model holds {context_tokens:,} together with the answer: "
        f"shorten it by {by} tokens, or start a new chat.",
    )


def _turn(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: with text, or with parts where there are pictures."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    parts = json.loads(message.parts) if message.parts else []
    if any(part.get("type") == "image_url" for part in parts):
        turn["content"] = [
            {"type": "image"} if part["type"] == "image_url" else {"type": "text", "text": encodable(str(part["text"]))}
            for part in parts
            if part.get("type") in ("image_url", "text")
        ]
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
        if not (message.tool_calls and message.content):
            turn["thinking"] = message.reasoning  # gpt-oss's name for it, whose template refuses it beside those
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        turn["tool_call_id"] = message.answers
    return turn


def _render(
    tokenizer: Any,
    turns: list[dict[str, Any]],
    cancelled: CancelCheck,
    tools: Sequence[Tool],
    thinking: Thinking,
    *,
    answers: bool,
) -> Rendered:
    """What the template writes; with the beginning of an answer if `answers`."""
    template = _template(tokenizer, tools)
    values = {"messages": turns, "tools": list(map(tool_described, tools)) or None, "documents": None}
    own = {
        **thinking_values(template, thinking),
        "add_generation_prompt": answers,
        **{
            name: [str(each) for each in token] if isinstance(token, list | tuple) else str(token)
            for name, token in tokenizer.special_tokens_map.items()
        },
    }
    try:
        return UNTRUSTED_TEXT.render(template, values, cancelled, own=own)
    except UntrustedTextError as error:
        raise _template_at_fault(str(error)) from error


def _reopened(prompt: Rendered, content: str) -> Rendered:
    """What a template wrote, up to where its last turn can go on."""
    untrusted = _untrusted(prompt)
    for said in (content, content.strip()):
        at = untrusted.rfind(said)
        if said and at >= 0:
            end = at + len(said)
            return Rendered(
                prompt.text[:end], [(first, min(last, end)) for first, last in prompt.written if first < end]
            )
    raise EngineError(
        ErrorCode.INVALID_REQUEST,
        "The last message cannot be continued: it is empty, or this model's chat template changes it.",
    )


def _untrusted(prompt: Rendered) -> str:
    """What others wrote in a prompt, with half surrogate pairs, which are nobody's text, in place of all else."""
    pieces, at = [], 0
    for begin, end in prompt.written:
        pieces += [prompt.text[at:begin], "\ud800" * (end - begin)]
        at = end
    return "".join([*pieces, prompt.text[at:]])


def _template(tokenizer: Any, tools: Sequence[Tool] = ()) -> str:
    template = tokenizer.chat_template
    if template is None:
        return _CHATML
    if isinstance(template, dict):
        template = (template.get("tool_use") if tools else None) or template.get("default")
    if not isinstance(template, str):
        raise _template_at_fault("has several versions, but none named default")
    return template


def _template_at_fault(what: str) -> EngineError:
    return EngineError(
        ErrorCode.MODEL_UNSUPPORTED,
        f"The model's chat template {what}: check its chat_template or tokenizer_config.json, or use another model.",
    )


def _encode_here(tokenizer: Any, text: str, *, special: bool, written: Spans | None) -> list[int]:
    if written is None:
        # `verbose=False`: transformers' own warning about long texts says less than PROMPT_TOO_LONG does.
        return _as_ids(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    added = tokenizer.added_tokens_decoder.items()
    control = {token.content: index for index, token in added if is_control(token.content, special=token.special)}
    pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"
    own = own_bytes(len(text), written)
    shown = "".join(sign if is_own else "\0" for sign, is_own in zip(text, own, strict=True))
    ids, at = [], 0
    for mark in [*re.finditer(pattern, shown), None]:
        piece = text[at : mark.start() if mark else len(text)]
        found = _as_ids(tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True))
        if set(found) & set(control.values()) - {tokenizer.unk_token_id}:
            raise UntrustedTextError("fails (a control token in the text cannot be written as text)")
        ids += found
        if mark:
            ids.append(control[mark[0]])
            at = mark.end()
    return _as_ids(tokenizer.build_inputs_with_special_tokens(ids)) if special else ids


def _fold_system(turns: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The turns with every system message at the head of the first user message; `None` if there is no such message."""
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    if not system.strip():
        return None
    rest = [dict(turn) for turn in turns if turn["role"] != "system"]
    first = next((turn for turn in rest if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": system}, *rest]
    if isinstance(said := first["content"], str):
        first["content"] = f"{system}\n\n{said}"
    else:
        first["content"] = [{"type": "text", "text": f"{system}\n\n"}, *said]
    return rest


def _is_in(turn: dict[str, Any], text: str) -> bool:
    """Whether the template wrote this turn; some drop a system message without a word."""
    return turn["content"].strip() in text


def _plain(messages: Sequence[ChatMessage], end: PromptEnd) -> str:
    turns = [f"{_PLAIN_NAMES[message.role]}: {message.content.strip()}\n" for message in messages]
    text = "".join(turns)
    return text + "Assistant:" if end == "answer" else text.removesuffix("\n") if end == "continue" else text


def _as_ids(ids: Any) -> list[int]:
    return [int(index) for index in ids]
