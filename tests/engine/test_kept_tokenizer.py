"""The tokenizer of a GGUF file is built once: found by its header, made again when damaged, gone with its model."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType, GGUFWriter

from engine.checkpoint.gguf import kept_tokenizer as keeping
from engine.checkpoint.gguf.file import read_gguf
from engine.checkpoint.gguf.kept_tokenizer import kept_end_token_ids, kept_tokenizer
from engine.checkpoint.gguf.tokenizer import end_token_ids
from engine.common.errors import ErrorCode
from engine.common.paths import cache_dir
from engine.runtime.load import tokenizer as loading
from engine.runtime.load.tokenizer import load_tokenizer
from engine.untrusted_text.process import UNTRUSTED_TEXT
from tests.engine.test_gguf_tokenizer import CONTROL, HELLO, USER_DEFINED, byte_pairs
from tests.refusals import refused
from tests.tiny_gguf import KEYS, write_mixtral

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
    assert folder is not None
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


def test_those_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_MOST_KEPT", 3)
    files = [write_file(tmp_path / f"{name}.gguf", {**BYTES, "general.name": name}) for name in "abcde"]
    for used, file in enumerate(files[:3]):
        load_tokenizer(file)
        folder = kept_tokenizer(read_gguf(file))
        assert folder is not None
        os.utime(folder, (used, used))
    load_tokenizer(files[0])
    load_tokenizer(files[3])
    assert [kept_tokenizer(read_gguf(file)) is not None for file in files] == [True, False, True, True, False]
    monkeypatch.setattr(keeping, "_MOST_BYTES", 1)
    load_tokenizer(files[4])
    assert [kept_tokenizer(read_gguf(file)) is not None for file in files] == [False] * 4 + [True]
