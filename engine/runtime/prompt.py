"""A conversation as the tokens that its model was trained to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import EngineError, ErrorCode
from engine.protocol import ChatMessage
from engine.runtime.vocabulary import token_id

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"  # in quotes: jinja drops a line break that ends a template
)
_PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


def template_note(tokenizer: Any) -> str:
    """What stands in for a missing chat template, in one sentence; empty if there is a template."""
    if tokenizer.chat_template is not None:
        return ""
    if _knows_chatml(tokenizer):
        return "The tokenizer has no chat template; ChatML is used, whose turn tokens are in its vocabulary."
    return "The tokenizer has no chat template; turns are written as plain “User:” and “Assistant:” lines."


def implied_stops(tokenizer: Any) -> tuple[str, ...]:
    """Stop strings that the format of the prompt brings with it: plain text has no token that ends a turn."""
    if tokenizer.chat_template is not None or _knows_chatml(tokenizer):
        return ()
    return ("\nUser:", "\nSystem:")


def chat_prompt(tokenizer: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of the conversation, ready for the assistant's answer.

    The checkpoint's own template is rendered in transformers' sandbox.  A system message that the template refuses or
    leaves out becomes the beginning of the first user message.  Control tokens that a person typed stay text.

    Raises:
        EngineError: `INVALID_REQUEST` if there is no message; `MODEL_UNSUPPORTED` if the template cannot be rendered.
    """
    if not messages:
        raise EngineError(ErrorCode.INVALID_REQUEST, "There is no message to answer: write one first.")
    if tokenizer.chat_template is None and not _knows_chatml(tokenizer):
        return _without_final_eos(tokenizer, _encode(tokenizer, _plain(messages), special=True))

    turns = [{"role": message.role, "content": message.content} for message in messages]
    folded = _fold_system(turns)
    try:
        text = _render(tokenizer, turns)
        accepted = folded is None or all(_is_in(turn, text) for turn in turns if turn["role"] == "system")
    except EngineError:
        if folded is None:
            raise
        accepted = False
    if not accepted:
        assert folded is not None
        turns = folded
        text = _render(tokenizer, turns)
    if _types_control_tokens(tokenizer, messages):
        return _as_ids(_apply(tokenizer, turns, tokenize=True, return_dict=False, sanitize_control_tokens=True))
    return _encode(tokenizer, text, special=False)


def check_length(prompt_tokens: int, context_tokens: int) -> None:
    """Raises `PROMPT_TOO_LONG` unless at least one token of answer fits behind the prompt."""
    if prompt_tokens >= context_tokens:
        raise EngineError(
            ErrorCode.PROMPT_TOO_LONG,
            f"The conversation is {prompt_tokens:,} tokens long, but this model holds {context_tokens:,} together with "
            f"its answer: shorten it by at least {prompt_tokens - context_tokens + 1:,} tokens or start a new chat.",
        )


def _render(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    return str(_apply(tokenizer, turns, tokenize=False))


def _apply(tokenizer: Any, turns: list[dict[str, str]], **options: Any) -> Any:
    template = _CHATML if tokenizer.chat_template is None else None
    try:
        return tokenizer.apply_chat_template(turns, chat_template=template, add_generation_prompt=True, **options)
    except Exception as error:
        # A template is a program out of the checkpoint: whatever it raises is its fault, and a person must hear of it.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise EngineError(
            ErrorCode.MODEL_UNSUPPORTED,
            f"The model's chat template cannot write this conversation ({reason}): check its chat_template or "
            f"tokenizer_config.json, or use another model.",
        ) from error


def _fold_system(turns: list[dict[str, str]]) -> list[dict[str, str]] | None:
    """The turns with every system message at the head of the first user message; `None` if there is no such message."""
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    if not system.strip():
        return None
    rest = [dict(turn) for turn in turns if turn["role"] != "system"]
    first = next((turn for turn in rest if turn["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": system}, *rest]
    first["content"] = f"{system}\n\n{first['content']}"
    return rest


def _is_in(turn: dict[str, str], text: str) -> bool:
    """Whether the template wrote this turn; some drop a system message without a word."""
    return turn["content"].strip() in text


def _types_control_tokens(tokenizer: Any, messages: Sequence[ChatMessage]) -> bool:
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return any(token in message.content for message in messages if message.role != "assistant" for token in special)


def _plain(messages: Sequence[ChatMessage]) -> str:
    turns = [f"{_PLAIN_NAMES[message.role]}: {message.content.strip()}\n" for message in messages]
    return "".join(turns) + "Assistant:"


def _knows_chatml(tokenizer: Any) -> bool:
    return all(token_id(tokenizer, token) is not None for token in ("<|im_start|>", "<|im_end|>"))


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # `verbose=False`: transformers' own warning about long texts says less than PROMPT_TOO_LONG does.
    return _as_ids(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _without_final_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    """Some tokenizers close every text; a prompt must stay open."""
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def _as_ids(ids: Any) -> list[int]:
    return [int(index) for index in ids]
