"""A checkpoint's tokenizer is loaded, or refused in one sentence, kept for later, and in the starter the original's."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.checkpoint.gguf import kept_tokenizer as keeping
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.kept_tokenizer import kept_end_token_ids, kept_tokenizer
from engine.checkpoint.gguf.tokenizer import end_token_ids
from engine.common.errors import EngineError, ErrorCode
from engine.common.paths import cache_dir
from engine.runtime.decode.prompt import encode
from engine.runtime.load import tokenizer as loading
from engine.runtime.load.tokenizer import load_tokenizer
from engine.untrusted_text.process import UNTRUSTED_TEXT, RequestLimits
from tests.engine.test_gguf_tokenizer import CONTROL, HELLO, USER_DEFINED, byte_pairs
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.refusals import refused
from tests.tiny_gguf import KEYS, write_mixtral
from tests.untrusted_tokenizers import (
    PANIC_TEXT,
    split_by,
    write_multiplying_tokenizer,
    write_panicking_tokenizer,
    write_tokenizer,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return tmp_path


def refusal(folder: Path) -> EngineError:
    with pytest.raises(EngineError) as caught:
        load_tokenizer(folder)
    assert caught.value.code == ErrorCode.CHECKPOINT_DAMAGED
    assert len(caught.value.message.splitlines()) == 1
    return caught.value


def changed(folder: Path, **values: Any) -> None:
    """Other values in tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_sound_one(folder: Path) -> None:
    assert load_tokenizer(folder).chat_template


@pytest.mark.parametrize(
    "template", [{"a": 1}, [1, 2], 3, [["x"]], [{"name": "default"}], {"default": {"a": "b"}}, [{}]]
)
def test_a_chat_template_that_is_no_text(folder: Path, template: object) -> None:
    changed(folder, chat_template=template)
    refusal(folder)


def test_several_chat_templates_with_names(folder: Path) -> None:
    changed(folder, chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}])
    assert load_tokenizer(folder).chat_template == {"default": "x", "tool_use": "y"}


@pytest.mark.parametrize("parts", [{"pre_tokenizer": split_by("(")}, {"model": {"type": "x"}}, {"added_tokens": [3]}])
def test_a_tokenizer_that_cannot_be_read(folder: Path, parts: dict[str, Any]) -> None:
    write_tokenizer(folder, **parts)
    refusal(folder)


def test_a_tokenizer_that_multiplies(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNTRUSTED_TEXT, "limits", RequestLimits(memory_bytes=200 * 2**20))
    write_multiplying_tokenizer(folder)
    refusal(folder)


def test_a_decoder_that_multiplies(folder: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    write_tokenizer(folder, decoder={"type": "Sequence", "decoders": [replace] * 12})
    refusal(folder)
    chain = [{"type": "Replace", "pattern": {"String": a}, "content": b * 10} for a, b in ("ab", "bc", "cd")]
    write_tokenizer(folder, decoder={"type": "Sequence", "decoders": chain})
    refusal(folder)
    several = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}
    write_tokenizer(folder, decoder=several)
    refusal(folder)


def test_a_tokenizer_that_panics_at_a_prompt(folder: Path) -> None:
    write_panicking_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    with refused(ErrorCode.MODEL_UNSUPPORTED):
        encode(tokenizer, PANIC_TEXT, special=False)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def far_too_big(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes and devices in the file system")
@pytest.mark.parametrize("make", [a_pipe, an_endless_device, far_too_big])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_files_that_are_none(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert name in refusal(folder).message


BYTES = byte_pairs(
    "a b",
    added={"<s>": CONTROL, "<|im_end|>": CONTROL, "<tool>": USER_DEFINED},
    **{"ggml.eos_token_id": 258, "ggml.bos_token_id": 257, "ggml.add_bos_token": True},
    chat_template="{{ messages }}",
)
WORDS = {**BYTES, "tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.ggml.pre": "llama-bpe"}
KINDS = {"byte pairs": BYTES, "two templates": WORDS, "sentence pieces": HELLO}
TEXTS = ("Hello ab<|im_end|>é \n", "<tool><s>")


def write_file(path: Path, metadata: Mapping[str, object]) -> Path:
    general = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
    scores = general.pop("tokenizer.ggml.scores", None)

    def add(writer: GGUFWriter) -> None:
        for name, value in general.items():
            inner = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, GGUFValueType.get_type(value), inner)
        if scores is not None:
            writer.add_token_scores(scores)

    return write_mixtral(path, KEYS, more=add)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path / "model.gguf", BYTES)


def said(tokenizer: Any) -> dict[str, Any]:
    """All that is asked of a tokenizer, here and in the process that reads prompts."""
    ids = [UNTRUSTED_TEXT.encode(tokenizer, text, special=True, cancelled=lambda: False) for text in TEXTS]
    assert ids == [tokenizer(text)["input_ids"] for text in TEXTS]
    return {
        "ids": ids,
        "texts": [tokenizer.decode(each) for each in ids],
        "template": tokenizer.chat_template,
        "special": tokenizer.special_tokens_map,
        "all special": tokenizer.all_special_ids,
        "added": {index: repr(token) for index, token in tokenizer.added_tokens_decoder.items()},
        "bos": tokenizer.bos_token_id,
        "backend": tokenizer.backend_tokenizer.to_str(),
    }


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files of which the tokenizer was built."""
    built, real = [], loading.tokenizer_files

    def files(metadata: Mapping[str, object], path: Path) -> dict[str, str]:
        built.append(path)
        return real(metadata, path)

    monkeypatch.setattr(loading, "tokenizer_files", files)
    return built


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_opening_builds_nothing(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(tmp_path / "model.gguf", KINDS[kind])
    first = said(load_tokenizer(file))
    ends = end_token_ids(KINDS[kind], file)
    monkeypatch.setattr(loading, "tokenizer_files", None)
    monkeypatch.setattr(keeping, "end_token_ids", None)
    assert said(load_tokenizer(file)) == first
    assert kept_end_token_ids(read_gguf(file)) == ends
    assert first["template"] == (
        {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        if kind == "two templates"
        else KINDS[kind].get("tokenizer.chat_template")
    )


def test_a_copy_elsewhere_is_known_and_another_file_is_not(tmp_path: Path, file: Path, builds: list[Path]) -> None:
    load_tokenizer(file)
    (tmp_path / "other").mkdir()
    load_tokenizer(Path(shutil.copy(file, tmp_path / "other" / "renamed.gguf")))
    assert builds == [file]
    other = write_file(tmp_path / "other.gguf", {**BYTES, "tokenizer.chat_template": "another"})
    assert load_tokenizer(other).chat_template == "another"
    assert builds == [file, other]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "kept.json"])
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_one_is_made_again(
    file: Path, builds: list[Path], name: str, damage: Callable[[Path], object]
) -> None:
    first = said(load_tokenizer(file))
    folder = kept_tokenizer(read_gguf(file))
    assert folder is not None
    damage(folder / name)
    assert kept_tokenizer(read_gguf(file)) is None
    assert kept_end_token_ids(read_gguf(file)) == (258,)
    assert said(load_tokenizer(file)) == first
    assert said(load_tokenizer(file)) == first
    assert builds == [file, file]


def test_one_of_another_builder_is_made_again(file: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer(file)
    monkeypatch.setattr(keeping, "_builder", lambda: "another")
    load_tokenizer(file)
    load_tokenizer(file)
    assert builds == [file, file]


@pytest.mark.parametrize("in_the_way", ["tokenizers", "cache"])
def test_where_nothing_can_be_kept_it_is_built_each_time(file: Path, builds: list[Path], in_the_way: str) -> None:
    blocked = cache_dir() if in_the_way == "cache" else cache_dir() / "tokenizers"
    shutil.rmtree(blocked, ignore_errors=True)
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("")
    first = said(load_tokenizer(file))
    assert said(load_tokenizer(file)) == first
    assert builds == [file, file]


@pytest.mark.skipif(os.name == "nt", reason="there are no such modes")
def test_it_is_private(file: Path) -> None:
    load_tokenizer(file)
    folder = kept_tokenizer(read_gguf(file))
    for path in (folder.parent, folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "kept.json"}


def test_what_is_of_no_use_is_not_kept(tmp_path: Path) -> None:
    name = "tokenizer.ggml.precompiled_charsmap"
    metadata = {**HELLO, "tokenizer.ggml.model": "t5", name: [4, 0, 0, 0, 1, 1, 1, 1, 1, 0]}
    file = write_file(tmp_path / "model.gguf", metadata)
    with refused(ErrorCode.CHECKPOINT_DAMAGED, str(file)):
        load_tokenizer(file)
    assert kept_tokenizer(read_gguf(file)) is None


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
