"""Text appears token by token, whole, and ends where it should: at stop strings and at tokens that end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.common.config import SamplingParams
from engine.runtime.decode.detokenizer import IncrementalDetokenizer, decode_text, token_bytes
from engine.runtime.decode.generation import BatchRequest
from engine.runtime.decode.sequence import Sequence, StopStrings, end_token_ids
from tests.engine.loaded_tiny import tiny_tokenizer

LETTERS = st.text("abc", max_size=30)


def run(pieces: list[str], stop: list[str]) -> tuple[str, bool]:
    stops, shown = StopStrings(stop), ""
    for piece in pieces:
        certain, stopped = stops.feed(piece)
        shown += certain
        if stopped:
            return shown, True
    return shown + stops.flush(), False


def character_by_character(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition: the first character that completes a stop string ends the answer before it."""
    for end in range(1, len(text) + 1):
        lengths = [len(entry) for entry in stop if entry and text[:end].endswith(entry)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(pieces=st.lists(LETTERS, max_size=8), stop=st.lists(st.text("abc", max_size=4), max_size=3))
def test_stop_strings_across_pieces(pieces: list[str], stop: list[str]) -> None:
    assert run(pieces, stop) == character_by_character("".join(pieces), stop)


@given(pieces=st.lists(LETTERS, max_size=8), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_nothing_shown_is_ever_part_of_a_stop_string(pieces: list[str], stop: list[str]) -> None:
    stops, shown = StopStrings(stop), ""
    final, _ = character_by_character("".join(pieces), stop)
    for piece in pieces:
        certain, stopped = stops.feed(piece)
        shown += certain
        assert final.startswith(shown)
        if stopped:
            break


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    assert StopStrings(["STOP"]).feed("hello ST") == ("hello ", False)


def _model(eos: Any, own: Any = None) -> Any:
    config = SimpleNamespace(eos_token_id=eos)
    config.get_text_config = lambda decoder: config
    return SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=own))


def test_end_tokens_are_collected() -> None:
    tokenizer = tiny_tokenizer()
    assert end_token_ids(_model(7, [8, 9]), tokenizer) == {7, 8, 9, 2}


def test_the_templates_end_of_turn_counts_though_no_config_names_it() -> None:
    tokenizer = tiny_tokenizer()
    original = tokenizer.eos_token
    try:
        tokenizer.eos_token = "<|endoftext|>"
        assert end_token_ids(_model(None), tokenizer) == {0, 2}
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        assert end_token_ids(_model(None), tokenizer) == {0}
    finally:
        tokenizer.eos_token = original
        tiny_tokenizer.cache_clear()


def test_gpt_oss_messages_do_not_end_the_answer() -> None:
    vocabulary = {"<|end|>": 5, "<|return|>": 6}
    tokenizer = SimpleNamespace(
        eos_token_id=6,
        convert_tokens_to_ids=vocabulary.get,
        convert_ids_to_tokens={index: token for token, index in vocabulary.items()}.get,
        chat_template="<|end|><|return|>",
    )
    assert end_token_ids(_model(None), tokenizer) == {6}


def _sequence(words: str, *, stop: tuple[str, ...] = (), room: int = 99, **sampling: Any) -> tuple[Sequence, list[int]]:
    tokenizer: Any = tiny_tokenizer()
    ids = tokenizer.encode(words, add_special_tokens=False)
    sequence = Sequence(BatchRequest(0, sampling=SamplingParams(**sampling)))
    sequence.prepared([5], tokenizer, room, frozenset({0}), stop)
    sequence.begin([5])
    return sequence, ids


def test_the_pieces_of_an_answer_are_its_text_and_an_end_token_is_not_shown() -> None:
    sequence, ids = _sequence("one two three")
    pieces = [sequence.take(token) for token in [*ids, 0]]
    assert [reason for _, reason in pieces] == [None] * len(ids) + ["stop"]
    assert "".join(text for text, _ in pieces) == sequence.text
    assert sequence.text.strip() == "one two three"
    assert sequence.ids == [*ids, 0]


def test_what_is_held_back_for_a_stop_string_is_shown_when_the_limit_comes_first() -> None:
    whole, ids = _sequence("one two three")
    for token in ids:
        whole.take(token)
    stop = whole.text[-2:] + "!"
    for room, limit, expected in ((99, len(ids), "length"), (len(ids), 99, "context")):
        sequence, _ = _sequence("one two three", stop=(stop,), room=room, max_tokens=limit)
        for token in ids[:-1]:
            assert sequence.take(token)[1] is None
        assert sequence.take(ids[-1])[1] == expected
        assert sequence.text == whole.text


def test_cancelled_it_shows_what_it_held_back() -> None:
    sequence, ids = _sequence("one two", stop=("two three",))
    for token in ids:
        sequence.take(token)
    assert "two" not in sequence.text
    assert sequence.end("cancelled")[1] == "cancelled"
    assert "two" in sequence.text


def test_a_penalty_counts_what_is_continued_and_what_was_generated() -> None:
    sequence, _ = _sequence("one", repetition_penalty=2.0)
    logits = torch.tensor([[0.0, 0.9, 0.0, 0.0, 0.8, 1.0]])
    assert not sequence.is_greedy
    assert int(sequence.choose(logits)) == 1  # 5 was in the prompt
    sequence.take(1)
    assert int(sequence.choose(logits)) == 4


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
