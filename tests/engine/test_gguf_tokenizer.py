"""Tokenizers of GGUF files: tokens are llama.cpp's, text comes back, and a damaged vocabulary is one sentence."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from benchmarks.peers.editions import LLAMA_CPP
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, end_token_ids, tokenizer_files
from engine.common.errors import EngineError, ErrorCode
from engine.runtime.decode.detokenizer import IncrementalDetokenizer, decode_text
from engine.runtime.load.tokenizer import load_tokenizer
from tests.peers import python_of
from tests.refusals import refused

FILE = Path("model.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# Before a test's own SWITCHYARD_HOME hides the user's.
PEER = python_of(LLAMA_CPP)
VOCABULARIES = sorted((LLAMA_CPP.home() / "source" / "vendor" / "llama.cpp" / "models").glob("ggml-vocab-*.gguf"))
WITH_TEXTS = [file for file in VOCABULARIES if file.with_name(f"{file.name}.inp").exists()]
needs_vocabularies = pytest.mark.skipif(
    not VOCABULARIES or PEER is None, reason="llama.cpp is not built: python -m benchmarks.peers build"
)
PEER_SCRIPT = """
import json, sys
from llama_cpp import Llama
request = json.load(sys.stdin)
model = Llama(request["file"], vocab_only=True, verbose=False)
json.dump([model.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]], sys.stdout)
"""


def byte_pairs(*merges: str, added: Mapping[str, int] | None = None, **keys: object) -> dict[str, object]:
    """The metadata of a vocabulary of all bytes, these merges and these further tokens (with their types)."""
    added = added if added is not None else {"<s>": CONTROL, "</s>": CONTROL}
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens) + list(added.values())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + list(added),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.{key}": value for key, value in keys.items()},
    }


def sentence_pieces(pieces: Mapping[str, float], **keys: object) -> dict[str, object]:
    """The metadata of a vocabulary in the manner of Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": np.array([0.0] * 259 + list(pieces.values()), np.float32),
        **{f"tokenizer.{key}": value for key, value in keys.items()},
    }


HELLO = sentence_pieces(
    {"▁": -9, "H": -8, "e": -7, "l": -6, "o": -5, "ll": -4, "▁H": -3, "llo": -2, "▁He": -1, "é": -10}
)


def backend(metadata: Mapping[str, object]) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(metadata, FILE)["tokenizer.json"])


def loaded(metadata: Mapping[str, object], folder: Path) -> Any:
    for name, content in tokenizer_files(metadata, FILE).items():
        (folder / name).write_text(content, encoding="utf-8")
    return load_tokenizer(folder)


def tokens_of(metadata: Mapping[str, object], text: str) -> list[str]:
    tokens: list[str] = backend(metadata).encode(text, add_special_tokens=False).tokens
    return tokens


def texts_of(file: Path) -> list[str]:
    return file.with_name(f"{file.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")


@pytest.mark.exhaustive
@needs_vocabularies
@pytest.mark.parametrize("file", WITH_TEXTS, ids=lambda file: file.stem)
def test_the_vocabularies_of_llama_cpp(file: Path) -> None:
    """Its own test: texts, and the tokens that the models' original tokenizers made of them."""
    tokenizer = backend(read_gguf(file).metadata)
    expected = file.with_name(f"{file.name}.out").read_text(encoding="utf-8").split("\n")
    for text, ids in zip(texts_of(file), expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(index) for index in ids.split()], text


@pytest.mark.exhaustive
@needs_vocabularies
@pytest.mark.parametrize("file", VOCABULARIES, ids=lambda file: file.stem)
def test_the_tokens_of_llama_cpp_itself(file: Path) -> None:
    tokenizer = backend(read_gguf(file).metadata)
    mixed = "<s>Hello<|endoftext|> <|im_start|>user\n<|eot_id|> </s>  x [MASK]<unk>"
    texts = sorted({text for other in WITH_TEXTS for text in texts_of(other) if text} | {mixed})
    answer = subprocess.run(
        [str(PEER), "-I", "-X", "utf8", "-c", PEER_SCRIPT],
        input=json.dumps({"file": str(file), "texts": texts}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=LLAMA_CPP.environment(),
        check=True,
    )
    for text, ids in zip(texts, json.loads(answer.stdout), strict=True):
        assert tokenizer.encode(text).ids == ids, text


# How each divides this text.  On 341 others, with GPT-2's vocabulary, all make llama.cpp's tokens, but for those whose
# small and capital letters it does not tell apart (tiny_aya, cohere2moe, youtu, kimi-k2) and for rare spaces in
# deepseek-llm and deepseek-coder: there the original tokenizers' regular expressions are used.
SPLIT = "I'LL pay 12345€ for\n\n  two iPhones:  schön!!\n/我想 a_b"
SPLITS = json.loads((Path(__file__).with_name("gguf_splits.json")).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_how_a_pre_tokenizer_splits(name: str) -> None:
    metadata = byte_pairs("a b", added={f"<0x{byte:02X}>": BYTE for byte in range(256)} | {"<s>": CONTROL})
    metadata["tokenizer.ggml.pre"] = name
    tokenizer = backend(metadata)
    assert tokenizer.pre_tokenizer is not None
    text = SPLIT if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(SPLIT)
    pieces = [text[slice(*place)] for _piece, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    assert next(texts for names, texts in SPLITS if name in names) == pieces


def test_a_piece_that_is_a_token_is_not_merged_for_some() -> None:
    metadata = byte_pairs("a b", "b c", "d e", added={"abc": NORMAL})
    assert tokens_of(metadata, "abc") == ["ab", "c"]
    assert tokens_of({**metadata, "tokenizer.ggml.pre": "llama-bpe"}, "abc") == ["abc"]


def test_the_best_pieces_are_made_first() -> None:
    assert tokens_of(HELLO, "Hello") == ["▁He", "llo"]
    assert tokens_of({**HELLO, "tokenizer.ggml.add_space_prefix": False}, "Hello") == ["H", "e", "llo"]


def test_what_is_no_piece_becomes_bytes() -> None:
    assert tokens_of(HELLO, "é ü\n") == ["▁", "é", "▁", "<0xC3>", "<0xBC>", "<0x0A>"]


def test_special_tokens_are_not_made_of_pieces() -> None:
    pieces = dict.fromkeys(["<", "s", ">", "<s", "s>"], -1.0)
    tokenizer = backend(sentence_pieces(pieces))
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>", add_special_tokens=False).ids[-2:] != [1]
    assert 1 not in tokenizer.encode("<s>", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [257]),
        ({"ggml.bos_token_id": 258}, [257]),
        ({"ggml.bos_token_id": 258, "ggml.add_bos_token": True}, [258, 257]),
        ({"ggml.bos_token_id": 258, "ggml.pre": "llama-bpe"}, [258, 257]),
        ({"ggml.bos_token_id": 258, "ggml.pre": "tekken", "ggml.add_bos_token": False}, [257]),
        ({"ggml.eos_token_id": 258, "ggml.add_eos_token": True}, [257, 258]),
        ({"ggml.bos_token_id": 99_999, "ggml.add_bos_token": True}, [257]),
    ],
)
def test_the_tokens_at_the_ends_of_a_text(keys: dict[str, object], expected: list[int], tmp_path: Path) -> None:
    metadata = byte_pairs("a b", "c d", added={"<s>": CONTROL}, **keys)
    tokenizer = loaded(metadata, tmp_path)
    assert tokenizer("cd")["input_ids"] == expected


def test_llama_2_begins_with_its_token_even_if_the_file_does_not_say(tmp_path: Path) -> None:
    tokenizer = loaded(HELLO, tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer("Hello")["input_ids"][0] == 1


def test_control_and_user_defined_tokens(tmp_path: Path) -> None:
    added = {"<|im_end|>": NORMAL, "<tool>": USER_DEFINED, "<s>": CONTROL, "[PAD9]": NORMAL}
    tokenizer = loaded(byte_pairs("a b", added=added), tmp_path)
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert special == {"<|im_end|>": True, "<tool>": False, "<s>": True}
    ids = tokenizer("<s>ab<tool><|im_end|>", add_special_tokens=False)["input_ids"]
    assert ids == [259, 256, 258, 257]
    assert decode_text(tokenizer, ids) == "ab<tool>"


def test_phi_3_tokens_take_the_spaces_after_them() -> None:
    metadata = byte_pairs("a b", added={"<|user|>": CONTROL, "<s>": CONTROL})
    line, space = (backend(metadata).token_to_id(token) for token in "ĊĠ")
    assert backend(metadata).encode("<|user|>\n ab<s> ab").ids == [257, line, space, 256, 258, space, 256]
    metadata["general.name"] = "Phi-3.5-MoE"
    assert backend(metadata).encode("<|user|>\n ab<s> ab").ids == [257, 256, 258, space, 256]


def test_the_tokens_that_end_an_answer() -> None:
    added = dict.fromkeys(["<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|file_sep|>", "stop", "</x>"], CONTROL)
    metadata = byte_pairs("a b", added=added)
    assert end_token_ids(metadata, FILE) == (257, 259, 260, 261)  # not `<|end|>`, after which these go on
    metadata |= {"tokenizer.ggml.eos_token_id": 262, "tokenizer.ggml.eot_token_id": 263}
    assert end_token_ids(metadata, FILE) == (257, 259, 260, 261, 262, 263)


def test_chat_templates(tmp_path: Path) -> None:
    one = loaded(byte_pairs("a b", chat_template="{{ messages }}"), tmp_path)
    assert one.chat_template == "{{ messages }}"
    names = {"chat_template": "A", "chat_template.rag": "B", "chat_templates": ["rag"]}
    several = loaded(byte_pairs("a b", **names), tmp_path)
    assert several.chat_template == {"default": "A", "rag": "B"}


def test_words_of_bert() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "able", "▁!", "▁able"]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * 4,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 1,
    }
    assert backend(metadata).encode("Unable! ablé x").ids == [2, 4, 5, 6, 7, 1, 3]


def test_the_most_probable_pieces() -> None:
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "▁", "a", "b", "▁ab", "▁a"],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * 5,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -4.0, -2.5],
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    assert backend(metadata).encode("  ab   aa ").tokens == ["▁ab", "▁a", "a", "</s>"]


def test_added_tokens_that_look_like_bytes_are_text(tmp_path: Path) -> None:
    """DeepSeek's, which are the characters of bytes that UTF-8 does not have."""
    metadata = byte_pairs("a b")
    types = np.asarray(metadata["tokenizer.ggml.token_type"])
    letters = "ÀÁõö÷øùúûüýþÿ"
    for letter in letters:
        types[backend(metadata).token_to_id(letter)] = USER_DEFINED
    tokenizer = loaded(metadata, tmp_path)
    text = f"schön über é 我 {letters}ab"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids[-3:]) == ["þ", "ÿ", "ab"]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert decode_text(tokenizer, ids) == text == "".join(map(detokenizer.feed, ids))


@settings(max_examples=30)
@given(ids=st.lists(st.integers(0, 258), max_size=40))
@example(ids=[256, 250, 257, 256])
def test_streamed_text_is_that_of_all_tokens(ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = _streaming(tmp_path_factory)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [*(detokenizer.feed(index) for index in ids), detokenizer.flush()]
    text = b"".join(
        bytes(BYTES[character] for character in token)
        for token in tokenizer.convert_ids_to_tokens(ids)
        if token not in ("<s>", "</s>")
    )
    assert "".join(pieces) == decode_text(tokenizer, ids) == text.decode("utf-8", "replace")


@settings(max_examples=30)
@given(text=st.text(max_size=40))
def test_text_comes_back(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = _streaming(tmp_path_factory)
    assert decode_text(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    pieces = backend({**HELLO, "tokenizer.ggml.add_bos_token": False})
    if "▁" not in text:
        assert pieces.decode(pieces.encode(text).ids) == text


_STREAMING: list[Any] = []


def _streaming(folders: pytest.TempPathFactory) -> Any:
    if not _STREAMING:
        _STREAMING.append(loaded(byte_pairs("a b"), folders.mktemp("tokenizer")))
    return _STREAMING[0]


def _byte_alphabet() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTES = _byte_alphabet()


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (ErrorCode.MODEL_UNSUPPORTED, {"pre": "gpt-9"}),
        (ErrorCode.MODEL_UNSUPPORTED, {"model": "rwkv"}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": None}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": 7}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"pre": 7}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": None}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": "abc"}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": ["a", 3]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": ["a", "b", "a"]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": [b"a", b"\xff"]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"tokens": ["a", "\ud800"], "merges": ["a \ud800"]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"token_type": [1, 2]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"token_type": "x"}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"merges": None}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"merges": ["a zz"]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"merges": ["ab"]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"bos_token_id": "one"}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"add_bos_token": 1}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": "llama", "scores": [1.0]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": "llama", "scores": [float("nan")] * 300}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": "llama", "tokens": ["a" * 20_000, "<unk>"], "token_type": [1, 2]}),
        (ErrorCode.CHECKPOINT_DAMAGED, {"model": "t5", "precompiled_charsmap": np.array([9, 0, 0, 0, 1], np.uint8)}),
    ],
)
def test_a_vocabulary_that_cannot_be_used(code: ErrorCode, changes: dict[str, object]) -> None:
    metadata = byte_pairs("a b")
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with refused(code, str(FILE)):
        tokenizer_files(metadata, FILE)


def test_words_without_spaces() -> None:
    """`whitespace` splits at spaces, which are no part of any token, as llama.cpp does it: bytes are `<0x41>` or go."""
    tokens = ["<unk>", "a", "b", "ab", "ü", "<0xC3>", "<0xA9>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "whitespace",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, BYTE, BYTE],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert tokens_of(metadata, "ab  a\n\tb ü é A") == ["ab", "a", "b", "ü", "<0xC3>", "<0xA9>"]


DAMAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 300),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-3, 9), st.floats(), st.binary(max_size=2)), max_size=6),
)
KEYS = st.sampled_from(
    [
        *(
            "model",
            "pre",
            "tokens",
            "token_type",
            "merges",
            "scores",
            "bos_token_id",
            "eos_token_id",
            "unknown_token_id",
        ),
        *("add_bos_token", "add_space_prefix", "precompiled_charsmap", "remove_extra_whitespaces", "cls_token_id"),
    ]
)


@given(
    model=st.sampled_from(["gpt2", "llama", "t5", "bert", "gemma4"]),
    changes=st.dictionaries(KEYS, DAMAGE, max_size=3),
    name=st.text(max_size=3),
)
def test_damaged_metadata_load_or_are_one_sentence(model: str, changes: dict[str, object], name: str) -> None:
    metadata = {**HELLO, "tokenizer.ggml.model": model, "tokenizer.ggml.merges": ["l l"], "general.name": name}
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    try:
        files = tokenizer_files(metadata, FILE)
        end_token_ids(metadata, FILE)
    except EngineError:
        return
    Tokenizer.from_str(files["tokenizer.json"]).encode("Hello é")
