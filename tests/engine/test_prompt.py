"""Conversations become the tokens of their template, and of something sensible where it fails."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import EngineError, ErrorCode
from engine.protocol import ChatMessage
from engine.runtime.prompt import chat_prompt, check_length, implied_stops, template_note
from tests.engine.loaded_tiny import tiny_tokenizer
from tests.engine.tiny_tokenizer import TEMPLATE

CONVERSATION = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "What is Paris?"),
    ChatMessage("assistant", "A capital."),
    ChatMessage("user", "Of what?"),
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
SILENT_ABOUT_SYSTEM = TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if true %}"
).replace(
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n",
    "{% if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endif %}",
)


def written(tokenizer: Any, messages: tuple[ChatMessage, ...] = CONVERSATION) -> str:
    return str(tokenizer.decode(chat_prompt(tokenizer, messages)))


def without_chatml(tokenizer: Any) -> Any:
    """The same tokenizer with other names for its control tokens."""

    class Plain:
        chat_template = None

        def convert_tokens_to_ids(self, token: str) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer(*args, **kwargs)

    return Plain()


def test_the_template_of_the_checkpoint() -> None:
    tokenizer = tiny_tokenizer()
    turns = [{"role": message.role, "content": message.content} for message in CONVERSATION]
    expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert chat_prompt(tokenizer, CONVERSATION) == expected
    assert template_note(tokenizer) == ""
    assert implied_stops(tokenizer) == ()


def test_chatml_stands_in_where_its_tokens_exist() -> None:
    tokenizer = tiny_tokenizer(None)
    assert written(tokenizer) == written(tiny_tokenizer())
    assert "ChatML" in template_note(tokenizer)
    assert implied_stops(tokenizer) == ()


def test_plain_lines_stand_in_elsewhere() -> None:
    tokenizer = without_chatml(tiny_tokenizer(None))
    assert written(tokenizer) == (
        "System: Be brief.\nUser: What is Paris?\nAssistant: A capital.\nUser: Of what?\nAssistant:"
    )
    assert template_note(tokenizer).count(".") == 1
    assert "\nUser:" in implied_stops(tokenizer)


@pytest.mark.parametrize("template", [NO_SYSTEM, SILENT_ABOUT_SYSTEM])
def test_a_system_message_is_never_lost(template: str) -> None:
    text = written(tiny_tokenizer(template))
    assert "<|im_start|>user\nBe brief.\n\nWhat is Paris?<|im_end|>" in text
    assert "system" not in text


def test_a_system_message_alone_is_folded_too() -> None:
    text = written(tiny_tokenizer(NO_SYSTEM), (ChatMessage("system", "Be brief."),))
    assert text.startswith("<|im_start|>user\nBe brief.<|im_end|>")


@pytest.mark.parametrize(
    "template", ["{% for message in messages %}", "{{ messages[9]['content'] + 1 }}", "{{ raise_exception('No.') }}"]
)
def test_a_broken_template_is_explained(template: str) -> None:
    with pytest.raises(EngineError) as caught:
        chat_prompt(tiny_tokenizer(template), CONVERSATION[1:])
    assert caught.value.code == ErrorCode.MODEL_UNSUPPORTED
    assert "chat template" in caught.value.message
    assert "\n" not in caught.value.message
    assert "Paris" not in caught.value.message


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(EngineError):
        chat_prompt(tiny_tokenizer(template), CONVERSATION[1:])


def test_control_tokens_that_a_person_types_stay_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = chat_prompt(tokenizer, (ChatMessage("user", "Say <|im_end|> twice."),))
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert "Say <|im_end|> twice." in tokenizer.decode(ids)


def test_no_message_at_all() -> None:
    with pytest.raises(EngineError) as caught:
        chat_prompt(tiny_tokenizer(), ())
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    check_length(4095, 4096)
    with pytest.raises(EngineError, match=r"5,000 tokens long.*4,096.*905") as caught:
        check_length(5000, 4096)
    assert caught.value.code == ErrorCode.PROMPT_TOO_LONG
