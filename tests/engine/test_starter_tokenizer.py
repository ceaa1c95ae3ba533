"""The rebuilt tokenizer has the ids of the original."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

PANGRAM = "Grüße, 世界! It's 2026-11-20;\tπ ≈ 3.14159\n\n  def f(x):\n    return x**2  # 🚂"


# What SmolLM2's own tokenizer makes of these, as other programs that run the model have recorded it.
CAPITAL_PROMPT_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
FRENCH = "Quelle est la capitale de la France ? Réponds en une phrase."
FRENCH_IDS = [
    65, 2726, 290, 1264, 2618, 47765, 1121, 367, 2618, 4649, 9148, 428, 2756, 96, 19870, 430, 16520, 8715, 30,
]  # fmt: skip


@pytest.fixture(scope="module")
def raw(starter: Path) -> Tokenizer:
    return Tokenizer.from_file(str(starter / "tokenizer.json"))


@pytest.fixture(scope="module")
def through_transformers(starter: Path) -> Any:
    return AutoTokenizer.from_pretrained(starter)


def test_special_tokens(raw: Tokenizer, through_transformers: Any) -> None:
    assert raw.get_vocab_size() == 49152
    assert [raw.id_to_token(index) for index in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert raw.encode("<|im_start|>user").ids[0] == 1
    assert through_transformers.bos_token_id == 1
    assert through_transformers.eos_token_id == through_transformers.pad_token_id == 2
    assert through_transformers.decode([1, 2, 16, 19556], skip_special_tokens=True) == "Hello"


def test_ids_are_those_of_the_original(raw: Tokenizer, through_transformers: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = through_transformers.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == CAPITAL_PROMPT_IDS
    assert raw.encode(FRENCH).ids == FRENCH_IDS


def test_digits_are_single_tokens(raw: Tokenizer) -> None:
    assert raw.encode("12345 and 678").tokens == ["1", "2", "3", "4", "5", "Ġand", "Ġ", "6", "7", "8"]


def test_every_text_token_has_its_own_id(raw: Tokenizer) -> None:
    """Every token that merges lead to is found again from its own text."""
    vocabulary = raw.get_vocab()
    assert sorted(vocabulary.values()) == list(range(49152))
    model = json.loads(raw.to_str())["model"]
    assert all(left + right in vocabulary for left, right in model["merges"])


def test_transformers_agrees_with_the_file(raw: Tokenizer, through_transformers: Any) -> None:
    assert through_transformers(PANGRAM).input_ids == raw.encode(PANGRAM).ids
    assert raw.decode(raw.encode(PANGRAM).ids) == PANGRAM


@given(st.text(st.characters(min_codepoint=9, max_codepoint=0x24F, exclude_categories=["Cc", "Cs", "Cn"])))
def test_text_comes_back(raw: Tokenizer, text: str) -> None:
    assert raw.decode(raw.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_chat_template(through_transformers: Any) -> None:
    text = through_transformers.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
