"""Text appears token by token, and joined it is what decoding all tokens at once gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.runtime.decode.detokenizer import IncrementalDetokenizer, decode_text, token_bytes
from tests.engine.loaded_tiny import tiny_tokenizer


def _sentencepiece() -> Any:
    """A vocabulary in the manner of Llama 2: spaces as ▁, single bytes for what is not in it."""
    words = ["▁", "▁Hello", "▁world", "Hello", "lo", "▁a", ".", "é", "▁\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


SENTENCEPIECE = _sentencepiece()
BYTE = 3  # the id of <0x00>


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.feed(index) for index in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 319), max_size=60))
@example([0, 0, 5])
def test_byte_level_text_is_complete_for_any_tokens(ids: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    assert "".join(stream(tokenizer, ids)) == decode_text(tokenizer, ids)


@given(st.text(max_size=60))
def test_byte_level_text_arrives_in_whole_characters(text: str) -> None:
    tokenizer = tiny_tokenizer()
    text = text.replace("\N{REPLACEMENT CHARACTER}", "?")
    pieces = stream(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(
    st.lists(
        st.one_of(
            st.integers(259, 267).map(lambda index: [index]),
            st.integers(0, 2).map(lambda index: [index]),
            st.lists(st.integers(0, 255).map(lambda byte: BYTE + byte), min_size=1, max_size=5),
            st.characters(exclude_categories=["Cs"]).map(lambda c: [BYTE + byte for byte in c.encode()]),
        ),
        max_size=12,
    )
)
@example([[259], [260]])
@example([[0], [259], [2], [259]])
def test_sentencepiece_spaces_and_bytes_are_complete(groups: list[list[int]]) -> None:
    ids: list[int] = []
    for group in groups:
        # Runs of up to the length that is held back; see the class for longer ones.
        if sum(BYTE <= index < BYTE + 256 for index in ids[-11:]) + len(group) > 12:
            ids.append(262)
        ids += group
    assert "".join(stream(SENTENCEPIECE, ids)) == decode_text(SENTENCEPIECE, ids)


def test_long_runs_of_byte_tokens_are_shown_as_they_come() -> None:
    text = "这是一个很长的句子" * 4
    pieces = stream(SENTENCEPIECE, [BYTE + byte for byte in text.encode()])
    assert "".join(pieces) == text
    assert sum(bool(piece) for piece in pieces) > 3


def test_a_replacement_character_that_the_model_meant_is_shown() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a\N{REPLACEMENT CHARACTER}b", add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, ids)) == "a\N{REPLACEMENT CHARACTER}b"


def test_the_window_stays_short() -> None:
    tokenizer = tiny_tokenizer()
    seen: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], **kwargs: Any) -> Any:
            seen.append(len(ids))
            return tokenizer.decode(ids, **kwargs)

    ids = tokenizer("The router chooses a few experts for each token. " * 20, add_special_tokens=False)["input_ids"]
    stream(Counting(), ids)
    assert max(seen) <= 4


@pytest.mark.parametrize("special", [0, 1, 2])
def test_special_tokens_are_silent(special: int) -> None:
    assert "".join(stream(tiny_tokenizer(), [special] * 50)) == ""


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), SENTENCEPIECE])
def test_marks_that_are_shown_stand_between_the_texts_around_them(tokenizer: Any) -> None:
    hello = list(tokenizer("Hello world", add_special_tokens=False)["input_ids"])
    detokenizer = IncrementalDetokenizer(tokenizer, shown=(1,))
    ids = [*hello, 1, *hello, 2, 1]
    text = "".join([*(detokenizer.feed(index) for index in ids), detokenizer.flush()])
    mark, plain = str(tokenizer.convert_ids_to_tokens(1)), decode_text(tokenizer, hello)
    assert [part.strip() for part in text.split(mark)] == [plain, plain, ""]


@pytest.mark.parametrize("tokenizer", [tiny_tokenizer(), SENTENCEPIECE])
def test_the_bytes_of_tokens_join_to_their_text(tokenizer: Any) -> None:
    text = "Grüezi, 世界 \U0001f600"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    joined = b"".join(token_bytes(tokenizer, index) for index in ids).decode()
    assert joined.replace(" ", "") == text.replace(" ", "")  # SentencePiece decodes a single word without its space
    assert token_bytes(tokenizer, ids[-1]) == text.encode()[-1:]
